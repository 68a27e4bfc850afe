"""What the ring's tests share: a worker and front ends in one process, and sudden deaths.

Leases belong to descriptors, not to processes, so closing one is what SIGKILL does to it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.generation import FinishReason, GenerationEnd
from ds4.ring.front_end import FrontEndRing
from ds4.ring.layout import RingShape
from ds4.ring.states import WorkerState
from ds4.ring.stream import RingStream
from ds4.ring.worker_end import WorkerRing

DEADLINE_S = 120.0
SMALL = RingShape(num_front_ends=3, slots_per_front_end=4)
STOP = GenerationEnd(FinishReason.STOP)
CANCELLED = GenerationEnd(FinishReason.CANCELLED)


def make_worker(directory: Path, shape: RingShape = SMALL, *, evict_after_s: float = 30.0) -> WorkerRing:
    """A READY worker."""
    worker = WorkerRing(directory, shape, b"model info", evict_after_s=evict_after_s)
    worker.set_state(WorkerState.READY)
    return worker


async def make_front_end(directory: Path, worker: WorkerRing, *, window: int = 512) -> FrontEndRing:
    """A front end that this worker knows."""
    front_end = FrontEndRing(directory, window=window)
    await front_end.start()
    worker.poll()
    front_end.check()
    assert front_end.attached
    return front_end


def kill(process: WorkerRing | FrontEndRing) -> None:
    """As SIGKILL: the leases fall, nothing is cleared up, nothing runs any more."""
    leases = process._leases
    assert leases is not None
    leases.abandon()
    if isinstance(process, FrontEndRing):
        assert process._timer is not None
        assert process._bell is not None
        assert process._loop is not None
        process._timer.cancel()
        process._loop.remove_reader(process._bell.fd)
        process._bell.close()
        if process._channel is not None:
            process._channel._bell.close()
        process._channel = None
        process._leases = None
    else:
        process._bell.close()
        for bell in process._bells:
            if bell is not None:
                bell.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (the condition lives in shared memory)
            await asyncio.sleep(0.001)


def is_attached(front_end: FrontEndRing) -> bool:
    """As a function, so that the type checker does not take the answer for constant."""
    return front_end.attached


def array(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def prompt(length: int = 3) -> NDArray[np.uint32]:
    return np.arange(length, dtype=np.uint32)


def publish(
    worker: WorkerRing,
    streams: Sequence[RingStream],
    token_ids: Sequence[int],
    ends: Mapping[int, GenerationEnd] | None = None,
) -> None:
    """One token for each stream."""
    slots = array(*(stream.slot for stream in streams))
    worker.publish(slots, np.array(token_ids, np.int32), ends=ends)


async def read_all(stream: RingStream) -> tuple[list[int], GenerationEnd]:
    """Token ids and the ending."""
    tokens: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        while True:
            events, end = await stream.read()
            tokens.extend(event.token_id for event in events)
            if end is not None:
                return tokens, end
