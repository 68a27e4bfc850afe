"""Where a long text may be cut so that its pieces have the same ids as the whole.

Owns: `Cutter`. Runs in: front ends, inside their tokenizer; immutable. Source: this project.

The ids of a megabyte are one list out of one object. While that list is made, and when the object goes,
the interpreter lock is held for some 10 ms, in which every stream of the process stands still. So long
texts are tokenized in pieces.

BPE joins across a cut only what becomes a token there. Cuts lie between a letter and a space that another
letter follows, or between a line feed and a letter: pre-tokenizers cut there too, or look no further, and
next to no vocabulary has a token that crosses one. Where one has, as SuperBPE does, nothing is cut.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from ds4.vocabulary import TokenType, Vocabulary, covers_utf8

WINDOW_CHARS: Final = 1 << 16
# Behind the match is the cut. One line feed after something else: of more, a pre-tokenizer leaves the last
# one to what follows.
_CUT: Final = re.compile(r"[A-Za-z](?= [A-Za-z])|\S\n(?=[^\W\d_])")
_CUT_CHARS: Final = 3  # that it looks at
_CROSSES: Final = re.compile(r"[A-Za-z] |\n(?:[^\W\d_]|\ufffd)")  # U+FFFD: of a character, a part


class Cutter:
    """Cuts texts for one vocabulary, whose ids stand for `token_bytes`."""

    def __init__(self, vocabulary: Vocabulary, token_bytes: Sequence[bytes]) -> None:
        byte_level = vocabulary.pre_tokenizer is not None and vocabulary.pre_tokenizer.byte_level
        # Without a token for every byte, characters without one become one unknown id together.
        is_divisible = byte_level or covers_utf8(token_bytes)
        self._can_cut = (
            is_divisible
            and not vocabulary.add_space_prefix
            and not any(
                _CROSSES.search(raw.decode("utf-8", "replace"))
                for raw, token_type in zip(token_bytes, vocabulary.types, strict=True)
                if token_type != TokenType.CONTROL  # a text is cut at these before
            )
        )

    def pieces(self, text: str, window_chars: int = WINDOW_CHARS) -> Iterator[str]:
        """`text` in pieces of little more than `window_chars`, where it has places to cut."""
        begin = 0
        end = window_chars if self._can_cut else len(text)
        while end < len(text):
            # No search goes on for long: it holds the interpreter lock until it finds something.
            if found := _CUT.search(text, end, end + window_chars + _CUT_CHARS):
                yield text[begin : found.end()]
                begin = found.end()
                end = begin
            end += window_chars
        yield text[begin:]
