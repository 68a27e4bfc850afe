"""ds4/text/cutting.py: pieces have the ids of the whole, in every vocabulary that is cut at all."""

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.model_file import ModelFile
from ds4.text.cutting import Cutter
from ds4.text.tokenizer import Tokenizer
from ds4.vocabulary import byte_table, read_vocabulary
from tests.support.embedded_model import embedded_model
from tests.support.vocabulary_file import UNKNOWN, Token, byte_tokens, write_vocabulary
from tests.vectors.make_tokenizer import small_bpe, small_spm

VECTORS: Final[dict[str, Any]] = msgspec.json.decode(
    Path(__file__).parents[2].joinpath("vectors", "tokenizer.json").read_bytes()
)
# What expressions of pre-tokenizers tell apart, and the places where a cut may be.
WORDS: Final = (
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "a",
    "the",
    "The",
    "x's",
    "'ll",
    "12",
    "1234",
    "é",
    "\u0301",
    "世界",
)
MORE_WORDS: Final = (
    "ع",
    "🙂",
    ".",
    "...",
    "=>",
    "_",
    "/",
    "\u00a0",
    "\u3000",
    "²",
    "<|im_end|>",
    " and",
    "\nand",
    "。",
)
MIXED: Final = st.lists(st.sampled_from(WORDS + MORE_WORDS), max_size=60).map("".join)
# The committed vocabularies have tokens across every border: these may stay, but for those across a cut.
CROSSING: Final = re.compile("[A-Za-z][\u0120\u2581]|\u010a[^\u010a\u0120\u010d\u0109]|\n\\w")


def not_crossing(tokens: list[str]) -> list[str]:
    kept = [token for token in tokens if not CROSSING.search(token)]
    assert 0.8 * len(tokens) < len(kept) < len(tokens)
    return kept


def cutter_of(path: Path) -> Cutter:
    vocabulary = read_vocabulary(ModelFile.open(path))
    return Cutter(vocabulary, byte_table(vocabulary))


def check(path: Path, num_examples: int = 200) -> None:
    tokenizer, cutter = Tokenizer.from_model(ModelFile.open(path)), cutter_of(path)
    assert len(list(cutter.pieces("one two three", 1))) == 3

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False)

    @settings(max_examples=num_examples, deadline=None)
    @given(MIXED | st.sampled_from(VECTORS["texts"]))
    def same(text: str) -> None:
        pieces = list(cutter.pieces(text, 1))
        assert "".join(pieces) == text
        assert [token_id for piece in pieces for token_id in ids(piece)] == ids(text)

    same()


@pytest.mark.parametrize("pre", sorted(VECTORS["pre"]))
def test_pieces_have_the_ids_of_the_whole_under_every_pre_tokenizer(pre: str, tmp_path: Path) -> None:
    check(small_bpe(tmp_path / "v.gguf", pre, not_crossing(VECTORS["tokens"]), VECTORS["merges"]))


def test_pieces_have_the_ids_of_the_whole_in_sentencepiece(tmp_path: Path) -> None:
    check(small_spm(tmp_path / "v.gguf", not_crossing(VECTORS["pieces"]), space_prefix=False))


def test_pieces_have_the_ids_of_the_whole_in_the_embedded_model() -> None:
    check(embedded_model(), 500)


def test_a_space_before_every_text_is_a_reason_not_to_cut(tmp_path: Path) -> None:
    cutter = cutter_of(small_spm(tmp_path / "v.gguf", VECTORS["pieces"], space_prefix=True))
    assert list(cutter.pieces("one two three", 1)) == ["one two three"]


def test_characters_without_an_id_are_a_reason_not_to_cut(tmp_path: Path) -> None:
    tokens = [Token("<unk>", UNKNOWN), *map(Token, ["\u2581", "\n", "f", "o"])]
    path = write_vocabulary(
        tmp_path / "v.gguf",
        tokens,
        model="llama",
        settings={"ggml.add_space_prefix": False, "ggml.unknown_token_id": 0},
    )
    assert list(cutter_of(path).pieces("f o\n\u0416\u0443", 1)) == ["f o\n\u0416\u0443"]


@pytest.mark.parametrize("crossing", ["a\u0120", "a\u0120b", "\u010aa", "\u010a\u00e4"])
def test_a_token_across_a_cut_is_a_reason_not_to_cut(crossing: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", [*byte_tokens(), Token(crossing)], pre="gpt-2", merges=[])
    assert list(cutter_of(path).pieces("one two\nthree", 1)) == ["one two\nthree"]


def test_a_text_without_places_to_cut_is_one_piece() -> None:
    cutter = cutter_of(embedded_model())
    assert list(cutter.pieces("1 2  3\n\n4" * 9, 1)) == ["1 2  3\n\n4" * 9]
    assert list(cutter.pieces("", 1)) == [""]


def test_pieces_are_little_longer_than_asked_for() -> None:
    text = "word " * 10_000
    pieces = list(cutter_of(embedded_model()).pieces(text, 1000))
    assert {len(piece) for piece in pieces[:-1]} <= {*range(1000, 1006)}
