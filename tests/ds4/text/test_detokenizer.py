"""Text comes out as soon as it is whole, and never as half a character."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.model_file import ModelFile
from ds4.text.detokenizer import Detokenizer
from ds4.text.tokenizer import Tokenizer
from tests.support.vocabulary_file import CONTROL, Token, byte_tokens, write_vocabulary

MARKER = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """256 tokens of one byte each, so that every character is cut, and a control token."""
    path: Path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    tokens = [*byte_tokens(), Token("<|im_end|>", CONTROL)]
    return Tokenizer.from_model(ModelFile.open(write_vocabulary(path, tokens, pre="gpt-2", merges=[])))


def ids_of(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    return [by_byte[bytes([byte])] for byte in raw]


def test_control_tokens_are_silent_unless_they_are_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*ids_of(tokenizer, b"a"), MARKER]
    shown = tokenizer.control_ids_in(["<", "text <|im_end|>", "<|im_end|"])
    assert shown == {MARKER}
    assert "".join(map(Detokenizer(tokenizer).push, ids)) == "a"
    assert "".join(map(Detokenizer(tokenizer, special=True).push, ids)) == "a<|im_end|>"
    assert "".join(map(Detokenizer(tokenizer, shown=shown).push, ids)) == "a<|im_end|>"


def test_the_vocabulary_can_be_asked_for_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.has_token("<|im_end|>")
    assert not tokenizer.has_token("<|im_start|>")


@settings(deadline=None)
@given(text=st.text())
def test_the_pieces_join_to_the_text_and_are_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    seen = ""
    for token_id in ids_of(tokenizer, text.encode()):
        seen += detokenizer.push(token_id)
        assert text.startswith(seen)
    assert seen == text


@settings(deadline=None)
@given(raw=st.binary(max_size=40))
def test_any_bytes_give_the_text_up_to_a_character_that_the_end_cuts_off(
    tokenizer: Tokenizer, raw: bytes
) -> None:
    ids = ids_of(tokenizer, raw)
    streamed = "".join(map(Detokenizer(tokenizer).push, ids))
    whole = tokenizer.decode(ids, special=False)
    assert whole in (streamed, streamed + "\ufffd")
    assert "".join(map(Detokenizer(tokenizer).push, ids_of(tokenizer, raw + b"."))) == whole + "."


def test_a_byte_is_given_up_only_when_the_next_proves_it_wrong(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    first, letter = ids_of(tokenizer, b"\xe4a")
    assert detokenizer.push(first) == ""
    assert detokenizer.push(letter) == "\ufffda"


def test_a_character_cut_off_by_the_end_does_not_show(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token_id) for token_id in ids_of(tokenizer, "🙂".encode()[:3])] == ["", "", ""]


def test_control_tokens_are_silent_unless_asked_for(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer).push(MARKER) == ""
    assert Detokenizer(tokenizer, special=True).push(MARKER) == "<|im_end|>"


def test_ids_outside_the_vocabulary_are_silent(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer).push(99999) == ""
