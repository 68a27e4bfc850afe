"""ds4/protocol/anthropic_messages.py: what a request of this dialect reads as in chat."""

from typing import Any

import msgspec
import pytest

from ds4.errors import RequestError
from ds4.protocol.anthropic_messages import (
    CountRequest,
    MessagesRequest,
    chat_fields,
    decode_count,
    decode_messages,
    message_usage,
)

_USER = {"role": "user", "content": "hi"}


def _fields(**body: Any) -> dict[str, Any]:
    return chat_fields(decode_messages(msgspec.json.encode({"messages": [_USER], **body})))


def _blocks(role: str, *blocks: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _fields(messages=[{"role": role, "content": list(blocks)}])["messages"]
    return found


def test_sampling_fields_keep_their_values_and_absent_ones_stay_absent() -> None:
    assert _fields(
        model="m",
        max_tokens=5,
        stop_sequences=["a"],
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        seed=7,
        metadata={"user_id": "x"},
    ) == {
        "model": "m",
        "messages": [_USER],
        "max_tokens": 5,
        "stop": ["a"],
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 7,
    }


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("be short", "be short"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\n\nb"),
        ([{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "b"}], "b"),
    ],
)
def test_the_system_prompt_comes_first_without_notes_about_the_client(system: Any, expected: str) -> None:
    assert _fields(system=system)["messages"] == [{"role": "system", "content": expected}, _USER]


def test_an_empty_system_prompt_is_none() -> None:
    assert _fields(system="")["messages"] == [_USER]
    assert _fields(system=[])["messages"] == [_USER]


def test_results_become_tool_messages_in_their_place_among_the_texts() -> None:
    text = {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "1"}
    assert _blocks(
        "user",
        {"type": "tool_result", "tool_use_id": "a", "content": [part, part]},
        {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
        text,
        text,
    ) == [
        {"role": "tool", "tool_call_id": "a", "content": "1\n1"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "and?\nand?"},
    ]


def test_an_assistant_message_keeps_thoughts_text_and_calls_apart() -> None:
    assert _blocks(
        "assistant",
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "zzz"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t", "name": "look", "input": {"at": [1, "é"]}},
    ) == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "t",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at":[1,"é"]}'},
                }
            ],
        }
    ]


def test_an_answer_that_has_begun_goes_on() -> None:
    begun = {"role": "assistant", "content": "It is"}
    assert _fields(messages=[_USER, begun])["continue_final_message"] is True
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    assert "continue_final_message" not in _fields(messages=[{"role": "assistant", "content": [call]}])
    assert "continue_final_message" not in _fields()


def test_text_in_documents_and_search_results_is_read() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}}
    result = {
        "type": "search_result",
        "source": "s",
        "title": "R",
        "content": [{"type": "text", "text": "x"}],
    }
    assert _blocks("user", document, result) == [{"role": "user", "content": "T\nbody\nR\ns\nx"}]


def test_tools_and_choice_have_openais_form() -> None:
    schema = {"type": "object"}
    fields = _fields(
        tools=[{"name": "f", "description": "d", "input_schema": schema, "strict": True}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    )
    assert fields["tools"] == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": schema, "description": "d", "strict": True},
        }
    ]
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert fields["parallel_tool_calls"] is False


@pytest.mark.parametrize(("given", "expected"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_every_kind_of_choice_has_a_counterpart(given: str, expected: str) -> None:
    assert _fields(tool_choice={"type": given})["tool_choice"] == expected


def test_thinking_effort_and_format_are_passed_on() -> None:
    schema = {"type": "object", "properties": {}}
    fields = _fields(
        thinking={"type": "enabled", "budget_tokens": 2000},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    assert fields["thinking"] == {"type": "enabled", "budget_tokens": 2000}
    assert fields["reasoning_effort"] == "low"
    assert fields["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "a",
                                "content": [{"type": "image", "source": {}}],
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "document", "source": {"type": "base64", "data": "eA=="}},
                        ],
                    }
                ]
            },
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": {"skills": []}}, "container"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0]",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        _fields(**body)
    assert refused.value.param == param


def test_context_edits_that_keep_everything_are_no_edits() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    assert _fields(context_management={"edits": edits}) == _fields()


def test_a_wrong_type_is_named() -> None:
    with pytest.raises(RequestError) as refused:
        decode_messages(b'{"messages": [{"role": "user", "content": [{"type": "smell"}]}]}')
    assert refused.value.param is not None
    assert refused.value.param.startswith("messages")


def test_a_count_needs_no_max_tokens_and_has_no_sampling_fields() -> None:
    request = decode_count(b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}')
    assert isinstance(request, CountRequest)
    assert not isinstance(request, MessagesRequest)
    assert chat_fields(request) == {"messages": [_USER]}


def test_usage_counts_each_prompt_token_once() -> None:
    usage = message_usage(10, 4, 2)
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 2)
