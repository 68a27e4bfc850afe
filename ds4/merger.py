"""The merging machine of a GGUF vocabulary: ordinary text to ids, equal to llama.cpp.

Owns: nothing; `build_merger` makes one. Runs in: front ends, inside their tokenizer, and wherever grammars
are compiled, since text that a grammar forces is spelt as the tokenizer would.
Source: the `tokenizers` package does the merging; how a GGUF vocabulary becomes its configuration
was established by comparison with llama.cpp (tests/vectors/make_tokenizer.py).
"""

from typing import Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ds4.model_file import ModelFile
from ds4.vocabulary import SPACE_MARK, TokenType, Vocabulary

_MAX_PIECE_CHARS: Final = 512  # SentencePiece makes pieces of 16; a hostile file could name megabytes


def build_merger(model: ModelFile, vocabulary: Vocabulary, *, add_space_prefix: bool) -> tokenizers.Tokenizer:
    """The merging machine for ordinary text: user-defined tokens whole, control tokens unknown to it.

    `add_space_prefix`: SentencePiece's space before the whole. Raises ModelFileError.
    """
    try:
        return _build(model, vocabulary, add_space_prefix)
    except Exception as error:  # noqa: BLE001 - the package raises nothing narrower
        raise model.fault(f"the vocabulary cannot be used: {error}") from None


def _build(model: ModelFile, vocabulary: Vocabulary, add_space_prefix: bool) -> tokenizers.Tokenizer:
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
        prefix = [normalizers.Prepend(SPACE_MARK)] if add_space_prefix else []
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
