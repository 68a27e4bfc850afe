"""A device that fails under the real server: every kind of request goes on exactly, only poison fails."""

import os
import re
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import schemas
from tests.support.server import (
    DEADLINE_S,
    Server,
    chat_request,
    complete,
    serving,
    stream_events,
    wait_until,
)
from tests.support.struck import POISON, SLOW, STRIKE

pytestmark = pytest.mark.e2e

STRUCK = "tests.support.struck"
CRASH = "child=worker exit_code=-11"
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 99},
    "minItems": 60,
    "maxItems": 60,
}
# What a successor has to rebuild from the tokens so far, one kind each.
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {
        **SAMPLED,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "seed": 11,
    },
    "log-probabilities": {**SAMPLED, "logprobs": True, "top_logprobs": 3, "seed": 12},
    "several choices": {**SAMPLED, "n": 3, "seed": 13},
    "least tokens": {**SAMPLED, "ignore_eos": False, "min_tokens": 150, "seed": 14},
    "biases": {**SAMPLED, "logit_bias": {"40": 3.0, "41": -100}, "seed": 15},
    "a grammar": {
        "temperature": 1.0,
        "ignore_eos": False,
        "seed": 16,
        "max_tokens": 1000,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NUMBERS}},
    },
    "a forced call": {
        "temperature": 1.0,
        "ignore_eos": False,
        "seed": 17,
        "max_tokens": 400,
        "tools": [{"type": "function", "function": {"name": "person", "parameters": schemas.PERSON}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}


CHATS["forgotten text"] = {**SAMPLED, "seed": 18}  # gets a stop string that comes late


def folded(choice: dict[str, Any]) -> dict[str, Any]:
    """What a client gets of one choice, without ids that are drawn anew."""
    message = choice["message"]
    return {
        "text": message.get("content") or "",
        "calls": [call["function"] for call in message.get("tool_calls") or ()],
        "logprobs": (choice.get("logprobs") or {}).get("content"),
        "end": choice["finish_reason"],
    }


def whole(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer in one piece."""
    return [folded(choice) for choice in complete(url, body)["choices"]]


def streamed(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The same, put together from a stream."""
    found: dict[int, dict[str, Any]] = {}
    body = {**body, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S) as response:
        for event in stream_events(response):
            for choice in event["choices"]:
                one = found.setdefault(
                    choice["index"], {"text": "", "calls": [], "logprobs": None, "end": None}
                )
                _add_delta(one, choice)
    return [found[index] for index in sorted(found)]


def _add_delta(one: dict[str, Any], choice: dict[str, Any]) -> None:
    one["text"] += choice["delta"].get("content") or ""
    for call in choice["delta"].get("tool_calls") or ():
        if call["index"] == len(one["calls"]):
            one["calls"].append({"name": call["function"]["name"], "arguments": ""})
        one["calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""
    if choice.get("logprobs"):
        one["logprobs"] = (one["logprobs"] or []) + choice["logprobs"]["content"]
    one["end"] = choice["finish_reason"] or one["end"]


def metric(server: Server, name: str) -> float:
    """One metric without labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def bodies(server: Server, num_tokens: int, kinds: Iterable[str] = tuple(CHATS)) -> dict[str, dict[str, Any]]:
    """One request of each kind."""
    made = {name: chat_request(f"hello {name}", num_tokens) | CHATS[name] for name in kinds}
    text = whole(server.url, made["forgotten text"])[0]["text"]
    stops = (text[at : at + 4] for at in range(len(text) * 3 // 4, len(text) - 4))
    made["forgotten text"]["stop"] = [next(stop for stop in stops if text.index(stop) > len(text) // 2)]
    return made


@pytest.mark.parametrize(
    ("device", "blow"), [("reference", STRIKE), ("reference", signal.SIGKILL), ("cuda", STRIKE)]
)
def test_every_kind_of_request_goes_on_exactly_after_the_device_failed(
    tiny_model: Path, device: str, blow: signal.Signals
) -> None:
    flags = ["--device", device, "--front-ends", "2", "--ctx", "4096"]
    if device == "cuda":  # whose emulator takes a while for each token
        flags += ["--batch-invariant", "--batched-sessions", "8"]
    with serving(tiny_model, *flags, module=STRUCK) as server:
        if device == "cuda":
            made = bodies(server, 24, ("penalties", "log-probabilities", "forgotten text"))
        else:
            made = bodies(server, 400)
        expected = {name: whole(server.url, body) for name, body in made.items()}
        assert expected["forgotten text"][0]["end"] == "stop"
        if device != "cuda":
            schemas.check(expected["a grammar"][0]["text"], NUMBERS)
        os.kill(server.worker(), SLOW)
        with ThreadPoolExecutor(2 * len(made)) as pool:
            before = metric(server, "ds4_generation_tokens_total")
            answers = {
                (name, how): pool.submit(how, server.url, body)
                for name, body in made.items()
                for how in (whole, streamed)
            }
            num_choices = sum(body.get("n", 1) for body in made.values()) * 2
            wait_until(lambda: metric(server, "ds4_num_requests_running") == num_choices, "all of them")
            wait_until(
                lambda: metric(server, "ds4_generation_tokens_total") > before + 5 * num_choices, "tokens"
            )
            os.kill(server.worker(), blow)
            for (name, how), answer in answers.items():
                assert answer.result() == expected[name], (name, how)
        assert metric(server, "ds4_resumed_streams_total") >= len(answers)
        if blow == STRIKE:
            server.says("the device failed: an illegal memory access")
            server.says("exit_code=70")


def test_a_request_that_kills_the_worker_fails_alone_and_is_not_tried_again(tiny_model: Path) -> None:
    with serving(tiny_model, "--device", "reference", "--front-ends", "2", module=STRUCK) as server:
        made = [chat_request(f"innocent {number}", 500, seed=number, **SAMPLED) for number in range(5)]
        expected = [whole(server.url, body) for body in made]
        poison = chat_request(f"please {POISON}", 20)
        os.kill(server.worker(), SLOW)
        with ThreadPoolExecutor(len(made)) as pool:
            answers = [pool.submit(streamed, server.url, body) for body in made]
            wait_until(lambda: metric(server, "ds4_num_requests_running") == len(made), "all of them")
            refused = post(server, poison)
            assert refused.status_code == 500, refused.text
            assert "crashed each time" in refused.json()["error"]["message"]
            assert [answer.result() for answer in answers] == expected
        server.says(CRASH, 4)  # two to become a suspect, two alone
        for _ in range(4):  # over both front ends
            again = post(server, poison)
            assert again.status_code == 500
            assert again.json()["error"]["code"] == refused.json()["error"]["code"]
        stream = post(server, poison | {"stream": True})
        assert '"error"' in stream.text
        assert server.log.count(CRASH) == 4
        assert POISON not in server.log
        assert metric(server, "ds4_requests_quarantined_total") == 1
        assert whole(server.url, made[0]) == expected[0]


def post(server: Server, body: dict[str, Any]) -> httpx.Response:
    """One chat request that may fail, after a hunt through several restarts."""
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=3 * DEADLINE_S)
