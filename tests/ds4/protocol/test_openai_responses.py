"""ds4/protocol/openai_responses.py: what a request of this dialect reads as in chat."""

from typing import Any

import msgspec
import pytest

from ds4.errors import RequestError
from ds4.protocol.openai_responses import (
    ResponsesRequest,
    chat_fields,
    chat_messages,
    decode_responses,
    input_items,
    opaque,
)


def _request(**body: Any) -> ResponsesRequest:
    return decode_responses(msgspec.json.encode({"input": "hi", **body}))


def _fields(**body: Any) -> dict[str, Any]:
    request = _request(**body)
    return chat_fields(request, input_items(request))


def test_a_text_is_one_user_message_after_the_instructions() -> None:
    assert _fields(instructions="be brief", model="m", max_output_tokens=4, temperature=0.5, seed=1) == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 0.5,
        "seed": 1,
    }


def test_items_may_leave_out_that_they_are_messages() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert _fields(input=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])[
        "messages"
    ] == [{"role": "developer", "content": "x"}, {"role": "user", "content": "a\nb"}]


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def _said(text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _chat_call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_what_the_assistant_did_in_a_row_is_one_message() -> None:
    items = [
        _thought("hm"),
        _said("look"),
        _call("a"),
        _call("b"),
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        _thought("so"),
        _call("c"),
    ]
    assert chat_messages(items) == [
        {
            "role": "assistant",
            "content": "look",
            "reasoning_content": "hm",
            "tool_calls": [_chat_call("a"), _chat_call("b")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [_chat_call("c")]},
    ]


def test_two_answers_in_a_row_stay_two() -> None:
    contents = [
        message["content"] for message in chat_messages([_said("a"), _said("b"), _thought("c"), _said("d")])
    ]
    assert contents == ["a", "b", "d"]


def test_reasoning_that_the_client_kept_comes_back() -> None:
    kept = {"type": "reasoning", "summary": [], "encrypted_content": opaque("thought é")}
    assert chat_messages([kept, _said("x")])[0]["reasoning_content"] == "thought é"
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-of another server"}
    assert chat_messages([foreign, _said("x")]) == [{"role": "assistant", "content": "x"}]


def test_tools_choice_and_format_have_chats_form() -> None:
    schema = {"type": "object"}
    fields = _fields(
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": False}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert fields["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": schema, "strict": False}}
    ]
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert fields["parallel_tool_calls"] is False
    assert fields["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert fields["reasoning_effort"] == "low"
    assert (fields["logprobs"], fields["top_logprobs"]) == (True, 2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0][0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["everything"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        _fields(**body)
    assert refused.value.param == param
