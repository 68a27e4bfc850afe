"""The tokenizer against llama.cpp's ids (tests/vectors/tokenizer.json), and the rules for special tokens."""

import logging
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import ModelFileError, RequestError
from ds4.model_file import ModelFile
from ds4.pretokenizers import PRE_TOKENIZERS
from ds4.text.tokenizer import Tokenizer
from tests.support.embedded_model import embedded_model
from tests.support.vocabulary_file import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Token,
    byte_fallback_tokens,
    byte_tokens,
    write_vocabulary,
)
from tests.vectors.make_tokenizer import small_bpe, small_spm

VECTORS: Final[dict[str, Any]] = msgspec.json.decode(
    Path(__file__).parents[2].joinpath("vectors", "tokenizer.json").read_bytes()
)
TEXTS: Final[list[str]] = VECTORS["texts"]
NUM_BYTES: Final = 256


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_model(ModelFile.open(path))


def chat_vocabulary(tmp_path: Path, **settings: Any) -> Tokenizer:
    """256 bytes, then <bos>, <|im_start|>, <|im_end|>, a user-defined and two merged tokens."""
    tokens = [
        *byte_tokens(),
        Token("<bos>", CONTROL),
        Token("<|im_start|>", CONTROL),
        Token("<|im_end|>", CONTROL),
        Token("<think>", USER_DEFINED),
        Token("ab"),
        Token("abc"),
    ]
    settings = {"ggml.bos_token_id": 256, "ggml.eos_token_id": 258} | settings
    path = write_vocabulary(
        tmp_path / "chat.gguf", tokens, pre="gpt-2", merges=["a b", "ab c"], settings=settings
    )
    return load(path)


@pytest.mark.parametrize("pre", sorted(VECTORS["pre"]))
def test_ids_are_llama_cpps_for_every_pre_tokenizer(pre: str, tmp_path: Path) -> None:
    tokenizer = load(small_bpe(tmp_path / "v.gguf", pre, VECTORS["tokens"], VECTORS["merges"]))
    for text, ids in zip(TEXTS, VECTORS["pre"][pre], strict=True):
        if ids is not None:  # null: llama.cpp only approximates the model's own expression there
            assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, text


def test_every_claimed_pre_tokenizer_has_vectors() -> None:
    with_vectors = {id(PRE_TOKENIZERS[name]) for name in VECTORS["pre"]}
    claimed = {id(entry) for entry in PRE_TOKENIZERS.values() if entry.byte_level}
    assert claimed == with_vectors


