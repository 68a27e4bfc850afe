"""One real front end in the test's own event loop, with a scripted worker behind the real ring.

Owns: the rig. Runs in: tests of the front end. Requests travel through sockets, uvicorn and the ring.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import uvicorn
import uvloop

from ds4.api.app import create_app
from ds4.api.connection import bounded_connection
from ds4.api.serve import FrontServer
from ds4.api.state import FrontState
from ds4.config import Settings
from ds4.generation import GenerationRequest
from tests.support.scripted_worker import Script, ScriptedWorker
from tests.support.tiny_model import write_tiny_model

DEADLINE_S: Final = 240.0


def run(scenario: Callable[[], Coroutine[Any, Any, None]], deadline_s: float | None = DEADLINE_S) -> None:
    """Run an async test on the loop that serves in production, with a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(deadline_s):
            await scenario()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread or task brings about."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the condition belongs to a thread
            await asyncio.sleep(0.002)


class Front:
    """The parts of a running rig."""

    def __init__(
        self, state: FrontState, server: FrontServer, client: httpx.AsyncClient, port: int, directory: Path
    ) -> None:
        self.state = state
        self.server = server
        self.client = client
        self.port = port
        self.directory = directory
        self.worker: ScriptedWorker | None = None

    def encode(self, text: str, *, markers: bool = False) -> list[int]:
        """Ids of plain text; with `markers`, of text with control tokens."""
        return self.state.model.tokenizer.encode(text, add_special=False, parse_special=markers)

    def start_worker(self, script: "Script | str" = "", **options: Any) -> ScriptedWorker:
        """Bring a worker up that answers with `script`, or always with one text."""
        if isinstance(script, str):
            ids = self.encode(script, markers=True)

            def said(request: GenerationRequest, prompt: list[int]) -> list[int]:
                return ids

            chosen: Script = said
        else:
            chosen = script
        self.worker = ScriptedWorker(
            self.directory, self.state.model.file.tokenizer_hash, chosen, **options
        ).start()
        return self.worker

    async def ready(self) -> None:
        """Until a request would be served."""
        await until(lambda: self.state.engine.ready)

    async def chat(self, **fields: Any) -> httpx.Response:
        """Post a chat request; `messages` defaults to one short message."""
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def events(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
        """Post a streamed request; the parsed events, `[DONE]` as that string."""
        body = {"stream": True, **fields}
        if "chat" in path:
            body.setdefault("messages", [{"role": "user", "content": "hello"}])
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return parse_events(response.content)


def parse_events(raw: bytes) -> list[Any]:
    """The events of a stream, comments left out."""
    frames = [frame for frame in raw.split(b"\n\n") if frame and not frame.startswith(b":")]
    assert all(frame.startswith(b"data: ") for frame in frames), frames
    data = [frame.removeprefix(b"data: ") for frame in frames]
    return [each.decode() if each == b"[DONE]" else msgspec.json.decode(each) for each in data]


@contextlib.asynccontextmanager
async def running_front(
    tmp_path: Path,
    script: "Script | str | None" = "hello world",
    *,
    worker: Any = None,
    model: Any = None,
    **settings: Any,
) -> AsyncIterator[Front]:
    """A front end that serves, with a worker answering `script`; None: without a worker.

    `model` and `worker` are options of the tiny model and of the worker. A script that is a text may hold
    the model's control tokens.
    """
    directory = tmp_path / "ring"
    options = {"slots_per_front_end": 8, "shared_dir": str(directory), **settings}
    front_settings = Settings(**options)
    state = FrontState.build(front_settings, write_tiny_model(tmp_path / "tiny.gguf", **(model or {})))
    app = create_app(front_settings, state=state)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        http=bounded_connection(front_settings.max_body_bytes),
        ws="none",
        lifespan="off",
        log_config=None,
    )
    server = FrontServer(config, state)
    await state.start()
    serving = asyncio.ensure_future(server.serve([listener]))
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)
    front = Front(state, server, client, port, directory)
    try:
        if script is not None:
            front.start_worker(script, **(worker or {}))
            await front.ready()
        yield front
    finally:
        await client.aclose()
        server.should_exit = True
        await serving
        await state.close()
        if front.worker is not None:
            front.worker.stop()


Scenario = Callable[[Front], Awaitable[None]]


def with_front(
    tmp_path: Path, scenario: Scenario, script: "Script | str | None" = "hello world", **options: Any
) -> None:
    """Run `scenario` against a fresh rig."""

    async def whole() -> None:
        async with running_front(tmp_path, script, **options) as front:
            await scenario(front)

    run(whole)
