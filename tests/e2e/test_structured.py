"""Structured output from real processes: valid whatever happens around it."""

import os
import signal
import threading
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
    delta_text,
    process_children,
    serving,
    stream_events,
    wait_until,
)

pytestmark = pytest.mark.e2e

SAMPLED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": False}
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 9},
    "minItems": 150,
    "maxItems": 150,
}
BOMB = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(1, 30)]}


def of_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop", answer
    text: str = choice["message"]["content"]
    return text


def test_answers_of_many_clients_are_valid_and_do_not_depend_on_each_other(tiny_server: Server) -> None:
    def run(number: int) -> str:
        schema = schemas.ALL[number % len(schemas.ALL)]
        text = text_of(
            complete(tiny_server.url, chat_request("hello", 300, seed=number, **SAMPLED, **of_schema(schema)))
        )
        schemas.check(text, schema)
        return text

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(run, range(24)))
    assert [run(number) for number in range(4)] == together[:4]


def test_every_kind_of_structure_is_met(tiny_server: Server) -> None:
    def ask(**fields: Any) -> str:
        return text_of(complete(tiny_server.url, chat_request("hello", 60, **SAMPLED, **fields)))

    assert ask(guided_choice=["red", "green"]) in ("red", "green")
    assert ask(guided_regex="[ab]{3}-[0-9]")[3] == "-"
    assert ask(grammar='root ::= "x" [0-9]') in {f"x{digit}" for digit in range(10)}
    assert ask(guided_grammar='start: "y" D\nD: /[0-9]/') in {f"y{digit}" for digit in range(10)}
    assert ask(structured_outputs={"choice": ["only"]}) == "only"


def test_a_forced_call_has_the_arguments_of_its_schema(tiny_server: Server) -> None:
    tool = {"type": "function", "function": {"name": "person", "parameters": schemas.PERSON}}
    body = chat_request(
        "hello", 400, **SAMPLED, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = complete(tiny_server.url, body)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "person"
    schemas.check(call["function"]["arguments"], schemas.PERSON)


def test_a_structured_stream_goes_on_after_the_worker_was_killed(tiny_model: Path) -> None:
    body = chat_request("hello", 1000, seed=5, **SAMPLED, **of_schema(NUMBERS))
    with serving(tiny_model, "--device", "reference") as server:
        expected = text_of(complete(server.url, body))
        schemas.check(expected, NUMBERS)
        worker, text = server.worker(), ""
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=DEADLINE_S
        ) as response:
            for event in stream_events(response):
                text += delta_text(event)
                if len(text) > 40 and worker:
                    os.kill(worker, signal.SIGKILL)
                    worker = 0
        assert worker == 0
        assert text == expected


def test_a_schema_that_takes_years_is_refused_while_others_are_served(tiny_server: Server) -> None:
    refused: list[httpx.Response] = []

    def attack() -> None:
        body = chat_request("hello", 10, **of_schema(BOMB))
        refused.append(httpx.post(f"{tiny_server.url}/v1/chat/completions", json=body, timeout=DEADLINE_S))

    def checkers() -> list[int]:
        complete(tiny_server.url, chat_request("hello", 9, guided_choice=["ok"]))
        return [pid for front in fronts for pid in process_children(front, "grammar_check")]

    fronts = tiny_server.front_ends()
    stopped = wait_until(lambda: len(found := checkers()) == len(fronts) and found, "both checking processes")
    attackers = [threading.Thread(target=attack) for _ in range(3)]
    for pid in stopped:  # so that no check can be over before the others were served
        os.kill(pid, signal.SIGSTOP)
    for attacker in attackers:
        attacker.start()
    for _ in range(8):
        assert complete(tiny_server.url, chat_request("hello", 4))
    assert all(attacker.is_alive() for attacker in attackers)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    for attacker in attackers:
        attacker.join(DEADLINE_S)
    assert [answer.status_code for answer in refused] == [400] * 3
    assert {answer.json()["error"]["code"] for answer in refused} == {"grammar_too_complex"}
    assert (
        text_of(complete(tiny_server.url, chat_request("hello", 9, **SAMPLED, guided_choice=["ok"]))) == "ok"
    )


def test_the_checking_process_ends_with_its_front_end(tiny_model: Path) -> None:
    def checkers() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().decode().split("\0")
                except OSError:
                    continue
                if "ds4.text.grammar_check" in words and str(tiny_model) in words:
                    found.append(entry.name)
        return found

    with serving(tiny_model, "--device", "reference", "--front-ends", "1") as server:
        before = set(checkers())
        complete(server.url, chat_request("hello", 9, guided_choice=["ok"]))
        (ours,) = set(checkers()) - before
        os.kill(server.front_ends()[0], signal.SIGKILL)
        wait_until(lambda: ours not in checkers(), "the end of the checking process")
