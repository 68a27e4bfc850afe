"""ds4/api/messages.py: what a client of /v1/messages sees."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ds4.errors import ErrorCode
from tests.support.front_rig import Front, until, with_front
from tests.support.scripted_worker import failing

_BODY = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


async def _post(front: Front, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    return await front.client.post(path, json={**_BODY, **fields})


def parse_named(raw: bytes) -> list[Any]:
    """The events of a stream; each must be named by its type."""
    out = []
    for frame in filter(None, raw.split(b"\n\n")):
        name, data = frame.split(b"\n")
        event = msgspec.json.decode(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        out.append(event)
    return out


async def _events(front: Front, **fields: Any) -> list[Any]:
    response = await _post(front, stream=True, **fields)
    assert response.status_code == 200, response.text
    return parse_named(response.content)


def test_an_answer_has_its_text_reason_and_exact_usage(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await _post(front)
        answer = response.json()
        assert front.worker is not None
        num_prompt = len(front.worker.requests[0].prompt)
        assert answer.pop("id").startswith("msg_")
        assert answer == {
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [{"type": "text", "text": "hello world"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_prompt - 3,  # the rig's worker says that 3 were cached
                "output_tokens": len(front.encode("hello world")),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 3,
            },
        }
        assert response.headers["request-id"] == response.headers["x-request-id"]

    with_front(tmp_path, scenario)


def test_a_stream_has_anthropics_order_and_the_text_of_the_whole_answer(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        events = await _events(front)
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["message_start", "content_block_start", "ping"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        deltas = [event for event in events if event["type"] == "content_block_delta"]
        assert "".join(event["delta"]["text"] for event in deltas) == "hello world"
        assert {event["index"] for event in deltas} == {0}
        start = events[0]["message"]
        assert start["content"] == []
        assert start["stop_reason"] is None
        assert start["usage"]["output_tokens"] == 0
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        whole = (await _post(front)).json()
        assert events[-2]["usage"] == whole["usage"]

    with_front(tmp_path, scenario)


def test_the_stop_sequence_is_told_whole_and_streamed(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        fields: dict[str, Any] = {"stop_sequences": ["zebra", "o w"]}
        whole = (await _post(front, **fields)).json()
        assert whole["content"] == [{"type": "text", "text": "hell"}]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "o w")
        ending = (await _events(front, **fields))[-2]["delta"]
        assert ending == {"stop_reason": "stop_sequence", "stop_sequence": "o w"}

    with_front(tmp_path, scenario)


def test_the_limit_ends_an_answer_as_max_tokens(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        whole = (await _post(front, max_tokens=2)).json()
        assert whole["stop_reason"] == "max_tokens"
        assert whole["usage"]["output_tokens"] == 2

    with_front(tmp_path, scenario)


def test_an_answer_without_text_has_no_block(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert (await _post(front)).json()["content"] == []
        assert [event["type"] for event in await _events(front)] == [
            "message_start",
            "message_delta",
            "message_stop",
        ]

    with_front(tmp_path, scenario, script="")


def test_silence_is_broken_by_ping_events(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.hold_after(0)
        waiting = asyncio.ensure_future(_events(front))
        await until(lambda: front.worker is not None and front.worker.num_open == 1)
        for stream in list(front.state.keep_alive._streams):
            stream.tick(stream.last_write_s + 5)
        front.worker.release()
        kinds = [event["type"] for event in await waiting]
        assert kinds[:2] == ["message_start", "ping"]
        assert kinds[-1] == "message_stop"

    with_front(tmp_path, scenario)


def test_count_tokens_is_what_the_prompt_takes_and_needs_no_worker(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        system = [{"type": "text", "text": "be brief"}]
        counted = await _post(front, "/v1/messages/count_tokens", system=system)
        assert counted.status_code == 200
        front.start_worker("x")
        await front.ready()
        usage = (await _post(front, system=system)).json()["usage"]
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}

    with_front(tmp_path, scenario, script=None)


def _is_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["x-request-id"]
    return str(body["error"]["message"])


def test_an_answer_that_has_begun_goes_on_right_there(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        begun = {"role": "assistant", "content": "It <|im_end|> is"}
        whole = (await _post(front, messages=[*_BODY["messages"], begun])).json()  # type: ignore[misc]
        assert whole["content"] == [{"type": "text", "text": "hello world"}]
        assert front.worker is not None
        tokenizer = front.state.model.tokenizer
        plain, asked = (request.prompt for request in await _prompts(front))
        assert asked[: len(plain)] == plain, "the same prompt, and then what has begun"
        assert tokenizer.decode(asked[len(plain) :], special=True) == begun["content"]
        assert not any(tokenizer.is_control(token_id) for token_id in asked[len(plain) :])

    async def _prompts(front: Front) -> Any:
        await _post(front)
        assert front.worker is not None
        return reversed(front.worker.requests[-2:])

    with_front(tmp_path, scenario)


def test_chats_own_fields_mean_the_same_here_or_are_refused(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        fields: dict[str, Any] = {
            "typical_p": 0.5,
            "logit_bias": {"5": 2},
            "stop": "lo",
            "n": 1,
            "stream_options": {},
        }
        answer = (await _post(front, **fields)).json()
        assert (answer["content"][0]["text"], answer["stop_sequence"]) == ("hel", "lo")
        own = (await _post(front, stop="lo", stop_sequences=["wor"])).json()
        assert own["content"][0]["text"] == "hello ", "the dialect's own field wins"
        assert front.worker is not None
        sampling = front.worker.requests[0].request.sampling
        assert (sampling.typical_p, sampling.logit_bias) == (0.5, ((5, 2.0),))
        for refused in (
            {"n": 2},
            {"best_of": 3},
            {"logprobs": True},
            {"timings_per_token": True},
            {"mirostat": 1},
        ):
            response = await _post(front, **refused)
            assert response.status_code == 400
            assert response.json()["error"]["message"].startswith(next(iter(refused)))

    with_front(tmp_path, scenario)


def test_errors_have_anthropics_form_on_its_routes(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        key = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        post, path = front.client.post, "/v1/messages"
        _is_error(await post(path, json=_BODY), 401, "authentication_error")
        front.client.headers.update(key)
        _is_error(await front.client.get(path), 405, "invalid_request_error")
        _is_error(await post(path + "/nothing", json=_BODY), 404, "not_found_error")
        _is_error(await post(path, content=b"{"), 400, "invalid_request_error")
        _is_error(await post(path, content=b"x" * 3000), 413, "request_too_large")
        message = _is_error(await _post(front, messages=[]), 400, "invalid_request_error")
        assert "messages" in message
        long = await _post(front, messages=[{"role": "user", "content": "a b " * 600}])
        _is_error(long, 400, "invalid_request_error")
        assert long.json()["error"]["n_ctx"] > 0
        assert (await _post(front)).status_code == 200
        other = await post("/v1/chat/completions", content=b"{")
        assert "type" not in other.json()

    with_front(tmp_path, scenario, api_key="k", max_body_bytes=2800)


def test_without_a_worker_the_server_is_overloaded_to_anthropics_clients(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await _post(front)
        _is_error(response, 529, "overloaded_error")
        assert response.headers["retry-after"]

    with_front(tmp_path, scenario, script=None)


def test_a_full_server_is_a_rate_limit(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.hold_after(0)
        waiting = asyncio.ensure_future(_post(front))
        await until(lambda: front.worker is not None and front.worker.num_open == 1)
        response = await _post(front)
        _is_error(response, 429, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        front.worker.release()
        assert (await waiting).status_code == 200

    with_front(tmp_path, scenario, slots_per_front_end=1, worker={"slots_per_front_end": 1})


def test_a_failure_in_a_stream_is_an_error_event(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.failure = failing(ErrorCode.NUMERIC, "not a number")
        events = await _events(front)
        assert events[-1]["type"] == "error"
        assert events[-1]["error"] == {"type": "api_error", "message": "not a number"}
        assert not any(event["type"] == "message_stop" for event in events)

    with_front(tmp_path, scenario)


_CALL = '{"name": "look", "arguments": {"at": "é"}}'
_TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}


def test_a_call_is_a_block_and_its_result_goes_back(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        front.start_worker(_CALL)
        await front.ready()
        whole = (await _post(front, tools=[_TOOL])).json()
        (block,) = whole["content"]
        assert block["id"].startswith("toolu_")
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "look", {"at": "é"})
        assert whole["stop_reason"] == "tool_use"
        events = await _events(front, tools=[_TOOL])
        start = events[1]["content_block"]
        assert (start["type"], start["name"], start["input"]) == ("tool_use", "look", {})
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert {delta["type"] for delta in deltas} == {"input_json_delta"}
        assert msgspec.json.decode("".join(delta["partial_json"] for delta in deltas)) == {"at": "é"}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "a cat"}
        history = [
            *_BODY["messages"],  # type: ignore[misc]
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": [result]},
        ]
        assert (await _post(front, tools=[_TOOL], messages=history)).status_code == 200
        assert front.worker is not None
        prompt = front.worker.requests[-1].prompt
        assert "a cat" in front.state.model.tokenizer.decode(prompt, special=True)

    with_front(tmp_path, scenario, script=None)
