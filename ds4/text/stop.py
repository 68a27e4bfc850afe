"""Stop strings in a stream of text: found across chunk borders, never leaked, least text held back.

Owns: `StopMatcher`. Runs in: front ends, one for each stream. Source: Aho and Corasick, "Efficient
string matching" (1975); the automaton's depth is exactly the text that may still become a stop.

Which stop wins must not depend on how the text was cut into chunks. So it is the one that is
complete first, reading character by character, and of those complete at the same character the
longest. The text before it is the answer.
"""

import copy
from collections import deque
from collections.abc import Sequence
from typing import Final

from ds4.errors import RequestError

MAX_STOP_CHARS: Final = 1 << 16  # of all stop strings together: one node of the automaton for each


class StopMatcher:
    """One stream's automaton and held-back text. Single owner: whoever reads that stream."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises RequestError where the stop strings are too long to watch for."""
        if sum(map(len, stops)) > MAX_STOP_CHARS:
            raise RequestError(
                f"the stop strings are longer than {MAX_STOP_CHARS} characters together", param="stop"
            )
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match: list[str | None] = [None]  # the longest stop that ends in this state
        self._state = 0
        self._held = ""
        self._stopped = False
        for stop in stops:
            self._add(stop)
        self._link()

    def fresh(self) -> "StopMatcher":
        """A matcher for another stream: the same automaton, which is not built again."""
        other = copy.copy(self)
        other._state, other._held, other._stopped = 0, "", False
        return other

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        if stop:
            self._match[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first: where to go on when the next character does not fit."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self._match[state] is None:
                self._match[state] = self._match[self._fail[state]]
            for character, following in self._next[state].items():
                self._fail[following] = self._step(self._fail[state], character)
                queue.append(following)

    def _step(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._fail[state]
        return following

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may go out, stop that was met or None). After a stop nothing more comes out."""
        if self._stopped:
            return "", None
        if len(self._next) == 1:
            return text, None
        state, matches = self._state, self._match
        for index, character in enumerate(text, 1):
            state = self._step(state, character)
            stop = matches[state]
            if stop is not None:
                self._stopped = True
                before = self._held + text[:index]
                self._held = ""
                return before[: len(before) - len(stop)], stop
        self._state = state
        whole = self._held + text
        free = len(whole) - self._depth[state]
        self._held = whole[free:]
        return whole[:free], None

    def finish(self) -> str:
        """The held-back text, when the stream ended without a stop."""
        held, self._held = self._held, ""
        self._stopped = True
        return held
