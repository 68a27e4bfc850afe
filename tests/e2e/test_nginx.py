"""The deployed shape: the real nginx, two front ends, one worker, streams through all of it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.nginx import find_nginx, free_port, proxying
from tests.support.server import (
    DEADLINE_S,
    Running,
    chat_request,
    complete,
    delta_text,
    stream_events,
    stream_text,
    wait_until,
)
from tests.support.smuggling import CASES, PLAIN

pytestmark = pytest.mark.e2e


class Deployment:
    """nginx, the front ends behind it and their worker, each started alone as in containers."""

    def __init__(self, directory: Path, model: Path, stack: ExitStack) -> None:
        find_nginx()
        shared = directory / "shared"
        self._environment = {
            "DS4_SERVER_SHARED_DIR": str(shared),
            "DS4_SERVER_MODEL": str(model),
            "DS4_SERVER_DEVICE": "reference",
            "DS4_SERVER_BATCHED_SESSIONS": "64",
        }
        self.ports = [free_port(), free_port()]
        self.fronts: list[Running] = []
        self.worker = self._start(stack, "worker")
        for port in self.ports:
            self.fronts.append(self._start(stack, "front", "--port", str(port)))
        self.url = stack.enter_context(proxying(directory, self.ports))
        wait_until(lambda: all(map(self._ready, self.ports)), "two ready front ends")

    def _start(self, stack: ExitStack, *arguments: str) -> Running:
        running = Running(["ds4", *arguments], self._environment)
        stack.callback(running.kill)
        return running

    def _ready(self, port: int) -> bool:
        for process in (self.worker, *self.fronts):
            assert process.process.poll() is None, process.log
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=DEADLINE_S).status_code == 200
        except httpx.TransportError:
            return False

    def gauge(self, name: str) -> float:
        """A metric, asked of the last front end directly."""
        text = httpx.get(f"http://127.0.0.1:{self.ports[-1]}/metrics", timeout=DEADLINE_S).text
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])


@pytest.fixture(scope="module")
def deployment(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with ExitStack() as stack:
        yield Deployment(tmp_path_factory.mktemp("nginx"), tiny_model, stack)


def test_tokens_pass_through_while_they_are_made(deployment: Deployment) -> None:
    body = chat_request("hello", 3000, stream=True)
    with httpx.stream(
        "POST", f"{deployment.url}/v1/chat/completions", json=body, timeout=DEADLINE_S
    ) as response:
        events = stream_events(response)  # held on to: dropping it would close the connection
        next(event for event in events if delta_text(event))
        assert deployment.gauge("ds4_num_requests_running") == 1, "nothing came before the generation ended"
    wait_until(
        lambda: deployment.gauge("ds4_num_requests_running") == 0, "the end of a generation nobody reads"
    )


def test_sixty_four_streams_at_once_are_all_whole(deployment: Deployment) -> None:
    bodies = [chat_request("hello", 24, seed=seed, temperature=0.9) for seed in range(64)]
    expected = [complete(deployment.url, body)["choices"][0]["message"]["content"] for body in bodies[:8]]

    async def one(client: httpx.AsyncClient, body: dict[str, object]) -> str:
        async with client.stream(
            "POST", f"{deployment.url}/v1/chat/completions", json={**body, "stream": True}
        ) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert not any('"error"' in line for line in lines)
        return "".join(delta_text(json.loads(line[6:])) for line in lines[:-1])

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(timeout=DEADLINE_S, limits=limits) as client:
            return await asyncio.gather(*(one(client, body) for body in bodies))

    texts = asyncio.run(all_at_once())
    assert texts[:8] == expected
    assert len(set(texts)) > 32, "different seeds gave the same text"


def test_errors_keep_their_status_and_shape(deployment: Deployment) -> None:
    response = httpx.post(f"{deployment.url}/v1/chat/completions", content=b"{", timeout=DEADLINE_S)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    missing = httpx.get(f"{deployment.url}/v1/nothing", timeout=DEADLINE_S)
    assert missing.status_code == 404
    assert "error" in missing.json()


def _through_proxy(url: str, raw: bytes, *, wanted: int = 0) -> bytes:
    """Send bytes as they are; so many answers, or everything that comes back within a moment."""
    said = b""
    timeout_s = DEADLINE_S if wanted else 0.5
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout_s) as connection,
    ):
        connection.sendall(raw)
        while not wanted or said.count(b"HTTP/1.1 ") < wanted:
            piece = connection.recv(65536)
            if not piece:
                break
            said += piece
    return said


def test_no_request_can_be_smuggled_past_the_proxy(deployment: Deployment) -> None:
    num_asked = 0

    def num_successes() -> float:
        """Of the front ends, whatever the proxy made of them; without the questions themselves."""
        nonlocal num_asked
        num_asked += 1
        text = httpx.get(f"http://127.0.0.1:{deployment.ports[-1]}/metrics", timeout=DEADLINE_S).text
        (found,) = re.findall(r'^ds4_http_responses_total\{.*"2xx"\} (\S+)$', text, re.MULTILINE)
        return float(found) - num_asked

    before = num_successes()
    assert b"HTTP/1.1 200 " in _through_proxy(deployment.url, PLAIN, wanted=2)
    wait_until(
        lambda: num_successes() == before + 1, "the count of the hidden request: so this test can fail"
    )
    for name, raw in CASES.items():
        said = _through_proxy(deployment.url, raw)
        assert said.count(b"HTTP/1.1 ") <= 1, name
        assert b"HTTP/1.1 200 " not in said, name
        assert num_successes() == before + 1, f"{name}: a front end answered the hidden one"


def test_requests_go_on_while_one_front_end_is_dead(deployment: Deployment) -> None:
    # The last test of this module that needs both: the first front end does not come back.
    expected = stream_text(deployment.url, chat_request("hello", 8))
    os.kill(deployment.fronts[0].process.pid, signal.SIGKILL)
    for _ in range(8):
        assert stream_text(deployment.url, chat_request("hello", 8)) == expected
