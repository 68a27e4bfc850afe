"""One attachment: nothing is used before the echo, and damaged events end it instead of spreading."""

import asyncio
from pathlib import Path

import pytest

from ds4.errors import RequestError, RingError, RingFullError, RingUnavailableError
from ds4.ring import events, layout
from ds4.ring.channel import Channel
from ds4.ring.fence import process_fence
from ds4.ring.layout import RingShape
from ds4.ring.segment import attach_segment
from tests.ds4.ring.harness import SMALL, STOP, make_front_end, make_worker, prompt, publish, until


def test_nothing_is_submitted_before_the_echo(tmp_path: Path) -> None:
    worker = make_worker(tmp_path / "ring")
    channel = Channel(tmp_path / "ring", attach_segment(tmp_path / "ring"), 0, process_fence(), 8)
    with pytest.raises(RingUnavailableError):
        channel.submit(b"", prompt())
    channel.begin()
    with pytest.raises(RingUnavailableError):
        channel.submit(b"", prompt())
    assert worker.num_pending == 0
    channel.close("over")
    worker.close()


def test_an_index_beyond_the_rings_shape_is_refused_with_its_cure(tmp_path: Path) -> None:
    worker = make_worker(tmp_path / "ring")
    segment = attach_segment(tmp_path / "ring")
    with pytest.raises(RingError, match="--max-front-ends"):
        Channel(tmp_path / "ring", segment, SMALL.num_front_ends, process_fence(), 8)
    worker.close()


def test_a_refused_submission_costs_no_slot(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        with pytest.raises(RequestError):
            front_end.submit(bytes(layout.MAX_PARAMS_BYTES + 1), prompt())
        assert front_end.num_free_slots == SMALL.slots_per_front_end
        assert worker.num_pending == 0
        front_end.submit(b"", prompt())
        assert worker.num_pending == 1
        for _ in range(SMALL.slots_per_front_end - 1):
            front_end.submit(b"", prompt())
        with pytest.raises(RingFullError):
            front_end.submit(b"", prompt())
        assert len(worker.poll().submissions) == worker.num_pending == SMALL.slots_per_front_end
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_request_ids_are_never_repeated(tmp_path: Path) -> None:
    async def run() -> None:
        shape = RingShape(num_front_ends=2, slots_per_front_end=2)
        worker = make_worker(tmp_path / "ring", shape)
        seen: set[int] = set()
        for _ in range(3):
            fronts = [await make_front_end(tmp_path / "ring", worker) for _ in range(2)]
            for front in fronts:
                for _ in range(5):
                    stream = front.submit(b"", prompt())
                    assert stream.request_id >> layout.ID_FRONT_SHIFT == front.index + 1
                    assert stream.request_id not in seen
                    seen.add(stream.request_id)
                    worker.poll()
                    worker.finish({stream.slot: STOP})
                    await stream.read()
            for front in fronts:
                await front.close()
            worker.poll()
        worker.close()

    asyncio.run(run())


@pytest.mark.parametrize("damage", ["tail", "kind", "identity", "gap", "backwards"])
def test_damaged_events_detach_this_front_end_and_fail_its_requests(tmp_path: Path, damage: str) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        other = await make_front_end(tmp_path / "ring", worker)
        stream, theirs = front_end.submit(b"", prompt()), other.submit(b"", prompt())
        worker.poll()
        publish(worker, [stream, theirs], [1, 2])
        segment = worker._segment
        if damage == "tail":
            segment.worker_blocks[0, layout.WORKER_EVENT_TAIL] = 1 << 20
        elif damage == "kind":
            segment.events[0, 1] = 9 << events.KIND_SHIFT
        elif damage == "identity":
            segment.events[0, 0] += 1
        elif damage == "gap":
            segment.events[0, 2] += 1
        else:
            assert front_end._channel is not None
            front_end._channel._event_head += 5
        reading = asyncio.ensure_future(stream.read())
        with pytest.raises(RingUnavailableError):
            await asyncio.wait_for(reading, 20)
        assert (await theirs.read())[0][0].token_id == 2
        await until(lambda: bool(worker.poll().dropped) or front_end.attached)
        await other.close()
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_a_token_that_comes_while_the_front_end_goes_to_sleep_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker sees it awake and does not ring: only the last look after declaring sleep can find it."""

    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        stream = front_end.submit(b"", prompt())
        worker.poll()
        channel = front_end._channel
        assert channel is not None
        await until(lambda: channel._mine[layout.FRONT_SLEEP] % 2 == 1)
        drain, late = channel.drain, [2, 3]

        def drain_and_be_late() -> None:
            drain()
            if late:
                rings = worker.num_rings
                publish(worker, [stream], [late.pop(0)])
                assert worker.num_rings == rings

        monkeypatch.setattr(channel, "drain", drain_and_be_late)
        publish(worker, [stream], [1])
        got: list[int] = []
        while len(got) < 3:
            events_read, _ = await asyncio.wait_for(stream.read(), 20)
            got += [event.token_id for event in events_read]
        assert got == [1, 2, 3]
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_event_rings_wrap_without_loss(tmp_path: Path) -> None:
    async def run() -> None:
        shape = RingShape(num_front_ends=1, slots_per_front_end=3)
        worker = make_worker(tmp_path / "ring", shape)
        front_end = await make_front_end(tmp_path / "ring", worker)
        streams = [front_end.submit(b"", prompt()) for _ in range(3)]
        worker.poll()
        for token in range(1000):  # three times round the ring of 1024
            publish(worker, streams, [token] * 3)
            if token % 100 == 99:
                for stream in streams:
                    got, _ = await stream.read()
                    assert [event.token_id for event in got] == list(range(token - 99, token + 1))
        await front_end.close()
        worker.close()

    asyncio.run(run())
