"""ds4/text/tool_calls.py: what is known of tools, and events in their order."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.text.tool_calls import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    EventSink,
    ReasoningDelta,
    TextDelta,
    tool_types,
)
from tests.ds4.text.outputs import flat, tool


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": ["string", 5]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"string", "integer"}),
        ({"oneOf": [{"type": "string"}, {}]}, set()),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": ["a", 1]}, set()),
        ({"const": "a"}, {"string"}),
        ({"$ref": "#/x"}, set()),
        ({}, set()),
    ],
)
def test_a_schema_tells_which_types_a_parameter_may_have(schema: dict[str, Any], types: set[str]) -> None:
    assert tool_types([tool("f", p=schema)]) == {"f": {"p": types}}


def test_a_schema_of_a_schema_of_a_schema_ends() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(50):
        schema = {"anyOf": [schema]}
    assert tool_types([tool("f", p=schema)]) == {"f": {"p": frozenset()}}


def test_tools_come_in_two_forms() -> None:
    properties = {"p": {"type": "integer"}}
    bare = {"name": "f", "input_schema": {"properties": properties}}
    assert tool_types([bare]) == {"f": {"p": frozenset({"integer"})}}


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["function", "name", "parameters", "properties", "type", "anyOf", "enum"]),
                inner,
            )
        ),
    )
)
def test_any_schema_is_survived(value: Any) -> None:
    tool_types([{"function": {"name": "f", "parameters": value}}, {"function": value}])
    tool_types([tool("f", p={"anyOf": value, "type": value, "enum": value})])


def test_adjacent_deltas_of_one_kind_are_joined_and_empty_ones_left_out() -> None:
    sink = EventSink({})
    for text in ("a", "", "b"):
        sink.reasoning(text)
    sink.text("c")
    sink.begin("f")
    sink.arguments("{")
    sink.arguments("}")
    sink.end()
    reasoning, answer, begin, arguments, end = sink.drain()
    assert (reasoning, answer) == (ReasoningDelta("ab"), TextDelta("c"))
    assert isinstance(begin, CallBegin)
    assert (arguments, end) == (ArgumentsDelta(0, "{}"), CallEnd(0))
    assert sink.drain() == []


def test_nothing_is_taken_after_the_one_call_that_was_allowed() -> None:
    sink = EventSink({}, is_parallel=False)
    for name in ("f", "g"):
        sink.begin(name)
        sink.arguments("{}")
        sink.end()
        sink.text("x")
    assert flat(sink.drain()) == [("begin", "0", "f"), ("arguments", "0", "{}"), ("end", "0")]
