"""ds4/protocol/openai_chat.py: messages as templates expect them, and what a client may ask for."""

from typing import Any

import msgspec
import pytest

from ds4.errors import RequestError
from ds4.protocol.common import Plan, SamplingDefaults, Vocabulary
from ds4.protocol.conversation import Conversation
from ds4.protocol.openai_chat import conversation, decode_chat, plan_chat, template_messages

_VOCABULARY = Vocabulary(size=100, end_ids=frozenset({2}), spell=lambda text: list(text.encode()))


def _messages(*messages: Any) -> list[dict[str, Any]]:
    return template_messages(decode_chat(msgspec.json.encode({"messages": messages})).messages)


def _plan(**fields: Any) -> Plan:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return plan_chat(decode_chat(msgspec.json.encode(body)), SamplingDefaults(), _VOCABULARY)


def test_text_comes_as_a_string_or_as_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _messages({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_empty_and_null_content_in_the_history_is_accepted(message: dict[str, Any]) -> None:
    assert _messages({"role": "assistant", **message}) == [{"role": "assistant", "content": ""}]


def test_developer_is_system() -> None:
    assert _messages({"role": "developer", "content": "x"})[0]["role"] == "system"


def test_tool_history_reaches_the_template() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    call, result = _messages(
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "c", "name": "f"},
    )
    assert call == {"role": "assistant", "content": "", "tool_calls": calls}
    assert result == {"role": "tool", "content": "4", "tool_call_id": "c", "name": "f"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"content": "x"}], "messages[0].role"),
        (None, "messages"),
    ],
)
def test_a_wrong_message_is_named(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        template_messages(decode_chat(msgspec.json.encode({"messages": messages})).messages)
    assert caught.value.param == param


def test_messages_are_required() -> None:
    with pytest.raises(RequestError, match="messages"):
        decode_chat(b"{}")


def test_logprobs_are_a_switch_and_a_count() -> None:
    assert _plan().sampling.num_logprobs == -1
    assert _plan(logprobs=False).sampling.num_logprobs == -1
    assert _plan(logprobs=True).sampling.num_logprobs == 0
    assert _plan(logprobs=True, top_logprobs=20).sampling.num_logprobs == 20
    for wrong in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(RequestError) as caught:
            _plan(**wrong)
        assert caught.value.param == "top_logprobs"


def test_the_newer_name_of_the_limit_wins() -> None:
    assert _plan(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert _plan(max_tokens=5, max_completion_tokens=None).max_tokens == 5


def _asked(**fields: Any) -> Conversation:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return conversation(decode_chat(msgspec.json.encode(body)))


def test_template_options_are_handed_on() -> None:
    asked = _asked(chat_template_kwargs={"enable_thinking": False, "x": [1]}, reasoning_effort="low")
    assert asked.kwargs == {"enable_thinking": False, "reasoning_effort": "low", "x": [1]}
    assert asked.thinking is False
    assert _asked(reasoning={"effort": "low"}).kwargs == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "thinking", "budget"),
    [
        ({}, None, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "high"}, True, None),
        ({"thinking": True}, True, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, True, 64),
        ({"thinking": {"type": "adaptive"}}, None, None),
        ({"reasoning_budget": 8, "thinking": {"type": "enabled", "budget_tokens": 64}}, True, 8),
        ({"reasoning_budget": -1}, None, None),
        ({"reasoning_budget": 0, "thinking": True}, False, 0),
        ({"chat_template_kwargs": {"enable_thinking": True}, "thinking": False}, True, None),
        ({"reasoning_budget_tokens": 9}, None, 9),
        ({"thinking_budget_tokens": 0}, False, 0),
        ({"thinking_token_budget": 7, "enable_thinking": True}, True, 7),
        ({"enable_thinking": False, "reasoning_effort": "high"}, False, None),
        ({"reasoning": {"effort": "low", "max_tokens": 5}}, True, 5),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"reasoning": {"effort": "none", "exclude": False}}, False, None),
    ],
)
def test_thinking_is_asked_for_in_many_ways(
    fields: dict[str, Any], thinking: bool | None, budget: int | None
) -> None:
    asked = _asked(**fields)
    assert (asked.thinking, asked.max_reasoning_tokens) == (thinking, budget)
    assert "reasoning_effort" not in asked.kwargs or asked.kwargs["reasoning_effort"] != "none"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"thinking": "yes"}, "thinking"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "5"}}, "thinking.budget_tokens"),
        ({"thinking_token_budget": -5}, "thinking_token_budget"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens"),
        ({"reasoning_budget": -2}, "reasoning_budget"),
    ],
)
def test_a_wrong_wish_about_thinking_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        _asked(**fields)
    assert caught.value.param == param


def test_tools_that_are_not_allowed_are_not_shown() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    named = [{"type": "function", "function": {"name": name}} for name in "hf"]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    asked = _asked(tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in asked.tools] == ["f", "h"]
    assert asked.tool_choice == "required"


def test_tools_are_for_the_template_unless_they_must_not_be_used() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert _asked(tools=tools).tools == tools
    assert _asked(tools=tools, tool_choice="none").tools == []
    assert _asked(tools=tools, parallel_tool_calls=False).is_parallel is False
    assert _plan(tools=tools, tool_choice="auto").num_choices == 1


def test_reasoning_in_the_history_has_two_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        (message,) = _messages({"role": "assistant", "content": "x", name: "why"})
        assert message["reasoning_content"] == "why"


def test_calls_in_their_old_form_are_calls() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "a wall"},
    ]
    _, call, result = template_messages(decode_chat(msgspec.json.encode({"messages": messages})).messages)
    assert call["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    ]
    assert result == {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "a wall"}
    messages[1]["function_call"] = {"arguments": "{}"}
    with pytest.raises(RequestError) as caught:
        template_messages(decode_chat(msgspec.json.encode({"messages": messages})).messages)
    assert caught.value.param == "messages[1].function_call[0].function.name"