@pytest.mark.parametrize("space_prefix", [True, False])
def test_ids_are_llama_cpps_for_sentencepiece(space_prefix: bool, tmp_path: Path) -> None:
    tokenizer = load(small_spm(tmp_path / "v.gguf", VECTORS["pieces"], space_prefix=space_prefix))
    for text, ids in zip(TEXTS, VECTORS["spm"][str(space_prefix).lower()], strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, text


def test_ids_of_the_embedded_model_are_llama_cpps() -> None:
    tokenizer = load(embedded_model())
    for text, ids in zip(TEXTS, VECTORS["smollm"], strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=True) == ids, text


def test_gemma_4_vocabularies_merge_utf_8_and_fall_back_to_bytes(tmp_path: Path) -> None:
    tokens = [
        Token("<pad>", CONTROL),
        Token("<eos>", CONTROL),
        Token("<bos>", CONTROL),
        Token("<unk>", UNKNOWN),
        *byte_fallback_tokens(),
        *map(Token, ["\u2581", "h", "i", "hi", "\u2581hi", "\n", "\n\n"]),
    ]
    path = write_vocabulary(
        tmp_path / "v.gguf",
        tokens,
        model="gemma4",
        merges=["h i", "\u2581 hi", "\n \n"],
        settings={"ggml.bos_token_id": 2, "ggml.unknown_token_id": 3, "ggml.add_bos_token": False},
    )
    tokenizer = load(path)
    first = 4 + NUM_BYTES
    ids = tokenizer.encode("hi hi\n\né", add_special=True, parse_special=False)
    assert ids == [2, first + 3, first + 4, first + 6, 4 + 0xC3, 4 + 0xA9]
    assert tokenizer.decode(ids, special=False) == "hi hi\n\né"


def test_an_unknown_pre_tokenizer_is_refused_by_name_with_the_known_ones(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", byte_tokens(), pre="made-up", merges=[])
    with pytest.raises(ModelFileError, match=r"'made-up'.*known are: .*llama-bpe.*smollm"):
        load(path)


def test_a_missing_pre_tokenizer_is_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(write_vocabulary(tmp_path / "v.gguf", byte_tokens(), merges=[]))
    assert "no pre-tokenizer" in caplog.text


def test_an_unsupported_tokenizer_model_is_refused_by_name(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", byte_tokens(), model="bert", merges=[])
    with pytest.raises(ModelFileError, match="'bert'"):
        load(path)


def test_types_that_do_not_fit_the_tokens_are_refused(tmp_path: Path) -> None:
    model = ModelFile.open(write_vocabulary(tmp_path / "v.gguf", byte_tokens(), pre="gpt-2", merges=[]))
    metadata = dict(model.metadata) | {"tokenizer.ggml.token_type": [1, 1]}
    broken = ModelFile(model.path, metadata, model.tensors, model.tokenizer_hash)
    with pytest.raises(ModelFileError, match="256 tokens, but 2 token types"):
        Tokenizer.from_model(broken)


def test_control_tokens_are_recognised_only_when_asked(tmp_path: Path) -> None:
    tokenizer = chat_vocabulary(tmp_path)
    text = "<|im_start|>abc"
    assert tokenizer.encode(text, add_special=False, parse_special=True) == [257, 261]
    plain = tokenizer.encode(text, add_special=False, parse_special=False)
    assert 257 not in plain
    assert tokenizer.decode(plain, special=False) == text


def test_user_defined_tokens_are_always_recognised(tmp_path: Path) -> None:
    tokenizer = chat_vocabulary(tmp_path)
    for parse_special in (True, False):
        assert tokenizer.encode("a<think>", add_special=False, parse_special=parse_special) == [
            ord("a"),
            259,
        ]


def test_a_merge_or_a_whole_word_never_makes_a_control_token(tmp_path: Path) -> None:
    tokens = [*byte_tokens(), Token("ab", CONTROL), Token("ba", CONTROL)]
    path = write_vocabulary(tmp_path / "v.gguf", tokens, pre="llama-bpe", merges=["a b"])
    tokenizer = load(path)
    for text in ("ab", "ba"):  # by a merge; by the rule that takes whole words
        assert len(tokenizer.encode(text, add_special=False, parse_special=False)) == 2


def test_bos_is_added_once_however_often_the_text_has_it(tmp_path: Path) -> None:
    tokenizer = chat_vocabulary(tmp_path, **{"ggml.add_bos_token": True})
    for text in ("a", "<bos>a", "<bos><bos>a"):
        assert tokenizer.encode(text, add_special=True, parse_special=True) == [256, ord("a")]
        assert tokenizer.encode_rendered(text) == [256, ord("a")]
    assert tokenizer.encode("", add_special=True, parse_special=True) == [256]
    assert tokenizer.encode("a", add_special=False, parse_special=True) == [ord("a")]


def test_bos_is_not_added_where_the_model_wants_none(tmp_path: Path) -> None:
    tokenizer = chat_vocabulary(tmp_path, **{"ggml.add_bos_token": False})
    assert not tokenizer.add_bos
    assert tokenizer.encode("a", add_special=True, parse_special=True) == [ord("a")]
    assert tokenizer.encode_rendered("<bos>a") == [256, ord("a")]


def test_eos_is_added_where_the_model_wants_it(tmp_path: Path) -> None:
    tokenizer = chat_vocabulary(tmp_path, **{"ggml.add_eos_token": True})
    assert tokenizer.encode("abc", add_special=True, parse_special=True) == [261, 258]


def test_the_end_set_is_more_than_eos(tmp_path: Path) -> None:
    tokens = [
        *byte_tokens(),
        Token("<|endoftext|>", CONTROL),
        Token("<|im_end|>", NORMAL),  # conversions forget the type
        Token("<|eot_id|>", CONTROL),
        Token("</s>", NORMAL),  # an ordinary word here
        Token("<mine>", CONTROL),
        Token("<other>", CONTROL),
        Token("<|file_sep|>", CONTROL),
        Token("<eos>", USER_DEFINED),
    ]
    settings = {"ggml.eos_token_id": 256, "ggml.eot_token_id": 260}
    tokenizer = load(write_vocabulary(tmp_path / "v.gguf", tokens, pre="gpt-2", merges=[], settings=settings))
    assert tokenizer.end_ids == {256, 257, 258, 260, 262, 263}
    assert tokenizer.is_control(257)
    assert not tokenizer.is_control(259)


def test_a_message_end_inside_a_harmony_answer_does_not_end_it(tmp_path: Path) -> None:
    names = ["<|return|>", "<|call|>", "<|end|>"]
    tokens = [*byte_tokens(), *(Token(name, CONTROL) for name in names)]
    tokenizer = load(write_vocabulary(tmp_path / "v.gguf", tokens, pre="gpt-4o", merges=[]))
    assert tokenizer.end_ids == {256, 257}
    assert tokenizer.is_control(258)


def test_without_token_types_bos_and_eos_are_control_tokens(tmp_path: Path) -> None:
    tokens = [*byte_tokens(), Token("<a>"), Token("<b>")]
    settings = {"ggml.bos_token_id": 256, "ggml.eos_token_id": 257}
    path = write_vocabulary(
        tmp_path / "v.gguf", tokens, pre="gpt-2", merges=[], types=False, settings=settings
    )
    tokenizer = load(path)
    assert tokenizer.is_control(256)
    assert tokenizer.encode("<b>", add_special=False, parse_special=True) == [257]


def test_special_ids_outside_the_vocabulary_count_as_absent(tmp_path: Path) -> None:
    tokenizer = chat_vocabulary(tmp_path, **{"ggml.bos_token_id": 999, "ggml.add_bos_token": True})
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos
    assert tokenizer.encode("a", add_special=True, parse_special=True) == [ord("a")]


def test_holes_and_duplicates_in_the_vocabulary_do_no_harm(tmp_path: Path) -> None:
    tokens = [
        *byte_tokens(),
        Token("", UNUSED),
        Token("ab"),
        Token("ab"),
        Token("", CONTROL),
        Token("[PAD260]", UNUSED),
    ]
    merges = ["a b", "ab zz", "q", "b c"]  # the last three lead nowhere
    tokenizer = load(write_vocabulary(tmp_path / "v.gguf", tokens, pre="gpt-2", merges=merges))
    assert tokenizer.encode("ab", add_special=False, parse_special=True) == [257]
    assert tokenizer.decode([257, 258, 256, 259], special=True) == "abab"
    assert tokenizer.token_bytes(5000) == b""
    assert tokenizer.token_text(-1) == ""
    assert tokenizer.vocab_size == 261


def test_text_that_is_not_unicode_is_the_clients_fault(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="surrogates"):
        chat_vocabulary(tmp_path).encode("a\ud800b", add_special=False, parse_special=False)


def test_phi_3_takes_no_white_space_after_its_markers(tmp_path: Path) -> None:
    tokens = [
        Token("<unk>", UNKNOWN),
        Token("<s>", CONTROL),
        Token("</s>", CONTROL),
        *byte_fallback_tokens(),
        Token("<|user|>", CONTROL),
        Token("a"),
        Token("\u2581"),
        Token("\u2581a", score=1.0),
    ]
    path = write_vocabulary(tmp_path / "phi-3-mini.gguf", tokens, model="llama")
    tokenizer = load(path)
    user, piece = 3 + NUM_BYTES, 3 + NUM_BYTES + 3
    assert tokenizer.encode("<|user|>\n a", add_special=False, parse_special=True) == [user, piece]
    assert tokenizer.encode("<s> a", add_special=False, parse_special=True) == [1, piece - 1, piece]


def test_control_tokens_are_left_out_of_text_unless_asked_for(tmp_path: Path) -> None:
    tokenizer = chat_vocabulary(tmp_path)
    ids = [257, 261, 258]
    assert tokenizer.decode(ids, special=False) == "abc"
    assert tokenizer.decode(ids, special=True) == "<|im_start|>abc<|im_end|>"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    return load(small_bpe(path, "smollm", VECTORS["tokens"], VECTORS["merges"]))


@pytest.fixture(scope="module")
def trained_spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    return load(small_spm(path, VECTORS["pieces"], space_prefix=True))


@settings(deadline=None)
@given(text=st.text())
def test_decoding_returns_what_was_encoded(trained: Tokenizer, trained_spm: Tokenizer, text: str) -> None:
    # SentencePiece writes a space as U+2581 and cannot tell it from one in the text.
    for tokenizer, expected in ((trained, text), (trained_spm, text.replace("\u2581", " "))):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.decode(ids, special=False) == expected
        assert not any(tokenizer.is_control(token_id) for token_id in ids)
        assert 0 <= tokenizer.min_tokens(text) <= len(ids)
        assert tokenizer.min_tokens("x" * 100_000) > 1000


def test_a_vocabulary_that_drops_bytes_promises_a_length_for_the_others(tmp_path: Path) -> None:
    tokenizer = load(write_vocabulary(tmp_path / "v.gguf", byte_tokens()[:100], pre="gpt-2", merges=[]))
    assert tokenizer.min_tokens("é" * 1000) == 0
    text = "é!" * 500_000  # more than is looked at in one piece
    assert tokenizer.min_tokens(text) == 500_000
    assert len(tokenizer.encode(text[:20_000], add_special=False, parse_special=False)) == 10_000


def test_more_ids_than_can_be_listed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4.text.tokenizer._MAX_IDS", 5000)
    tokenizer = chat_vocabulary(tmp_path)
    for text in ("!" * 5001, "<bos>" * 5001):
        assert len(tokenizer.encode(text[:5000], add_special=False, parse_special=True)) <= 5000
        with pytest.raises(RequestError, match="prompt is too long: 5001 tokens > 5000 maximum"):
            tokenizer.encode(text, add_special=False, parse_special=True)
