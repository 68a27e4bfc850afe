"""Whole answers and every stream event under the types of the clients' own packages, strictly."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.ds4.api.test_chat_tools import CALL, PING, THINKING, TOOLS, hermes
from tests.ds4.api.test_messages import parse_named
from tests.support.front_rig import Front, parse_events, with_front

_SAID: Final = "why\nnot\n</think>\n\nSo.\n" + CALL + "\n" + PING
_CHUNK: Final = TypeAdapter(ChatCompletionChunk)
_MESSAGE_EVENT: Final[TypeAdapter[Any]] = TypeAdapter(RawMessageStreamEvent)
_RESPONSE_EVENT: Final[TypeAdapter[Any]] = TypeAdapter(ResponseStreamEvent)
_ASKED: Final = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
_TOOLS: Final[list[dict[str, Any]]] = list(TOOLS)
_FUNCTIONS: Final = [{"type": "function", **tool["function"]} for tool in _TOOLS]
_CLIENT_TOOLS: Final = [
    {"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in _TOOLS
]


async def _post(front: Front, path: str, body: dict[str, Any]) -> bytes:
    response = await front.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.content


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_chat_answers_and_chunks_are_the_openai_packages(tmp_path: Path, logprobs: dict[str, Any]) -> None:
    async def scenario(front: Front) -> None:
        body = {**_ASKED, **logprobs, "tools": TOOLS, "n": 2}
        whole = ChatCompletion.model_validate_json(
            await _post(front, "/v1/chat/completions", body), strict=True
        )
        assert [choice.finish_reason for choice in whole.choices] == ["tool_calls"] * 2
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        chunks = parse_events(await _post(front, "/v1/chat/completions", streamed))
        typed = [_CHUNK.validate_json(json.dumps(chunk), strict=True) for chunk in chunks[:-1]]
        assert typed[-1].choices == []
        assert typed[-1].usage == whole.usage

    with_front(tmp_path, scenario, _SAID, model=hermes(THINKING))


@pytest.mark.parametrize("reasoning", [{}, {"reasoning": {"effort": "low", "summary": "auto"}}])
def test_responses_and_their_events_are_the_openai_packages(
    tmp_path: Path, reasoning: dict[str, Any]
) -> None:
    async def scenario(front: Front) -> None:
        body = {"model": "m", "input": "hello", "tools": _FUNCTIONS, "top_logprobs": 1, **reasoning}
        whole = Response.model_validate_json(await _post(front, "/v1/responses", body), strict=True)
        assert [item.type for item in whole.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        events = parse_named(await _post(front, "/v1/responses", {**body, "stream": True}))
        typed = [_RESPONSE_EVENT.validate_json(json.dumps(event), strict=True) for event in events]
        assert [event.sequence_number for event in typed] == list(range(len(typed)))
        opened = [event.output_index for event in typed if event.type == "response.output_item.added"]
        closed = [event.output_index for event in typed if event.type == "response.output_item.done"]
        assert opened == closed == [0, 1, 2, 3]
        last = typed[-1]
        assert last.type == "response.completed"
        assert [item.type for item in last.response.output] == [item.type for item in whole.output]
        for event in typed:
            if event.type == "response.function_call_arguments.done":
                deltas = (each for each in typed if each.type == "response.function_call_arguments.delta")
                assert event.arguments == "".join(
                    each.delta for each in deltas if each.item_id == event.item_id
                )

    with_front(tmp_path, scenario, _SAID, model=hermes(THINKING))


def test_messages_and_their_events_are_the_anthropic_packages(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        body = {**_ASKED, "tools": _CLIENT_TOOLS, "thinking": {"type": "enabled", "budget_tokens": 100}}
        whole = Message.model_validate_json(await _post(front, "/v1/messages", body), strict=True)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
        events = parse_named(await _post(front, "/v1/messages", {**body, "stream": True}))
        typed = [
            _MESSAGE_EVENT.validate_json(json.dumps(event), strict=True)
            for event in events
            if event["type"] != "ping"
        ]
        indices = [event.index for event in typed if event.type == "content_block_start"]
        assert (
            indices == [event.index for event in typed if event.type == "content_block_stop"] == [0, 1, 2, 3]
        )
        inputs = [
            event.delta.partial_json
            for event in typed
            if getattr(getattr(event, "delta", None), "type", "") == "input_json_delta"
        ]
        assert json.loads("".join(inputs[: inputs.index("{}")])) == {"city": "Bon", "n": 1}
        assert typed[-2].type == "message_delta"
        assert typed[-2].delta.stop_reason == whole.stop_reason == "tool_use"

    with_front(tmp_path, scenario, _SAID, model=hermes(THINKING))
