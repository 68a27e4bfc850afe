"""Text that is still arriving, read by generators as if it were all there.

Owns: `ArrivingText`, `Markers`. Runs in: front ends, one for each stream. Source: this project.

A parser of model output must not depend on how the text was cut into tokens. So it is written as
straight code over these primitives: each decides from the text alone, and waits (yields) as long as
further text could change the decision. How the text was cut can then only move the waiting.
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import Final, TypeVar

_T = TypeVar("_T")
# A generator that yields while it waits for text, and returns what it found.
Waiting = Generator[None, None, _T]
Emit = Callable[[str], None]

SPACE: Final = " \t\r\n"
# Text that might still become a call is held back; so much of it at most.
MAX_HELD_CHARS: Final = 1 << 16
_MAX_AHEAD_CHARS: Final = 1 << 13
# White space before a marker belongs to the format, not to the text; so much of it at most.
MAX_TRIMMED_CHARS: Final = 256


class Markers:
    """Some texts to look for, none of them part of another. Immutable."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts: Final = tuple(dict.fromkeys(texts))
        assert all(text for text in self.texts), "an empty marker is everywhere"
        longest_first = sorted(self.texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        firsts = "".join(sorted({text[0] for text in self.texts}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self._beginnings = {text[:length] for text in self.texts for length in range(1, len(text))}
        self._max_chars = max(map(len, self.texts), default=1)

    def search(self, text: str, start: int) -> re.Match[str] | None:
        """The first marker at or after `start`."""
        return self._pattern.search(text, start)

    def match(self, text: str, start: int) -> re.Match[str] | None:
        """The marker that begins exactly at `start`."""
        return self._pattern.match(text, start)

    def may_begin(self, text: str, start: int) -> bool:
        """Whether the text from `start` on, cut off where it ends, may become a marker."""
        if len(text) - start >= self._max_chars:
            return False
        return start == len(text) or text[start:] in self._beginnings

    def unfinished(self, text: str, start: int) -> int:
        """Where in `text` a marker begins that the end cuts off; the length of `text` where none does."""
        first = self._first.search(text, max(start, len(text) - self._max_chars + 1))
        while first is not None:
            if text[first.start() :] in self._beginnings:
                return first.start()
            first = self._first.search(text, first.start() + 1)
        return len(text)


class ArrivingText:
    """One stream's unread text. Written by `push` and `end`, read by one generator."""

    def __init__(self) -> None:
        self.is_ended = False
        self.is_cut = False  # at the end something was missing
        self.is_starved = False  # something was wanted that lies after the end
        self.trimmed = ""  # the white space that the last `until` did not pass on
        self._text = ""
        self._at = 0
        self._mark: int | None = None

    def push(self, text: str) -> None:
        """More text."""
        done = self._at if self._mark is None else self._mark
        self._text = self._text[done:] + text
        self._at -= done
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """Nothing more comes."""
        self.is_ended = True

    def mark(self) -> None:
        """Remember this place."""
        self._mark = self._at

    def rewind(self) -> None:
        """Go back to the remembered place, and forget it."""
        assert self._mark is not None, "no place was remembered"
        self._at, self._mark = self._mark, None

    def forget_mark(self) -> None:
        """Let the text before this place go."""
        self._mark = None

    @property
    def is_too_long(self) -> bool:
        """Whether more was read since `mark` than may be held back."""
        return self._mark is not None and self._at - self._mark > MAX_HELD_CHARS

    def more(self) -> Waiting[bool]:
        """Wait for text; False at the end, and where more than enough is held back already."""
        if self.is_ended:
            self.is_starved = True
            return False
        # Longer than any look-ahead: whoever is refused here has read too much to begin a call.
        if self._mark is not None and len(self._text) - self._mark > MAX_HELD_CHARS + _MAX_AHEAD_CHARS:
            return False
        yield
        return True

    def peek(self, count: int = 1) -> Waiting[str]:
        """The next characters, fewer only at the end; they stay unread."""
        while len(self._text) - self._at < count:
            if not (yield from self.more()):
                break
        return self._text[self._at : self._at + count]

    def take(self, count: int = 1) -> Waiting[str]:
        """The next characters, fewer only at the end."""
        taken = yield from self.peek(count)
        self._at += len(taken)
        return taken

    def skip(self, characters: str) -> Waiting[None]:
        """Read over all that follows of these characters."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in characters:
                    return
                self._at += 1
            if not (yield from self.more()):
                return

    def take_run(self, run: re.Pattern[str], max_chars: int) -> Waiting[str | None]:
        """All that `run` matches from here; None where that is more than `max_chars`."""
        while True:
            match = run.match(self._text, self._at)
            end = match.end() if match is not None else self._at
            if end - self._at > max_chars:
                return None
            if end < len(self._text) or not (yield from self.more()):
                taken = self._text[self._at : end]
                self._at = end
                return taken

    def available(self, run: re.Pattern[str]) -> str:
        """What `run` matches of the text that is there; may be empty, and more may follow."""
        match = run.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match.group()

    def marker(self, markers: Markers) -> Waiting[str | None]:
        """Read the marker that stands here; None, and nothing read, where none does."""
        while True:
            match = markers.match(self._text, self._at)
            if match is not None:
                self._at = match.end()
                return match.group()
            if not markers.may_begin(self._text, self._at) or not (yield from self.more()):
                return None

    def literal(self, text: str) -> Waiting[bool]:
        """Read `text` if it stands here."""
        for length in range(1, len(text) + 1):
            if (yield from self.peek(length)) != text[:length]:
                return False
        self._at += len(text)
        return True

    def until(self, markers: Markers, emit: Emit, *, trims: bool = False) -> Waiting[str | None]:
        """Pass text on up to a marker, which is read and returned; None at the end.

        `trims`: white space right before the marker is not passed on.
        """
        while True:
            match = markers.search(self._text, self._at)
            if match is not None:
                stop = self._trimmed(match.start()) if trims else match.start()
                if stop > self._at:
                    emit(self._text[self._at : stop])
                self.trimmed = self._text[stop : match.start()]
                self._at = match.end()
                return match.group()
            stop = len(self._text)
            if not self.is_ended:
                stop = markers.unfinished(self._text, self._at)
                stop = self._trimmed(stop) if trims else stop
            if stop > self._at:
                emit(self._text[self._at : stop])
                self._at = stop
            if not (yield from self.more()):
                return None

    def _trimmed(self, stop: int) -> int:
        body = self._text[max(self._at, stop - MAX_TRIMMED_CHARS) : stop]
        return stop - len(body) + len(body.rstrip(SPACE))
