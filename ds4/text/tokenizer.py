"""Text to ids and back, equal to llama.cpp for every vocabulary we claim.

Owns: `Tokenizer`. Runs in: front ends, one for each process; immutable after construction.
Source: ds4/merger.py does the merging.

Control tokens are cut out here and not in the package: only then can user text be kept apart from a
template's own markers. They are also left out of the package's vocabulary, so that no sequence of
merges and no whole-word rule can produce one from ordinary text.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from ds4.errors import RequestError
from ds4.merger import build_merger
from ds4.model_file import ModelFile
from ds4.text.cutting import Cutter
from ds4.text.markers import MarkerTable
from ds4.vocabulary import TokenType, Vocabulary, byte_table, covers_utf8, read_vocabulary

_WHITE_SPACE: Final = " \t\n\v\f\r"  # what C's isspace strips after Phi-3's markers
# A list of so many ids is freed in some 10 ms, in which every stream of this process stands still.
_MAX_IDS: Final = 1 << 20
_ALONE_CHARS: Final = 4096  # below, the hop to the package's threads costs more than the stall
_WINDOW_CHARS: Final = 1 << 18
# These keep white space that follows them, in the vocabularies that strip it.
_KEEPS_SPACE: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})


class Tokenizer:
    """The vocabulary of one model. Immutable: any number of requests may use it."""

    def __init__(self, model: ModelFile, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes = byte_table(vocabulary)
        controls = vocabulary.control_ids()
        self.markers = MarkerTable(controls)
        self._silent = frozenset(
            token_id
            for token_id, token_type in enumerate(vocabulary.types)
            if token_type in (TokenType.CONTROL, TokenType.UNKNOWN)
        )
        # What an id shows by itself; None for controls and for parts of characters.
        self.texts: Final = [
            None if token_id in self._silent else _whole_text(raw) for token_id, raw in enumerate(self._bytes)
        ]
        self._stripping = (
            frozenset(token_id for text, token_id in controls.items() if text not in _KEEPS_SPACE)
            if vocabulary.strips_after_control
            else frozenset()
        )
        # 0: no bound, because some text would cost nothing
        byte_level = vocabulary.pre_tokenizer is not None and vocabulary.pre_tokenizer.byte_level
        covered = covers_utf8(self._bytes)
        self._max_bytes = max(map(len, self._bytes)) if (covered or byte_level) and not self._stripping else 0
        self._dropped = b"" if covered else self._missing_bytes()
        self._cutter = Cutter(vocabulary, self._bytes)
        self._max_ids = max(_MAX_IDS, model.get_int(model.key("context_length"), _MAX_IDS, low=1))
        self._merger = build_merger(model, vocabulary, add_space_prefix=vocabulary.add_space_prefix)
        self.vocab_size: Final = len(vocabulary.tokens)
        self.bos_id: Final = vocabulary.bos_id
        self.eos_id: Final = vocabulary.eos_id
        self.unknown_id: Final = vocabulary.unknown_id
        self.end_ids: Final = vocabulary.end_ids
        self.add_bos: Final = vocabulary.add_bos

    @classmethod
    def from_model(cls, model: ModelFile) -> "Tokenizer":
        """The tokenizer of `model`. Raises ModelFileError, naming the pre-tokenizer if that is unknown."""
        return cls(model, read_vocabulary(model))

    def _missing_bytes(self) -> bytes:
        """The bytes that a byte-level vocabulary has no id for: it leaves them out of the text."""
        found = {
            raw
            for raw, token_type in zip(self._bytes, self._vocabulary.types, strict=True)
            if token_type in (TokenType.NORMAL, TokenType.UNUSED, TokenType.UNDEFINED)
        }
        return bytes(byte for byte in range(256) if bytes([byte]) not in found)

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            if len(text) < _ALONE_CHARS:
                ids: list[int] = self._merger.encode(text, add_special_tokens=False).ids
            else:
                # Only the batch calls let go of the interpreter lock: a megabyte takes seconds, in which
                # every stream of this process would stand still.
                self._refuse_over(self.min_tokens(text))
                ids = []
                for piece in self._cutter.pieces(text):
                    found = self._merger.encode_batch_fast([piece], add_special_tokens=False)[0]
                    self._refuse_over(len(ids) + len(found))
                    ids += found.ids
        except (UnicodeEncodeError, TypeError):
            raise RequestError("the text contains lone surrogates, which are no Unicode text") from None
        return ids

    def _refuse_over(self, num_ids: int) -> None:
        if num_ids > self._max_ids:
            raise RequestError(
                f"prompt is too long: {num_ids} tokens > {self._max_ids} maximum",
                code="context_length_exceeded",
            )

    def _with_markers(self, text: str) -> list[int]:
        ids: list[int] = []
        done = 0
        for start, end, token_id in self.markers.find(text):
            ids += self._plain(self._between(text[done:start], ids))
            ids.append(token_id)
            self._refuse_over(len(ids))
            done = end
        return ids + self._plain(self._between(text[done:], ids))

    def _between(self, text: str, before: Sequence[int]) -> str:
        text = MarkerTable.unguard(text)
        return text.lstrip(_WHITE_SPACE) if before and before[-1] in self._stripping else text

    def _with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with the BOS that the model wants, and never a second one."""
        bos = self.bos_id
        if bos is None:
            return ids
        num_bos = next((index for index, token_id in enumerate(ids) if token_id != bos), len(ids))
        return [bos] * (1 if num_bos or self.add_bos else 0) + ids[num_bos:]

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of `text`; `parse_special` makes control tokens of their texts, `add_special` adds BOS and EOS.

        Raises RequestError for text that is not Unicode.
        """
        ids = self._with_markers(text) if parse_special else self._plain(text)
        if add_special:
            ids = self._with_bos(ids) if self.add_bos else ids
            if self._vocabulary.add_eos and self.eos_id is not None:
                ids.append(self.eos_id)
        return ids

    def min_tokens(self, text: str) -> int:
        """A lower bound for the number of ids of `text`, in no time: enough to refuse absurd lengths.

        Tokenizing is linear, but a body of the largest size would keep a front end busy for a minute.
        """
        if not self._max_bytes:
            return 0
        num_bytes = len(text)
        if self._dropped:
            num_bytes = sum(
                len(
                    text[start : start + _WINDOW_CHARS]
                    .encode("utf-8", "replace")
                    .translate(None, self._dropped)
                )
                for start in range(0, len(text), _WINDOW_CHARS)
            )
        return -(-num_bytes // self._max_bytes)

    def encode_rendered(self, guarded: str) -> list[int]:
        """Ids of what `ChatTemplate.render` returned: its markers count, guarded user text does not."""
        return self._with_bos(self._with_markers(guarded))

    def token_text(self, token_id: int) -> str:
        """The piece as it stands in the vocabulary; empty for an id outside it."""
        return self._vocabulary.tokens[token_id] if 0 <= token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """What the id adds to the output, perhaps a part of a character; empty for an id outside."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def has_token(self, text: str) -> bool:
        """Whether a piece of the vocabulary reads exactly so. Looks through all of it."""
        return text in self._vocabulary.tokens

    def control_ids_in(self, texts: Iterable[str]) -> frozenset[int]:
        """The control tokens that these texts are made of, where they are."""
        return frozenset(token_id for text in texts for _, _, token_id in self.markers.find(text))

    def is_control(self, token_id: int) -> bool:
        """Whether the id is left out of text, unless special tokens are asked for."""
        return token_id in self._silent

    def decode(self, ids: Iterable[int], *, special: bool) -> str:
        """The text of `ids`, with control tokens if `special`. Bytes that are no UTF-8 become U+FFFD."""
        shown = [token_id for token_id in ids if special or token_id not in self._silent]
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")
        if self._vocabulary.add_space_prefix and shown and shown[0] not in self._silent:
            text = text.removeprefix(" ")  # the one that `encode` put in front
        return text


def _whole_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
