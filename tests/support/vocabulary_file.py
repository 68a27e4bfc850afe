"""GGUF files that hold a vocabulary and nothing else, for tests of the tokenizer and the template.

Owns: nothing; a function of its arguments. Runs in: tests and tests/vectors/make_tokenizer.py. Written
by the gguf package, so that both our reader and llama.cpp read them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import msgspec

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6


class Token(msgspec.Struct, frozen=True):
    """One entry of a vocabulary; its id is its place in the list."""

    text: str
    type: int = NORMAL
    score: float = 0.0


def byte_tokens() -> list[Token]:
    """The 256 tokens of GPT-2's byte alphabet, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + index) for index in range(256))
    return [Token(chr(byte) if byte in printable else next(others)) for byte in range(256)]


def byte_fallback_tokens() -> list[Token]:
    """SentencePiece's 256 tokens for single bytes."""
    return [Token(f"<0x{byte:02X}>", BYTE) for byte in range(256)]


def write_vocabulary(
    path: Path,
    tokens: Sequence[Token],
    *,
    model: str = "gpt2",
    pre: str | None = None,
    merges: Sequence[str] | None = None,
    types: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the file. `settings` are further `tokenizer.` keys: bool, int or str."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([token.text for token in tokens])
    if types:
        writer.add_token_types([token.type for token in tokens])
    if model == "llama":
        writer.add_token_scores([token.score for token in tokens])
    if merges is not None:
        # The writer leaves out empty arrays; a merge of tokens that do not exist does nothing.
        writer.add_token_merges(list(merges) or ["no such"])
    for key, value in (settings or {}).items():
        name = f"tokenizer.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
