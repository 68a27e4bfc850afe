"""The vocabulary of a GGUF file: which id means which bytes, and which ids are special.

Owns: `Vocabulary`. Runs in: front ends, for their tokenizer, and the worker, whose grammars need the
bytes of every id. Source: the `tokenizer.ggml.*` keys of the GGUF specification; the defaults of each
tokenizer model and the list of end markers follow llama.cpp's `llama-vocab.cpp`, GPT-2's byte alphabet
follows OpenAI's encoder.py.
"""

import logging
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final

import msgspec

from ds4.model_file import ModelFile
from ds4.pretokenizers import PRE_TOKENIZERS, PreTokenizer

logger = logging.getLogger(__name__)

SPACE_MARK: Final = "\u2581"  # SentencePiece's visible space


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts that end a turn or a document wherever they exist as control or user-defined tokens.
END_MARKERS: Final = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<eos>",
        "</s>",
        "<turn|>",
        "<|tool_response>",
        "[e~[",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
# Code models go on with another file after these: they end an answer too.
_FILE_MARKERS: Final = (
    ("fim_pad", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep", ("<|file_sep|>",)),
)
# Conversions that forgot the control type are common enough for these to count whatever their type.
# The others do not: "</s>" is an ordinary word in Qwen's vocabulary, and closes a tag in HTML.
_UNMISTAKABLE: Final = ("<|", "<\uff5c", "<end_of_")
# Where both of a pair exist (gpt-oss, Solar), "<|end|>" closes one of several parts of an answer.
_PARTS: Final = (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"), ("<|call|>", "<|flush|>"))


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about ids that is not the merge procedure. Lists are indexed by id, never changed."""

    tokens: list[str]
    types: list[int]
    scores: list[float]  # empty but for SentencePiece
    model: str  # gpt2, llama or gemma4
    pre_tokenizer: PreTokenizer | None  # None: SentencePiece
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    end_ids: frozenset[int]
    strips_after_control: bool  # Phi-3: white space after a marker is not part of the text

    def control_ids(self) -> dict[str, int]:
        """Control tokens by text. The lowest id wins where a text appears twice."""
        found: dict[str, int] = {}
        for token_id, token_type in enumerate(self.types):
            if token_type in (TokenType.CONTROL, TokenType.UNKNOWN):
                found.setdefault(self.tokens[token_id], token_id)
        return found


def read_vocabulary(model: ModelFile) -> Vocabulary:
    """The vocabulary of `model`. Raises ModelFileError naming what we do not support."""
    kind = model.get_str("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise model.fault(f"the tokenizer model {kind!r} is not supported; gpt2 (BPE), llama and gemma4 are")
    pre_tokenizer = None if kind == "llama" else _pre_tokenizer(model, kind)
    tokens = model.get_list("tokenizer.ggml.tokens", str)
    if not tokens:
        raise model.fault("the vocabulary is empty")
    types = list(model.get_list("tokenizer.ggml.token_type", int, []))
    has_types = bool(types)
    if not has_types:
        types = [int(TokenType.NORMAL)] * len(tokens)
    scores = _scores(model) if kind == "llama" else []
    if len(types) != len(tokens) or (kind == "llama" and len(scores) != len(tokens)):
        raise model.fault(f"{len(tokens)} tokens, but {len(types)} token types and {len(scores)} scores")
    is_spm = kind == "llama"
    ids = _IdReader(model, tokens)
    bos_id = ids.get("bos", 1 if is_spm else None)
    eos_id = ids.get("eos", 2 if is_spm else None)
    if not has_types:
        for special in (bos_id, eos_id):
            if special is not None:
                types[special] = TokenType.CONTROL
    default_bos = is_spm or (pre_tokenizer is not None and pre_tokenizer.add_bos)
    # Gemma 4 files say false and mean true (llama.cpp pull request 21500).
    add_bos = kind == "gemma4" or model.get_bool("tokenizer.ggml.add_bos_token", default_bos)
    end_ids = _end_ids(ids, tokens, types, eos_id)
    return Vocabulary(
        tokens=tokens,
        types=types,
        scores=scores,
        model=kind,
        pre_tokenizer=pre_tokenizer,
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=ids.get("unknown", 0 if is_spm else None),
        add_bos=add_bos and bos_id is not None,
        add_eos=model.get_bool("tokenizer.ggml.add_eos_token", False) and eos_id is not None,
        add_space_prefix=is_spm and model.get_bool("tokenizer.ggml.add_space_prefix", True),
        end_ids=end_ids,
        strips_after_control=any(name in model.name.lower() for name in ("phi-3", "phi3")),
    )


def _pre_tokenizer(model: ModelFile, kind: str) -> PreTokenizer:
    name = "gemma4" if kind == "gemma4" else model.get_str("tokenizer.ggml.pre", "")
    if not name:
        logger.warning("the model file names no pre-tokenizer; a general one is used, answers may suffer")
        name = "default"
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise model.fault(f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is unknown; known are: {known}")
    return found


def _scores(model: ModelFile) -> list[float]:
    key = "tokenizer.ggml.scores"
    value = model.metadata.get(key)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return [float(score) for score in model.get_list(key, int)]
    return model.get_list(key, float)


class _IdReader:
    """Special ids from the metadata; an id outside the vocabulary counts as absent."""

    def __init__(self, model: ModelFile, tokens: Sequence[str]) -> None:
        self._model = model
        self._num_tokens = len(tokens)

    def get(self, name: str, default: int | None = None) -> int | None:
        token_id = self._model.get_int(f"tokenizer.ggml.{name}_token_id", -1 if default is None else default)
        return token_id if 0 <= token_id < self._num_tokens else None


def _end_ids(ids: _IdReader, tokens: Sequence[str], types: list[int], eos_id: int | None) -> frozenset[int]:
    """Ids that end an answer. Marks them as control tokens in `types`, which some files forget."""
    wanted = END_MARKERS.union(*(texts for _, texts in _FILE_MARKERS))
    found: dict[str, int] = {}
    for token_id, text in enumerate(tokens):
        if text not in wanted:
            continue
        is_special = types[token_id] in (TokenType.CONTROL, TokenType.USER_DEFINED)
        if is_special or (text not in found and text.startswith(_UNMISTAKABLE)):
            found[text] = token_id
    ends = {found[text] for text in found.keys() & END_MARKERS}
    for name, texts in _FILE_MARKERS:
        declared = ids.get(name)
        ends.update([declared] if declared is not None else [found[text] for text in texts if text in found])
    for token_id in ends:
        types[token_id] = TokenType.CONTROL
    if any(first in found and second in found for first, second in _PARTS):
        ends.discard(found.get("<|end|>", -1))
    named = (eos_id, ids.get("eot"), ids.get("eom"))
    return frozenset(ends | {token_id for token_id in named if token_id is not None})


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def covers_utf8(table: Iterable[bytes]) -> bool:
    """Whether every byte that UTF-8 can hold is an id of its own: then no text is dropped or folded."""
    return {bytes([byte]) for byte in range(0xF5) if byte not in (0xC0, 0xC1)}.issubset(table)


def byte_table(vocabulary: Vocabulary) -> list[bytes]:
    """What each id adds to the output: text as UTF-8, perhaps a part of a character."""
    alphabet = _byte_alphabet()
    byte_level = vocabulary.pre_tokenizer is not None and vocabulary.pre_tokenizer.byte_level
    table: list[bytes] = []
    for text, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token_type == TokenType.BYTE and len(text) == 6 and text.startswith("<0x"):
            try:
                table.append(bytes.fromhex(text[3:5]))
                continue
            except ValueError:
                pass
        if token_type in (TokenType.NORMAL, TokenType.UNUSED, TokenType.UNDEFINED):
            if not byte_level:
                table.append(text.replace(SPACE_MARK, " ").encode())
                continue
            try:
                table.append(bytes([alphabet[character] for character in text]))
                continue
            except KeyError:
                pass  # not in the alphabet: a text that was added as it is
        table.append(text.encode())
    return table
