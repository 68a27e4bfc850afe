"""Control tokens in text: where they are, and how user text is kept from becoming one.

Owns: `MarkerTable`. Runs in: front ends. Source: this project.

A chat template mixes its own markers (`<|im_start|>`) with what users wrote, and the result is one
string. So that a user who types a marker gets its letters and not its meaning, user text is
*guarded* before it enters the template: a noncharacter is put after the first character of every
marker in it. No marker matches across it, wherever the template moves the text, and it is taken
out again before the plain text is tokenized.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final

GUARD: Final = "\ufdd0"  # a Unicode noncharacter: never valid in interchanged text
_REPLACEMENT: Final = "\ufffd"
# One character cannot be broken up by a guard; hundreds are no marker that a template writes.
_MIN_CHARS: Final = 2
_MAX_CHARS: Final = 512
# A search keeps the interpreter lock until it finds something.
_WINDOW_CHARS: Final = 1 << 18


def _begins_one(sorted_texts: list[str], head: str) -> bool:
    """Whether `head` is a proper prefix of one of the texts."""
    index = bisect_left(sorted_texts, head)
    if index < len(sorted_texts) and sorted_texts[index] == head:
        index += 1
    return index < len(sorted_texts) and sorted_texts[index].startswith(head)


class MarkerTable:
    """The control tokens of one vocabulary, by their text. Immutable."""

    def __init__(self, markers: Mapping[str, int]) -> None:
        self._ids = {text: id_ for text, id_ in markers.items() if _MIN_CHARS <= len(text) <= _MAX_CHARS}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        self._sorted = sorted(self._ids)
        self._sorted_reversed = sorted(text[::-1] for text in self._ids)
        self._max_chars = max(map(len, self._ids), default=0)
        firsts = "".join(sorted({text[0] for text in self._ids}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def _longest_at(self, text: str, index: int) -> int:
        """Length of the longest marker that starts at `index`, else 0."""
        for length in self._lengths.get(text[index : index + 2], ()):
            if text[index : index + length] in self._ids:
                return length
        return 0

    def _starts(self, text: str) -> Iterator[int]:
        """Where a marker could start: `_first` is one character, so no match lies across two windows."""
        if self._first is not None:
            for begin in range(0, len(text), _WINDOW_CHARS):
                for match in self._first.finditer(text, begin, begin + _WINDOW_CHARS):
                    yield match.start()

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of each marker, leftmost first, the longest where several start."""
        end = 0
        for start in self._starts(text):
            if start >= end and (length := self._longest_at(text, start)):
                end = start + length
                yield start, end, self._ids[text[start:end]]

    def guard(self, text: str) -> str:
        """`text` with every marker in it broken, and every piece that its neighbours could complete."""
        text = text.replace(GUARD, _REPLACEMENT)
        if self._first is None or not text:
            return text
        pieces: list[str] = []
        if any(
            _begins_one(self._sorted_reversed, text[:length][::-1])
            for length in range(1, min(len(text) + 1, self._max_chars))
        ):
            pieces.append(GUARD)  # the template could write the first half
        done = 0
        for index in self._starts(text):
            unfinished = len(text) - index < self._max_chars and _begins_one(self._sorted, text[index:])
            if unfinished or self._longest_at(text, index):
                pieces += (text[done : index + 1], GUARD)
                done = index + 1
        return "".join(pieces) + text[done:]

    @staticmethod
    def unguard(text: str) -> str:
        """The text as its writer meant it."""
        return text.replace(GUARD, "")
