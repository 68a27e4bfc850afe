"""Whatever a grammar for tools allows is read by the family's parser as calls with valid arguments."""

import json
from typing import Any

import jsonschema
import pytest

from ds4.text.grammar import GrammarSource, grammar_of, thinking_rules
from ds4.text.output import OutputFormat
from ds4.text.reasoning import ThinkTags
from ds4.text.tool_calls import ArgumentsDelta, CallBegin, ReasoningDelta, TextDelta, ToolFormat, tool_types
from ds4.text.tool_grammar import PLAIN, CallLayout, grammar_for_tools, layout_of
from ds4.text.tools.json_calls import JsonCalls
from ds4.text.tools.marked_calls import LlamaCalls, MarkedCalls, MistralCalls
from ds4.text.tools.tagged_calls import ArgumentTagCalls
from tests.support.grammar_walk import CONTROL_IDS, random_output

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2, "all"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
FAMILIES: list[ToolFormat] = [
    JsonCalls(("<tool_call>",), ("</tool_call>",)),
    JsonCalls(("functools",)),
    JsonCalls((), is_bare=True),
    MistralCalls(),
    LlamaCalls(),
    MarkedCalls(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
]


def layout(family: ToolFormat) -> CallLayout:
    found = layout_of(family)
    assert found is not None
    return found


def calls_in(output: OutputFormat, text: str) -> list[tuple[str, Any]]:
    """Names and arguments; fails where anything else than white space or reasoning was said."""
    parser = output.parser(rendered="", tools=tool_types(TOOLS))
    assert parser is not None
    names: list[str] = []
    arguments: list[str] = []
    for event in [*parser.push(text), *parser.finish()]:
        if isinstance(event, CallBegin):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, ArgumentsDelta):
            arguments[event.index] += event.text
        elif isinstance(event, TextDelta):
            assert not event.text.strip(), event.text
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.openers))
@pytest.mark.parametrize("seed", range(4))
def test_all_that_is_allowed_is_calls(family: ToolFormat, seed: int) -> None:
    lark = grammar_for_tools(TOOLS, None, layout(family), control_ids=CONTROL_IDS)
    text = random_output(grammar_of(GrammarSource("grammar", lark)), seed)
    calls = calls_in(OutputFormat(tools=family), text)
    assert calls
    for name, arguments in calls:
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(arguments)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.openers))
@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_is_the_only_one_and_one_call_is_one(family: ToolFormat, seed: int) -> None:
    lark = grammar_for_tools(TOOLS, "stop", layout(family), is_parallel=False, control_ids=CONTROL_IDS)
    text = random_output(grammar_of(GrammarSource("grammar", lark)), seed)
    assert calls_in(OutputFormat(tools=family), text) == [("stop", {})]


def test_several_calls_come_where_they_may() -> None:
    family = FAMILIES[0]
    lark = grammar_for_tools(TOOLS, None, layout(family), control_ids=CONTROL_IDS)
    counts = {
        len(
            calls_in(
                OutputFormat(tools=family), random_output(grammar_of(GrammarSource("grammar", lark)), seed)
            )
        )
        for seed in range(12)
    }
    assert len(counts) > 1
    assert max(counts) <= 16


@pytest.mark.parametrize("seed", range(3))
def test_reasoning_may_come_before_the_calls(seed: int) -> None:
    family, tags = FAMILIES[0], ThinkTags("<think>", "</think>")
    lark = grammar_for_tools(TOOLS, "stop", layout(family), is_parallel=False, control_ids=CONTROL_IDS)
    thinking = thinking_rules(tags.open, tags.close, is_open=True)
    text = "<think>" + random_output(grammar_of(GrammarSource("grammar", lark, thinking)), seed)
    output = OutputFormat(think=tags, tools=family)
    assert calls_in(output, text) == [("stop", {})]
    parser = output.parser(rendered="", tools=tool_types(TOOLS))
    assert parser is not None
    assert any(isinstance(event, ReasoningDelta) for event in [*parser.push(text), *parser.finish()])


def test_names_are_written_as_json_wants_them() -> None:
    tools = [{"type": "function", "function": {"name": 'a"\\b'}}]
    lark = grammar_for_tools(tools, None, PLAIN, is_parallel=False, control_ids={})
    text = random_output(grammar_of(GrammarSource("grammar", lark)), 1)
    assert json.loads(text)["name"] == 'a"\\b'


def test_families_whose_arguments_are_no_json_have_no_layout() -> None:
    assert layout_of(ArgumentTagCalls()) is None
    assert layout_of(None) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_call_has_no_arguments_that_the_tool_does_not_name(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "far": {"type": "boolean"},
            "box": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
        "required": ["far", "box"],
    }
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    lark = grammar_for_tools(tools, None, PLAIN, is_parallel=False, control_ids=CONTROL_IDS)
    call = json.loads(random_output(grammar_of(GrammarSource("grammar", lark)), seed))
    assert call["arguments"].keys() == {"far", "box"}
    assert call["arguments"]["box"].keys() == {"a"}


def test_a_tool_without_parameters_is_called_with_none() -> None:
    tools = [
        {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
    ]
    lark = grammar_for_tools(tools, None, PLAIN, is_parallel=False, control_ids=CONTROL_IDS)
    assert json.loads(random_output(grammar_of(GrammarSource("grammar", lark)), 1))["arguments"] == {}


def test_a_schema_that_asks_for_other_arguments_gets_them() -> None:
    opened = {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}}
    composed = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "properties": {"c": {}}}
    for schema in (opened, composed):
        tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
        lark = grammar_for_tools(tools, None, PLAIN, control_ids={})
        assert json.dumps(schema)[:-1] in lark
