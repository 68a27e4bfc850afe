"""From what clients give to a grammar: what it allows, and what is refused."""

import re
from typing import Any

import pytest

from ds4.errors import RequestError
from ds4.grammar_library import GrammarError
from ds4.text.grammar import (
    JSON_OBJECT,
    GrammarSource,
    choice_source,
    grammar_of,
    harmony_rules,
    json_source,
    thinking_rules,
)
from tests.support import schemas
from tests.support.grammar_walk import CONTROL_IDS, END, TOKENS, random_output, vocabulary

GBNF = """
root ::= "sum: " expr
expr ::= num ("+" num){0,3}
num  ::= [0-9]{1,2} | "(" num ")"   # a comment
"""
LARK = 'start: "x=" NUM\nNUM: /[0-9]{1,3}/'


def allows(grammar: str, text: str) -> bool:
    """Whether `text`, byte by byte, is a whole output of the grammar."""
    matcher = vocabulary().compile(grammar)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize("seed", range(8))
def test_a_schema_gives_documents_that_are_valid(seed: int) -> None:
    for schema in schemas.ALL:
        schemas.check(random_output(schemas.grammar(schema), seed), schema)


@pytest.mark.parametrize("seed", range(8))
def test_regex_choice_gbnf_and_lark_give_what_they_say(seed: int) -> None:
    choices = ["yes", 'n"o\n', "日本"]
    assert random_output(grammar_of(choice_source(choices)), seed) in choices
    pattern = r'[a-c]{2}/\d+"?'
    assert re.fullmatch(
        r'[a-c]{2}/[0-9]+"?', random_output(grammar_of(GrammarSource("regex", pattern)), seed)
    )
    assert random_output(grammar_of(GrammarSource("grammar", GBNF)), seed).startswith("sum: ")
    assert re.fullmatch("x=[0-9]{1,3}", random_output(grammar_of(GrammarSource("grammar", LARK)), seed))


def test_any_object_is_allowed_by_json_object_and_nothing_else_is() -> None:
    grammar = grammar_of(JSON_OBJECT)
    assert allows(grammar, '{"a": [1, {"b": null}], "é": "x"}')
    assert allows(grammar, '{\n  "a": 1\n}')
    assert not allows(grammar, "[1]")
    assert not allows(grammar, '{"a": 1} ')


def test_white_space_is_bounded() -> None:
    grammar = grammar_of(json_source({"type": "array", "items": {"type": "integer"}}))
    assert allows(grammar, "[1, 2,\n\t3]")
    assert not allows(grammar, "[1,  2]")
    assert not allows(grammar, "[1,\n\n2]")


def test_options_of_the_client_do_not_replace_ours() -> None:
    schema = {"not": {}, "x-guidance": {"lenient": True, "whitespace_flexible": False}}
    with pytest.raises(GrammarError, match="not"):
        vocabulary().compile(grammar_of(json_source(schema)))


def test_neutral_keywords_are_no_reason_to_refuse() -> None:
    inner = {
        "type": "object",
        "properties": {"uniqueItems": False, "a": {"type": "array", "uniqueItems": False}},
    }
    grammar = grammar_of(json_source(inner))
    assert allows(grammar, '{"a": [1, 1]}')
    assert not allows(grammar, '{"uniqueItems": 1}')  # a property of that name, which is forbidden
    assert allows(grammar_of(json_source({"const": {"uniqueItems": False}})), '{"uniqueItems": false}')


def test_digits_and_words_of_a_regex_are_those_of_ascii() -> None:
    grammar = grammar_of(GrammarSource("regex", r"\d\w\s"))
    assert allows(grammar, "1a ")
    assert not allows(grammar, "\u0661a ")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", "false"),
        ("json", "[]"),
        ("json", '"x"'),
        ("grammar", "root ::= missing"),
        ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        ("grammar", "%llguidance {broken}\nstart: 'a'"),
    ],
)
def test_what_cannot_be_translated_is_the_clients_fault(kind: Any, text: str) -> None:
    with pytest.raises(RequestError):
        grammar_of(GrammarSource(kind, text))


@pytest.mark.parametrize(
    "source", [json_source({"const": 1}), choice_source(["1"]), GrammarSource("grammar", 'start: "1"')]
)
def test_reasoning_may_stand_before_the_answer(source: GrammarSource) -> None:
    def with_thinking(is_open: bool) -> str:
        rules = thinking_rules("<think>", "</think>", is_open=is_open)
        return grammar_of(GrammarSource(source.kind, source.text, rules))

    assert allows(with_thinking(True), "so {\n</think>\n\n1")
    assert not allows(with_thinking(True), "1")
    assert allows(with_thinking(False), "<think>\nso </think>1")
    assert allows(with_thinking(False), "1")
    assert not allows(with_thinking(False), "so 1")


def test_a_closing_marker_that_is_a_control_token_is_that_token() -> None:
    ids = {"</think>": CONTROL_IDS["<|end|>"]}
    rules = thinking_rules("<think>", "</think>", is_open=True, control_ids=ids)
    matcher = vocabulary().compile(grammar_of(GrammarSource("choice", '["1"]', rules)))
    assert matcher.consume_tokens([*b"</think> 1", CONTROL_IDS["<|end|>"], *b"\n1"])
    assert matcher.is_accepting()


def test_harmony_answers_are_in_the_final_channel() -> None:
    rules = harmony_rules(has_calls=False, control_ids=CONTROL_IDS)
    matcher = vocabulary().compile(grammar_of(GrammarSource("choice", '["1"]', rules)))
    ids = CONTROL_IDS
    for part in ("<|channel|>", "analysis", "<|message|>", "so", "<|end|>", "<|start|>", "assistant"):
        assert matcher.consume_tokens([ids[part]] if part in ids else list(part.encode()))
    for part in ("<|channel|>", "final", "<|message|>", "1"):
        assert matcher.consume_tokens([ids[part]] if part in ids else list(part.encode()))
    assert matcher.is_accepting()


def test_calls_may_stand_in_the_place_of_the_answer() -> None:
    grammar = grammar_of(GrammarSource("json", '{"const": 1}', calls='start: "call" N\nN: /[0-9]/'))
    assert allows(grammar, "1")
    assert allows(grammar, "call7")
    assert not allows(grammar, "1call7")


def test_the_vocabulary_of_these_tests_is_what_they_think() -> None:
    assert TOKENS[END] == b"</s>"
    assert all(TOKENS[token_id].decode() == text for text, token_id in CONTROL_IDS.items())
