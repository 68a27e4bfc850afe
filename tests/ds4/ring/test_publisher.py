"""Publishing: order, room and credit, wake-ups; checked against plain per-slot lists."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.generation import GenerationEnd
from ds4.ring import layout
from ds4.ring.front_end import FrontEndRing
from ds4.ring.layout import RingShape
from ds4.ring.stream import RingStream
from ds4.ring.worker_end import WorkerRing
from tests.ds4.ring.harness import STOP, array, make_front_end, make_worker, prompt, publish, read_all, until

Test = Callable[[WorkerRing, list[FrontEndRing], list[RingStream]], Coroutine[Any, Any, None]]


def with_streams(directory: Path, test: Test, *, shape: RingShape, window: int = 1 << 20) -> None:
    """A worker, all its front ends, and a taken request in every slot."""

    async def run() -> None:
        worker = make_worker(directory, shape)
        fronts = [await make_front_end(directory, worker, window=window) for _ in range(shape.num_front_ends)]
        streams = [front.submit(b"", prompt()) for front in fronts for _ in range(shape.slots_per_front_end)]
        worker.poll()
        await test(worker, fronts, streams)
        for front in fronts:
            await front.close()
        worker.close()

    asyncio.run(run())


def test_rows_in_any_order_reach_their_streams_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    async def test(worker: WorkerRing, fronts: list[FrontEndRing], streams: list[RingStream]) -> None:
        sent: dict[int, list[tuple[int, float, tuple[tuple[int, float], ...]]]] = {
            s.slot: [] for s in streams
        }
        slots = np.array(sorted(sent), np.int64)
        for step in range(40):
            rows = rng.permutation(slots)[: rng.integers(1, len(slots) + 1)]
            if step % 3 == 0:
                rows = np.sort(rows)
            tokens = rng.integers(0, 1 << 31, len(rows)).astype(np.int32)
            logprobs = -rng.random(len(rows)).astype(np.float32)
            top: dict[int, list[tuple[int, float]]] = {}
            if step % 2:
                for row in range(len(rows)):
                    pairs = [(int(rng.integers(1 << 31)), -0.25 * k) for k in range(rng.integers(0, 21))]
                    if pairs:
                        top[row] = pairs
            worker.publish(rows, tokens, logprobs, top or None)
            for row, slot in enumerate(rows.tolist()):
                sent[slot].append((int(tokens[row]), float(logprobs[row]), tuple(top.get(row, ()))))
            if step % 5 == 0:
                await asyncio.sleep(0)  # front ends read in between, or not
        worker.finish({stream.slot: STOP for stream in streams})
        for stream in streams:
            got: list[tuple[int, float, tuple[tuple[int, float], ...]]] = []
            end: GenerationEnd | None = None
            while end is None:
                events, end = await asyncio.wait_for(stream.read(), 20)
                got.extend((event.token_id, event.logprob, event.top) for event in events)
            assert got == sent[stream.slot]

    with_streams(tmp_path / "ring", test, shape=RingShape(num_front_ends=3, slots_per_front_end=5))


def test_an_ending_with_a_token_comes_after_it(tmp_path: Path) -> None:
    async def test(worker: WorkerRing, fronts: list[FrontEndRing], streams: list[RingStream]) -> None:
        publish(worker, streams, [1, 2, 3, 4])
        publish(worker, streams, [5, 6, 7, 8], {1: STOP, 3: STOP})
        assert await read_all(streams[1]) == ([2, 6], STOP)
        assert await read_all(streams[3]) == ([4, 8], STOP)
        publish(worker, [streams[0], streams[2]], [9, 10], {0: STOP, 1: STOP})
        assert await read_all(streams[0]) == ([1, 5, 9], STOP)
        assert await read_all(streams[2]) == ([3, 7, 10], STOP)
        assert worker.num_outstanding == 0

    with_streams(tmp_path / "ring", test, shape=RingShape(num_front_ends=2, slots_per_front_end=2))


def test_a_full_ring_pauses_its_own_rows_only_and_still_takes_every_ending(tmp_path: Path) -> None:
    """The widest tokens, a step in flight, and then an ending for every slot: nothing is lost."""
    shape = RingShape(num_front_ends=2, slots_per_front_end=80, events_per_slot=14)

    async def test(worker: WorkerRing, fronts: list[FrontEndRing], streams: list[RingStream]) -> None:
        slots = np.arange(shape.num_slots)
        widest = [(1, -1.0)] * layout.MAX_TOP_PAIRS
        hung = slots < shape.slots_per_front_end
        channel = fronts[1]._channel
        assert channel is not None
        steps, sent = 0, np.zeros(len(slots), np.int64)
        planned = slots[worker.writable(slots)]
        assert len(planned) == len(slots)
        while True:  # one step behind, as the engine does it
            in_flight, allowed = planned, worker.writable(slots)
            planned = slots[allowed]
            worker.publish(
                in_flight,
                np.zeros(len(in_flight), np.int32),
                None,
                dict.fromkeys(range(len(in_flight)), widest),
            )
            sent[in_flight] += 1
            channel.drain()  # the second front end reads, the first one hangs
            steps += 1
            if not allowed[hung].any():
                break
            assert steps < 10_000
        assert allowed[~hung].all()
        worker.publish(planned, np.zeros(len(planned), np.int32))
        sent[planned] += 1
        worker.finish({stream.slot: STOP for stream in streams})
        assert worker.num_front_ends == 2  # nobody had to be cut off
        for stream in streams:
            tokens, end = await read_all(stream)
            assert len(tokens) == sent[stream.slot]
            assert end == STOP

    with_streams(tmp_path / "ring", test, shape=shape)


def test_a_caller_that_ignores_room_loses_the_front_end_not_its_unread_tokens(tmp_path: Path) -> None:
    shape = RingShape(num_front_ends=2, slots_per_front_end=4)

    async def test(worker: WorkerRing, fronts: list[FrontEndRing], streams: list[RingStream]) -> None:
        first, second = streams[:4], streams[4:]
        steps = 0
        while worker.num_front_ends == 2:
            channel = fronts[1]._channel
            assert channel is not None
            publish(worker, streams, [steps] * 8)
            channel.drain()
            steps += 1
        assert sorted(worker.poll().dropped) == [stream.slot for stream in first]
        worker.finish({stream.slot: STOP for stream in streams})
        for stream in second:
            assert await read_all(stream) == (list(range(steps)), STOP)
        fronts[0].check()  # what had been written before is whole
        for stream in first:
            events, end = await stream.read()
            assert [event.token_id for event in events] == list(range(steps - 1))
            assert end is None
        worker.poll()
        await until(lambda: fronts[0].attached)
        again = fronts[0].submit(b"", prompt())
        worker.poll()
        publish(worker, [again], [5], {0: STOP})  # counts from zero, whatever was in the slot before
        assert await read_all(again) == ([5], STOP)

    with_streams(tmp_path / "ring", test, shape=shape)


def test_credit_pauses_one_stream_until_it_is_read(tmp_path: Path) -> None:
    async def test(worker: WorkerRing, fronts: list[FrontEndRing], streams: list[RingStream]) -> None:
        slots = array(streams[0].slot, streams[1].slot)
        for token in range(8):
            assert worker.writable(slots).all()
            publish(worker, streams, [token, token])
        assert not worker.writable(slots).any()
        events, _ = await streams[1].read()
        assert len(events) == 8
        assert worker.writable(slots).tolist() == [False, True]
        worker.finish({stream.slot: STOP for stream in streams})
        assert await read_all(streams[0]) == (list(range(8)), STOP)

    with_streams(tmp_path / "ring", test, shape=RingShape(num_front_ends=1, slots_per_front_end=2), window=8)


def test_a_step_rings_each_sleeping_front_end_once(tmp_path: Path) -> None:
    async def test(worker: WorkerRing, fronts: list[FrontEndRing], streams: list[RingStream]) -> None:
        for expected in range(1, 6):
            await until(lambda: all(has_slept(front) for front in fronts))
            before = worker.num_rings
            answered = sum(front.num_wakes for front in fronts)
            publish(worker, streams, [expected] * len(streams))
            publish(worker, streams, [expected] * len(streams))  # nobody woke yet: no second ring
            assert worker.num_rings - before == len(fronts)
            await until(lambda: all(has_slept(front) for front in fronts))
            assert sum(front.num_wakes for front in fronts) - answered == len(fronts)
        worker.finish({stream.slot: STOP for stream in streams})

    def has_slept(front: FrontEndRing) -> bool:
        assert front._channel is not None
        words = front._channel._mine[layout.FRONT_SLEEP], front._channel._workers[layout.WORKER_EVENT_TAIL]
        return words[0] % 2 == 1 and words[1] == front._channel._event_head

    with_streams(tmp_path / "ring", test, shape=RingShape(num_front_ends=3, slots_per_front_end=4))


@pytest.mark.parametrize("count", [0, 1])
def test_empty_and_single_row_steps_work(tmp_path: Path, count: int) -> None:
    async def test(worker: WorkerRing, fronts: list[FrontEndRing], streams: list[RingStream]) -> None:
        assert len(worker.writable(array())) == 0
        publish(worker, streams[:count], [7][:count])
        worker.finish({})
        worker.finish({stream.slot: STOP for stream in streams})
        assert await read_all(streams[0]) == ([7] * count, STOP)

    with_streams(tmp_path / "ring", test, shape=RingShape(num_front_ends=1, slots_per_front_end=2))
