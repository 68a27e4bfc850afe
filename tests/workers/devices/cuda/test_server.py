"""The whole server on the emulator: real processes, streams over HTTP, the reference device's tokens."""

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.nginx import free_port
from tests.support.server import DEADLINE_S, Running, chat_request, complete, delta_text, serving, wait_until
from tests.support.tiny_model import TinyShape, write_tiny_model
from tests.workers.devices.cuda.rig import needs_compiler

pytestmark = [pytest.mark.e2e, needs_compiler]

PROMPTS = ["hello world", "and the", "ring of words, and another", "x"]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F32 weights, so that only float16 keys and values tell both devices apart."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_model(path, quant="F32", shape=TinyShape(num_layers=2), seed=5)


class Emulated:
    """A worker on the emulator and one front end, each started alone."""

    def __init__(self, directory: Path, model: Path, stack: ExitStack) -> None:
        self._environment = {
            "DS4_SERVER_SHARED_DIR": str(directory / "shared"),
            "DS4_SERVER_MODEL": str(model),
            "DS4_SERVER_BATCHED_SESSIONS": "8",
            "DS4_SERVER_MAX_BATCH_TOKENS": "32",
            "DS4_SERVER_BATCH_INVARIANT": "1",  # draws must not depend on who else is drawing
            "DS4_SERVER_LOG_LEVEL": "debug",
        }
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.worker = self._start(stack, "tests.support.emulated_worker")
        self.front = self._start(stack, "ds4", "front", "--port", str(port))
        wait_until(self._is_ready, "a ready front end")

    def _start(self, stack: ExitStack, *arguments: str) -> Running:
        running = Running(list(arguments), self._environment)
        stack.callback(running.kill)
        return running

    def _is_ready(self) -> bool:
        for process in (self.worker, self.front):
            assert process.process.poll() is None, process.log
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=DEADLINE_S).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def emulated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    with ExitStack() as stack:
        yield Emulated(tmp_path_factory.mktemp("emulated"), model, stack)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """What the reference device says to each prompt."""
    with serving(model, "--device", "reference", "--front-ends", "1") as server:
        return [text_of(complete(server.url, chat_request(prompt, NUM_TOKENS))) for prompt in PROMPTS]


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    async with client.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return "".join(delta_text(json.loads(line[6:])) for line in lines[:-1])


def streams(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts of all, streamed at once."""

    async def run() -> list[str]:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            return await asyncio.gather(*(stream(client, url, body) for body in bodies))

    return asyncio.run(run())


def test_streams_of_one_batch_are_the_references(emulated: Emulated, expected: list[str]) -> None:
    texts = streams(emulated.url, [chat_request(prompt, NUM_TOKENS) for prompt in PROMPTS])
    assert texts == expected
    emulated.worker.says("device=cuda")
    emulated.worker.says("captured")  # decode steps went by graph


def test_a_lone_request_gets_them_too(emulated: Emulated, expected: list[str]) -> None:
    assert text_of(complete(emulated.url, chat_request(PROMPTS[2], NUM_TOKENS))) == expected[2]


def test_seeds_draw_the_same_text_again(emulated: Emulated) -> None:
    bodies = [chat_request("and", 12, seed=seed, temperature=1.2) for seed in range(4)]
    once = streams(emulated.url, bodies)
    assert streams(emulated.url, bodies) == once
    assert len(set(once)) == 4


def test_it_drains(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        emulated = Emulated(tmp_path, model, stack)
        emulated.worker.send(signal.SIGTERM)
        assert emulated.worker.wait() == 0, emulated.worker.log
