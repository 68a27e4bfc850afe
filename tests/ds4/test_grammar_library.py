"""Vocabularies as the grammar library gets them, and what compiling refuses."""

from pathlib import Path

import pytest

from ds4.grammar_library import GrammarError, GrammarVocabulary
from ds4.model_file import ModelFile
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
