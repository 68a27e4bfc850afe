"""A whole worker engine over the real ring and the fake device, driven turn by turn from a test.

The worker's and the front ends' ends of the ring live in one process and one event loop here; nothing
between them is replaced. A test decides when the engine takes a turn, so nothing depends on time.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ds4.config import Settings
from ds4.generation import (
    GenerationEnd,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    TokenEvent,
    encode_model_info,
    encode_request,
)
from ds4.metrics import WORKER, Metrics
from ds4.ring.front_end import FrontEndRing, RingStream
from ds4.ring.layout import RingShape
from ds4.ring.states import WorkerState
from ds4.ring.worker_end import WorkerRing
from tests.support.fake_device import FakeDevice
from workers.devices.interface import PAGE_TOKENS, Device, Limits
from workers.engine import build_engine
from workers.sampling.grammar import Grammars

VOCAB_SIZE = 1000
MAX_TURNS = 20_000


class Client:
    """One request's reader: collects its tokens until its ending."""

    def __init__(self, stream: RingStream) -> None:
        self.stream = stream
        self.events: list[TokenEvent] = []
        self.end: GenerationEnd | None = None
        self.task = asyncio.ensure_future(self._read())

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events]

    async def _read(self) -> None:
        while self.end is None:
            events, self.end = await self.stream.read()
            self.events += events


class EngineRig:
    """An engine, its device and its front ends. `make_device` puts another device in the fake one's place."""

    def __init__(
        self,
        directory: Path,
        *,
        pipeline_depth: int = 0,
        seats: int = 4,
        rows: int = 64,
        pages: int = 64,
        context: int = 512,
        front_ends: int = 1,
        slots: int = 16,
        window: int = 512,
        poisoned: Sequence[int] = (),
        settings: Settings | None = None,
        make_device: Callable[[Limits], Device] | None = None,
        vocab_size: int = VOCAB_SIZE,
        grammars: Grammars | None = None,
    ) -> None:
        self.settings = settings or Settings(
            batched_sessions=seats, max_batch_tokens=rows, decode_coalesce_us=0, drain_timeout_s=30
        )
        limits = Limits(max_rows=rows, max_seats=seats, max_context_tokens=context, num_pages=pages)
        self.device = FakeDevice(
            limits, vocab_size=VOCAB_SIZE, pipeline_depth=pipeline_depth, poisoned=poisoned
        )
        device = self.device if make_device is None else make_device(limits)
        info = ModelInfo(
            architecture="fake",
            vocab_size=vocab_size,
            max_context_tokens=min(context, pages * PAGE_TOKENS),
            tokenizer_hash="",
            device="fake",
            batched_sessions=seats,
            num_pages=pages,
            page_tokens=PAGE_TOKENS,
        )
        self.directory = directory
        self.ring = WorkerRing(
            directory,
            RingShape(num_front_ends=front_ends, slots_per_front_end=slots),
            encode_model_info(info),
        )
        self.metrics = Metrics.open(directory, owner=WORKER)
        self.engine = build_engine(
            self.settings,
            ring=self.ring,
            metrics=self.metrics,
            device=device,
            limits=limits,
            info=info,
            grammars=grammars,
        )
        self.scheduler = self.engine._scheduler
        self.front_ends = [FrontEndRing(directory, window=window) for _ in range(front_ends)]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["EngineRig"]:
        """Attached and READY; checks the books when the test is done."""
        self.ring.set_state(WorkerState.READY)
        for front_end in self.front_ends:
            await front_end.start()
        await self.until(lambda: all(front_end.attached for front_end in self.front_ends))
        try:
            yield self
        finally:
            for front_end in self.front_ends:
                await front_end.close()
            self.ring.close()
            self.metrics.close()

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        front_end: int = 0,
        sampling: SamplingParams | None = None,
        raw: bytes | None = None,
        **fields: Any,
    ) -> Client:
        """Send a request as a front end does."""
        request = GenerationRequest(
            max_tokens=max_tokens, sampling=sampling or SamplingParams(temperature=0.0), **fields
        )
        params = encode_request(request) if raw is None else raw
        return Client(self.front_ends[front_end].submit(params, np.array(prompt, np.uint32)))

    async def turn(self, count: int = 1) -> None:
        """Let the engine and then the readers run."""
        for _ in range(count):
            self.engine.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Turns until `reached`; fails after very many."""
        for _ in range(MAX_TURNS):
            if reached():
                return
            await self.turn()
            if self.engine._compiling:
                await asyncio.sleep(0.001)  # that happens on another thread
        raise AssertionError("the engine does not get there")

    async def finish(self, *clients: Client) -> None:
        """Turns until all these have their ending, then until the engine is idle; checks the books."""
        await self.until(lambda: all(client.end is not None for client in clients))
        await self.settle()

    async def settle(self) -> None:
        """Turns until nothing waits, runs or is in flight; then no page and no seat may be missing."""
        await self.until(lambda: self.scheduler.is_idle and not self.engine._runner.num_in_flight)
        self.scheduler.check()
        self.scheduler.cache.check()
        assert self.ring.num_outstanding == 0


def run(test: Coroutine[Any, Any, None] | Awaitable[None]) -> None:
    """Run one asynchronous test with a deadline."""

    async def bounded() -> None:
        await asyncio.wait_for(test, 240)

    asyncio.run(bounded())


def fields_of(end: GenerationEnd | None) -> dict[str, Any]:
    """An ending as a dictionary, for readable comparisons."""
    assert end is not None
    return msgspec.structs.asdict(end)
