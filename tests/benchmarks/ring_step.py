"""What one worker step costs outside the model: poll, writable, publish, status. One process, real segment."""

import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from ds4.ring import layout
from ds4.ring.front_end import FrontEndRing
from ds4.ring.layout import RingShape
from ds4.ring.states import SlotState, WorkerState
from ds4.ring.worker_end import WorkerRing

_ROUNDS = 400


class StepCost(msgspec.Struct, frozen=True):
    """Medians in microseconds for `num_rows` active slots over `num_front_ends` front ends."""

    num_rows: int
    num_front_ends: int
    poll_us: float
    writable_us: float
    publish_us: float
    status_us: float
    step_us: float  # poll + writable + publish, the set of slots unchanged
    changed_step_us: float  # the same where one slot came or went


async def measure_step(num_front_ends: int, rows_per_front_end: int) -> StepCost:
    """Times `_ROUNDS` steps; every front end has just drained its ring, none sleeps."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        directory = Path(parent) / "ring"
        shape = RingShape(num_front_ends=num_front_ends, slots_per_front_end=rows_per_front_end)
        worker = WorkerRing(directory, shape, b"")
        worker.set_state(WorkerState.READY)
        fronts = [FrontEndRing(directory, window=1 << 30) for _ in range(num_front_ends)]
        for front in fronts:
            await front.start()
        worker.poll()
        for front in fronts:
            front.check()
            for _ in range(rows_per_front_end):
                front.submit(b"", np.zeros(4, np.uint32))
        submissions = worker.poll().submissions
        slots = np.array(sorted(one.slot for one in submissions), np.int64)
        worker.admit(slots.tolist())
        cost = _time_steps(worker, slots)
        for front in fronts:
            await front.close()
        worker.close()
        return cost


def _time_steps(worker: WorkerRing, slots: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> StepCost:
    tokens = np.arange(len(slots), dtype=np.int32)
    logprobs = np.zeros(len(slots), np.float32)
    lengths = np.full(len(slots), 100, np.int64)
    heads = worker._segment.front_ends[:, layout.FRONT_EVENT_HEAD]
    tails = worker._segment.worker_blocks[:, layout.WORKER_EVENT_TAIL]
    sleeps = worker._segment.front_ends[:, layout.FRONT_SLEEP]
    sleeps &= ~np.uint64(1)  # awake: a bell costs 5 us per sleeping front end, see the end-to-end table
    clock = time.perf_counter_ns
    times: list[tuple[float, ...]] = []
    changed: list[float] = []
    for number in range(2 * _ROUNDS):
        heads[:] = tails  # the front ends have read everything
        rows = slots if number < _ROUNDS else np.delete(slots, number % len(slots))
        at = [clock()]
        worker.poll()
        at.append(clock())
        allowed = worker.writable(rows)
        at.append(clock())
        worker.publish(rows, tokens[: len(rows)], logprobs[: len(rows)])
        at.append(clock())
        worker.set_status(rows, lengths[: len(rows)], 0, lengths[: len(rows)], SlotState.DECODE)
        at.append(clock())
        assert allowed.all()
        parts = [(stop - start) / 1e3 for start, stop in itertools.pairwise(at)]
        if number < _ROUNDS:
            times.append((*parts, sum(parts[:3])))
        else:
            changed.append(sum(parts[:3]))
    poll, writable, publish, status, step = (statistics.median(column) for column in zip(*times, strict=True))
    return StepCost(
        len(slots),
        worker.shape.num_front_ends,
        poll,
        writable,
        publish,
        status,
        step,
        statistics.median(changed),
    )


def step_costs() -> list[StepCost]:
    """The three sizes of the goal, and the many-front-end variants."""
    shapes = ((4, 64), (4, 256), (16, 64), (16, 256), (64, 64))
    return [asyncio.run(measure_step(*shape)) for shape in shapes]
