"""ds4/protocol/conversation.py: tools and calls as templates expect them, or an error that names them."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import RequestError
from ds4.protocol.conversation import (
    NamedTool,
    ToolChoice,
    allowed_tools,
    checked_tool_calls,
    checked_tool_choice,
    checked_tools,
    with_tool_names,
)

F: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "parameters", "description", "id", "arguments"]),
            inner,
        )
    ),
)


def test_a_tool_is_a_function_even_if_it_does_not_say_so() -> None:
    assert checked_tools([{"function": {"name": "f"}}]) == [F]
    assert checked_tools([]) == []


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (5, "tools"),
        ("f", "tools"),
        ([1], "tools[0]"),
        ([F, {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([F, F], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], None),
        (
            [{"type": "function", "function": {"name": "f", "parameters": "{}"}}],
            "tools[0].function.parameters",
        ),
        (
            [{"type": "function", "function": {"name": "f", "description": 5}}],
            "tools[0].function.description",
        ),
    ],
)
def test_a_wrong_tool_is_named(tools: Any, param: str | None) -> None:
    if param is None:
        assert checked_tools(tools) == tools
        return
    with pytest.raises(RequestError) as caught:
        checked_tools(tools)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("choice", "tools", "expected"),
    [
        (None, [], "none"),
        (None, [F], "auto"),
        ("auto", [F], "auto"),
        ("none", [F], "none"),
        ("auto", [], "auto"),
        ("required", [F], "required"),
        ("any", [F], "required"),
        ({"type": "function", "function": {"name": "f"}}, [F], NamedTool("f")),
        ({"type": "function", "name": "f"}, [F], NamedTool("f")),
    ],
)
def test_a_choice_says_which_tools_may_or_have_to_be_called(
    choice: Any, tools: list[Any], expected: ToolChoice
) -> None:
    assert checked_tool_choice(choice, tools) == expected


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ({"type": "function", "function": {"name": "g"}}, [F], "there is no tool 'g'"),
        ("required", [], "no tools to choose from"),
        ("sometimes", [F], "must be"),
        (5, [F], "must be"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(choice: Any, tools: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        checked_tool_choice(choice, tools)
    assert caught.value.param == "tool_choice"


def test_allowed_tools_are_taken_apart_in_both_spellings() -> None:
    g = {"type": "function", "function": {"name": "g"}}
    inner = {"mode": "required", "tools": [F]}
    assert allowed_tools({"type": "allowed_tools", "allowed_tools": inner}, [F, g]) == ([F], "required")
    flat = {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}
    assert allowed_tools(flat, [F, g]) == ([g], "auto")
    assert allowed_tools("required", [F, g]) == ([F, g], "required")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"mode": "never", "tools": [F]}, "tool_choice.mode"),
        ({"allowed_tools": 5}, "tool_choice.mode"),
        ({"tools": []}, "tool_choice.tools"),
        ({"tools": "f"}, "tool_choice.tools"),
        ({"tools": [{"type": "function", "name": "g"}]}, "tool_choice"),
        ({"tools": ["f"]}, "tool_choice"),
        ({"tools": ["auto"]}, "tool_choice.tools"),
    ],
)
def test_what_is_allowed_must_be_there(choice: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        allowed_tools({"type": "allowed_tools", **choice}, [F])
    assert caught.value.param == param


def test_calls_in_the_history_are_made_whole() -> None:
    (call,) = checked_tool_calls("m", [{"id": "a", "function": {"name": "f"}}])
    assert call == {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ("f", "m[0]"),
        ({}, "m[0].function.name"),
        ({"function": {"name": 1}}, "m[0].function.name"),
        ({"function": {"name": "f", "arguments": 1}}, "m[0].function.arguments"),
        ({"function": {"name": "f"}, "id": 1}, "m[0].id"),
    ],
)
def test_a_wrong_call_is_named(call: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        checked_tool_calls("m", [call])
    assert caught.value.param == param


def test_results_say_which_tool_they_come_from() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a"},
        {"role": "tool", "tool_call_id": "b"},
        {"role": "tool", "tool_call_id": "a", "name": "mine"},
    ]
    assert [message.get("name") for message in with_tool_names(messages)] == [None, "f", None, "mine"]


@given(st.lists(JSON, max_size=3), JSON)
def test_anything_else_is_an_error_of_the_request(values: list[Any], choice: Any) -> None:
    for check in (
        lambda: checked_tools(values),
        lambda: checked_tool_calls("m", values),
        lambda: checked_tool_choice(choice, [F]),
    ):
        with contextlib.suppress(RequestError):
            check()
