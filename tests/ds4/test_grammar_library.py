"""Vocabularies as the grammar library gets them, and what compiling refuses."""

import json
from pathlib import Path

import pytest

from ds4.grammar_library import GrammarError, GrammarVocabulary
from ds4.model_file import ModelFile
from ds4.text.tokenizer import Tokenizer
from tests.support.tiny_model import END_OF_TEXT, IM_END, write_tiny_model
from tests.support.vocabulary_file import CONTROL, Token, byte_fallback_tokens, write_vocabulary


def test_a_model_gives_its_end_tokens(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.gguf")
    vocabulary = GrammarVocabulary.of_model(ModelFile.open(tmp_path / "tiny.gguf"))
    assert vocabulary.end_ids == {END_OF_TEXT, IM_END}
    assert vocabulary.compile('start: "hello"')


def test_sentence_piece_bytes_and_spaces_can_be_written(tmp_path: Path) -> None:
    tokens = [
        Token("<unk>", 2),
        Token("<s>", CONTROL),
        Token("</s>", CONTROL),
        *byte_fallback_tokens(),
        Token("\u2581a", score=-1.0),
    ]
    path = write_vocabulary(tmp_path / "spm.gguf", tokens, model="llama")
    vocabulary = GrammarVocabulary.of_model(ModelFile.open(path))
    matcher = vocabulary.compile('start: " a" "\\n"')
    assert matcher.consume_token(len(tokens) - 1)
    assert matcher.consume_token(3 + ord("\n"))
    assert matcher.is_accepting()


def test_without_an_end_token_there_are_no_grammars() -> None:
    with pytest.raises(GrammarError, match="end token"):
        GrammarVocabulary([b"a"], special_ids=[], end_ids=[], vocab_size=1)


def test_a_token_that_the_library_cannot_hold_is_refused() -> None:
    tokens = [b"", *(bytes([byte]) for byte in range(256))]
    longest = b"x" * 1024
    assert GrammarVocabulary([*tokens, longest], special_ids=[0], end_ids=[0], vocab_size=258).compile(
        'start: "x"'
    )
    with pytest.raises(GrammarError, match="1025 bytes"):
        GrammarVocabulary([*tokens, longest + b"x"], special_ids=[0], end_ids=[0], vocab_size=258)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: missing", "missing"),
        ('start: %json {"not": {}}', "not"),
        ('start: "b"', "NoExtension"),  # no token of the vocabulary has a "b"
    ],
)
def test_a_grammar_is_refused_in_one_line(grammar: str, reason: str) -> None:
    vocabulary = GrammarVocabulary([b"</s>", b"a"], special_ids=[0], end_ids=[0], vocab_size=2)
    with pytest.raises(GrammarError, match=reason) as caught:
        vocabulary.compile(grammar)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_forced_is_spelt_as_the_tokenizer_would(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.gguf")
    model = ModelFile.open(tmp_path / "tiny.gguf")
    tokenizer, vocabulary = Tokenizer.from_model(model), GrammarVocabulary.of_model(model)
    text = '{"a hello world":"wand and sing'
    matcher = vocabulary.compile(f"start: {json.dumps(text)} /[0-9]/")
    forced = matcher.compute_ff_tokens()
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert len(forced) == 15
    assert forced == ids[: len(forced)]


def test_a_text_that_its_pieces_do_not_spell_is_spelt_in_longest_pieces() -> None:
    vocabulary = GrammarVocabulary(
        [b"</s>", b"a", b"b", b"ab", b"c"], special_ids=[0], end_ids=[0], vocab_size=5, spell=lambda _: [1]
    )
    assert vocabulary.compile('start: "abc"').compute_ff_tokens()[:1] == [3]
