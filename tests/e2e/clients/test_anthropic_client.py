"""The Anthropic Python client against a real server."""

from collections.abc import Iterator
from typing import Any, Final

import anthropic
import pytest

from tests.support.server import DEADLINE_S, Server

pytestmark = pytest.mark.e2e

_USER: Final[list[anthropic.types.MessageParam]] = [{"role": "user", "content": "hello"}]
_TOOLS: Final[list[anthropic.types.ToolUnionParam]] = [
    {"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}
]


@pytest.fixture
def client(tiny_server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=tiny_server.url, api_key="any", max_retries=0, timeout=DEADLINE_S
    ) as made:
        yield made


def test_a_message_and_its_stream_say_the_same(client: anthropic.Anthropic) -> None:
    extra = {"seed": 5}
    whole = client.messages.create(
        model="m", max_tokens=40, messages=_USER, system="be brief", extra_body=extra
    )
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole._request_id
    with client.messages.stream(
        model="m", max_tokens=40, messages=_USER, system="be brief", extra_body=extra
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.to_dict()["text"] for block in streamed.content] == [
        block.to_dict()["text"] for block in whole.content
    ]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="m", messages=_USER, tools=_TOOLS)
    usage = client.messages.create(model="m", max_tokens=1, messages=_USER, tools=_TOOLS).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_tool_turns_are_taken(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="m",
        max_tokens=5,
        tools=_TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        messages=[
            *_USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look"},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a cat"}],
            },
        ],
    )
    assert answer.usage.output_tokens <= 5


def test_errors_are_the_exceptions_that_programs_catch(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="m", max_tokens=5, messages=[])
    assert "messages" in str(refused.value)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(
            model="m", max_tokens=5, messages=[{"role": "user", "content": "word " * 30_000}]
        )


@pytest.mark.parametrize("is_beta", [False, True])
def test_a_forced_call_streams_and_its_result_is_taken(client: anthropic.Anthropic, is_beta: bool) -> None:
    """The SDK's own loop: it adds the deltas up to a call with an input, which then goes back."""
    messages: Any = client.beta.messages if is_beta else client.messages
    asked = {"model": "m", "max_tokens": 300, "tools": _TOOLS}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with messages.stream(**asked, messages=_USER, tool_choice=choice) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_message()
    assert "input_json" in kinds
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert (call.type, call.name) == ("tool_use", "look")
    assert isinstance(call.input, dict)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a wall", "is_error": False}
    history = [
        *_USER,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    assert messages.create(**asked, messages=history).usage.output_tokens > 0


def test_thinking_of_a_model_that_does_not_is_refused_and_adaptive_taken(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "m", "max_tokens": 2000, "messages": _USER}
    with pytest.raises(anthropic.BadRequestError, match=r"thinking: .*leave it out"):
        client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
    asked["max_tokens"] = 5
    assert client.messages.create(**asked, thinking={"type": "adaptive"}).usage.output_tokens <= 5


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    extra = {"temperature": 0, "ignore_eos": True}
    asked: Any = {"model": "m", "max_tokens": 40, "messages": _USER, "extra_body": extra}
    said = client.messages.create(**asked).content[0]
    assert said.type == "text"
    stop = said.text[5:8]
    stopped = client.messages.create(**asked, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].to_dict()["text"] == said.text[: said.text.index(stop)]
