"""Text to ids and back, equal to llama.cpp for every vocabulary we claim.

Owns: `Tokenizer`. Runs in: front ends, one for each process; immutable after construction.
Source: the `tokenizers` package does the merging; how a GGUF vocabulary becomes its configuration
was established by comparison with llama.cpp (tests/vectors/make_tokenizer.py).

Control tokens are cut out here and not in the package: only then can user text be kept apart from a
template's own markers. They are also left out of the package's vocabulary, so that no sequence of
merges and no whole-word rule can produce one from ordinary text.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ds4.errors import RequestError
from ds4.model_file import ModelFile
from ds4.text.markers import MarkerTable
from ds4.vocabulary import SPACE_MARK, TokenType, Vocabulary, byte_table, covers_utf8, read_vocabulary

_WHITE_SPACE: Final = " \t\n\v\f\r"  # what C's isspace strips after Phi-3's markers
_ALONE_CHARS: Final = 4096  # below, the hop to the package's threads costs more than the stall
_MAX_PIECE_CHARS: Final = 512  # SentencePiece makes pieces of 16; a hostile file could name megabytes
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
        self._stripping = (
            frozenset(token_id for text, token_id in controls.items() if text not in _KEEPS_SPACE)
            if vocabulary.strips_after_control
            else frozenset()
        )
        # 0: no bound, because some text would cost nothing
        covered = covers_utf8(self._bytes) and not self._stripping
        self._max_bytes = max(map(len, self._bytes)) if covered else 0
        try:
            self._merger = _build(model, vocabulary)
        except Exception as error:  # noqa: BLE001 - the package raises nothing narrower
            raise model.fault(f"the vocabulary cannot be used: {error}") from None
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

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            if len(text) < _ALONE_CHARS:
                ids: list[int] = self._merger.encode(text, add_special_tokens=False).ids
            else:
                # Only the batch calls let go of the interpreter lock: a megabyte takes seconds, in which
                # every stream of this process would stand still.
                ids = self._merger.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):
            raise RequestError("the text contains lone surrogates, which are no Unicode text") from None
        return ids

    def _with_markers(self, text: str) -> list[int]:
        ids: list[int] = []
        done = 0
        for start, end, token_id in self.markers.find(text):
            ids += self._plain(self._between(text[done:start], ids))
            ids.append(token_id)
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
        return -(-len(text) // self._max_bytes) if self._max_bytes else 0

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


def _build(model: ModelFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The merging machine for ordinary text: user-defined tokens whole, control tokens unknown to it."""
    ids: dict[str, int] = {}
    for token_id, (text, token_type) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if text and token_type not in (TokenType.CONTROL, TokenType.UNKNOWN):
            ids.setdefault(text, token_id)
    pre_tokenizer = vocabulary.pre_tokenizer
    if pre_tokenizer is not None and pre_tokenizer.byte_level:
        merger = tokenizers.Tokenizer(
            models.BPE(vocab=ids, merges=_merges(model, ids), ignore_merges=pre_tokenizer.ignore_merges)
        )
        merger.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), "isolated") for split in pre_tokenizer.splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        merger.decoder = decoders.ByteLevel()
    else:
        merges = _merges(model, ids) if pre_tokenizer is not None else _merges_by_score(vocabulary, ids)
        unknown = None
        if vocabulary.unknown_id is not None:
            unknown = vocabulary.tokens[vocabulary.unknown_id]
            ids[unknown] = vocabulary.unknown_id
        merger = tokenizers.Tokenizer(
            models.BPE(vocab=ids, merges=merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
        )
        spaces = normalizers.Replace(" ", SPACE_MARK)
        prefix = [normalizers.Prepend(SPACE_MARK)] if vocabulary.add_space_prefix else []
        merger.normalizer = normalizers.Sequence([*prefix, spaces])
        if pre_tokenizer is not None:
            merger.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(split), "isolated") for split in pre_tokenizer.splits]
            )
    merger.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if token_type == TokenType.USER_DEFINED and text
        ]
    )
    return merger


def _merges(model: ModelFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The file's merge list, without the entries that lead to a token that does not exist."""
    merges = []
    for merge in model.get_list("tokenizer.ggml.merges", str):
        space = merge.find(" ", 1)  # the first character may itself be a space
        left, right = merge[:space], merge[space + 1 :]
        if space > 0 and left in ids and right in ids and left + right in ids:
            merges.append((left, right))
    return merges


def _merges_by_score(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece has no merge list: it joins the pair whose whole has the best score.

    So every way to cut a piece into two pieces is a merge, ranked by the score of the whole.
    """
    scores, types = vocabulary.scores, vocabulary.types
    pieces = {
        text: token_id
        for text, token_id in ids.items()
        if types[token_id] != TokenType.BYTE and len(text) <= _MAX_PIECE_CHARS
    }
    ranked: list[tuple[float, int, int, str]] = []
    for text, token_id in pieces.items():
        ranked += [
            (-scores[token_id], token_id, cut, text)
            for cut in range(1, len(text))
            if text[:cut] in pieces and text[cut:] in pieces
        ]
    ranked.sort()
    return [(text[:cut], text[cut:]) for _, _, cut, text in ranked]
