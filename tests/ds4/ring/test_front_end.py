"""Finding a worker, losing it, finding the next one; places and what is left behind."""

import asyncio
import errno
import logging
import os
from pathlib import Path

import pytest
import uvloop

from ds4.errors import (
    ConfigError,
    RingFullError,
    RingUnavailableError,
    RingVersionError,
    WorkerLostError,
)
from ds4.ring import layout
from ds4.ring.front_end import FrontEndRing
from ds4.ring.layout import RingShape
from ds4.ring.liveness import WORKER_BYTE, Leases
from ds4.ring.segment import Segment, attach_segment
from ds4.ring.worker_end import WorkerRing
from tests.ds4.ring.harness import (
    STOP,
    is_attached,
    kill,
    make_front_end,
    make_worker,
    prompt,
    publish,
    read_all,
    until,
)


def test_it_starts_without_a_worker_and_attaches_when_one_comes(tmp_path: Path) -> None:
    async def run() -> None:
        front_end = FrontEndRing(tmp_path / "ring")
        await front_end.start()
        assert not is_attached(front_end)
        assert front_end.worker_state is None
        unknown = front_end.model_info
        assert unknown is None
        assert front_end.num_free_slots == front_end.num_pending() == front_end.num_running == 0
        assert front_end.slots() == []
        with pytest.raises(RingUnavailableError):
            front_end.submit(b"", prompt())
        front_end.set_preparing(2)
        worker = make_worker(tmp_path / "ring")
        waiting = asyncio.ensure_future(front_end.wait_attached())
        await until(lambda: bool(worker.poll() and waiting.done()))
        assert is_attached(front_end)
        seen = front_end.model_info
        assert seen == b"model info"
        assert worker.num_preparing == 2  # said before the worker came
        await front_end.close()
        assert not is_attached(front_end)
        worker.close()

    asyncio.run(run())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_streams_of_a_killed_worker_fail_and_the_next_worker_serves(tmp_path: Path, loop: str) -> None:
    async def run() -> None:
        first = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", first)
        stream = front_end.submit(b"", prompt())
        first.poll()
        publish(first, [stream], [1])
        kill(first)
        events, end = await asyncio.wait_for(stream.read(), 20)
        assert [event.token_id for event in events] == [1]
        assert end is None
        with pytest.raises(RingUnavailableError, match="died"):
            await asyncio.wait_for(stream.read(), 20)
        stream.cancel()  # too late: nothing happens
        with pytest.raises(RingUnavailableError):
            front_end.submit(b"", prompt())
        second = make_worker(tmp_path / "ring")
        await until(lambda: bool(second.poll()) and front_end.attached)
        again = front_end.submit(b"", prompt())
        second.poll()
        publish(second, [again], [2], {0: STOP})
        assert await read_all(again) == ([2], STOP)
        await front_end.close()
        second.close()

    if loop == "uvloop":
        uvloop.run(run())
    else:
        asyncio.run(run())


def test_tokens_published_before_a_replacement_are_delivered(tmp_path: Path) -> None:
    async def run() -> None:
        first = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", first)
        stream = front_end.submit(b"", prompt())
        first.poll()
        for token in range(5):
            publish(first, [stream], [token])
        kill(first)
        second = make_worker(tmp_path / "ring")  # before the front end could even look
        front_end.check()
        events, _ = await stream.read()
        assert [event.token_id for event in events] == [0, 1, 2, 3, 4]
        with pytest.raises(RingUnavailableError, match="replaced"):
            await stream.read()
        await front_end.close()
        second.close()

    asyncio.run(run())


def test_a_worker_that_holds_the_lease_without_a_segment_has_lost_the_old_streams(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        stream = front_end.submit(b"", prompt())
        kill(worker)
        (tmp_path / "ring" / "ring").unlink()
        starting = Leases(tmp_path / "ring")
        assert starting.take(WORKER_BYTE)
        front_end.check()
        with pytest.raises(RingUnavailableError):
            await stream.read()
        starting.abandon()
        await front_end.close()

    asyncio.run(run())


def test_each_front_end_has_its_own_place_and_the_last_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        shape = RingShape(num_front_ends=2, slots_per_front_end=1)
        worker = make_worker(tmp_path / "ring", shape)
        fronts = [await make_front_end(tmp_path / "ring", worker) for _ in range(2)]
        assert [front.index for front in fronts] == [0, 1]
        third = FrontEndRing(tmp_path / "ring")
        with pytest.raises(RingFullError, match="--max-front-ends"):
            await third.start()
        await third.close()
        await fronts[0].close()
        await third.start()
        assert third.index == 0
        await third.close()
        await fronts[1].close()
        worker.close()
        assert os.listdir(tmp_path / "ring") == []

    asyncio.run(run())


def test_leaving_fails_open_requests_and_frees_them_at_the_worker(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        stream = front_end.submit(b"", prompt(5000))
        worker.poll()
        unseen = front_end.submit(b"", prompt(5000))
        await front_end.close()
        for one in (stream, unseen):
            with pytest.raises(RingUnavailableError, match="closes"):
                await one.read()
        worker._next_sweep = float("inf")  # it said so itself: no sweep is needed
        polled = worker.poll()
        assert polled.dropped == [stream.slot]
        assert polled.submissions == []
        assert worker.num_front_ends == 0
        worker.close()
        assert os.listdir(tmp_path / "ring") == []

    asyncio.run(run())


def test_a_crash_is_laid_to_the_suspect_that_ran_not_to_one_whose_turn_began_since(tmp_path: Path) -> None:
    async def crash(worker: WorkerRing, quick: FrontEndRing, late: FrontEndRing) -> tuple[bool, bool]:
        """Whether the loss is explained to the front end that looks at once, and to the one that looks late."""
        streams = [front.submit(b"", prompt(3)) for front in (quick, late)]
        kill(worker)
        explained = []
        for front, stream in zip((quick, late), streams, strict=True):
            front.check()
            with pytest.raises(WorkerLostError) as lost:
                await stream.read()
            explained.append(lost.value.is_explained)
            assert quick.take_turn()  # its request is a suspect and waits for the next worker
        return explained[0], explained[1]

    async def run() -> None:
        directory = tmp_path / "ring"
        worker = make_worker(directory)
        quick, late = [await make_front_end(directory, worker) for _ in range(2)]
        for front in (quick, late):
            assert front._timer is not None
            front._timer.cancel()  # it looks when we say
        assert await crash(worker, quick, late) == (False, False)

        worker = make_worker(directory)
        for _ in range(2):
            for front in (quick, late):
                front.check()
            worker.poll()
        for front in (quick, late):
            front.check()
        quick.use_turn()
        assert await crash(worker, quick, late) == (True, True)
        await quick.close()
        await late.close()

    asyncio.run(run())


@pytest.mark.parametrize("order", ["worker first", "front end first"])
def test_whoever_leaves_last_clears_what_the_killed_left(tmp_path: Path, order: str) -> None:
    async def run() -> None:
        directory = tmp_path / "ring"
        worker = make_worker(directory)
        leaving = await make_front_end(directory, worker)
        dying = await make_front_end(directory, worker)
        dying.submit(b"", prompt(5000))
        kill(dying)
        if order == "worker first":
            kill(worker)
            await leaving.close()
        else:
            await leaving.close()
            worker.close()
        assert os.listdir(directory) == []

    asyncio.run(run())


def test_prompts_go_with_their_front_end_though_the_worker_is_dead_and_others_stay(tmp_path: Path) -> None:
    async def run() -> None:
        directory = tmp_path / "ring"
        worker = make_worker(directory)
        leaving = await make_front_end(directory, worker)
        staying = await make_front_end(directory, worker)
        leaving.submit(b"", prompt(5000))
        staying.submit(b"", prompt(5000))
        kill(worker)
        await leaving.close()
        assert [name[0] for name in os.listdir(directory / "prompts")] == ["1"]
        await staying.close()
        assert os.listdir(directory) == []

    asyncio.run(run())


def test_a_worker_of_another_version_stops_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        worker._words[layout.HEADER_VERSION] = layout.VERSION + 1
        front_end = FrontEndRing(tmp_path / "ring")
        with pytest.raises(RingVersionError, match="one release"):
            await front_end.start()
        assert "front-0.bell" not in os.listdir(tmp_path / "ring")
        worker.close()
        assert os.listdir(tmp_path / "ring") == []

    asyncio.run(run())


def test_a_later_worker_of_another_version_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        front_end = FrontEndRing(tmp_path / "ring")
        await front_end.start()
        worker = make_worker(tmp_path / "ring")
        worker._words[layout.HEADER_VERSION] = layout.VERSION + 1
        for _ in range(3):
            front_end.check()
        assert not front_end.attached
        await front_end.close()
        worker.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert len(caplog.records) == 1


def test_a_good_segment_with_the_inode_of_a_refused_one_is_attached(tmp_path: Path) -> None:
    async def run() -> None:
        front_end = FrontEndRing(tmp_path / "ring")
        await front_end.start()
        worker = make_worker(tmp_path / "ring")
        worker._words[layout.HEADER_VERSION] = layout.VERSION + 1
        front_end.check()
        worker._words[layout.HEADER_VERSION] = layout.VERSION
        (tmp_path / "ring" / "ring").chmod(
            0o600
        )  # as if it were another file: the time of its last change moves
        front_end.check()
        worker.poll()
        front_end.check()
        assert is_attached(front_end)
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_a_worker_is_attached_as_soon_as_there_is_a_descriptor_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_tries = 0

    def short(directory: Path, **options: bool) -> Segment:
        nonlocal num_tries
        num_tries += 1
        if num_tries <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return attach_segment(directory, **options)

    async def run() -> None:
        front_end = FrontEndRing(tmp_path / "ring")
        await front_end.start()
        monkeypatch.setattr("ds4.ring.front_end.attach_segment", short)
        worker = make_worker(tmp_path / "ring")
        await until(lambda: bool(worker.poll() and is_attached(front_end)))
        assert num_tries == 4
        assert sum("Too many open files" in line.message for line in caplog.records) == 1
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_a_dead_workers_segment_is_not_attached(tmp_path: Path) -> None:
    async def run() -> None:
        kill(make_worker(tmp_path / "ring"))
        front_end = FrontEndRing(tmp_path / "ring")
        await front_end.start()
        front_end.check()
        assert front_end.worker_state is None
        await front_end.close()
        assert os.listdir(tmp_path / "ring") == []

    asyncio.run(run())


def test_a_bad_directory_stops_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "ring").write_bytes(b"")
        front_end = FrontEndRing(tmp_path / "ring")
        with pytest.raises(ConfigError):
            await front_end.start()
        await front_end.close()

    asyncio.run(run())


def test_a_worker_that_does_not_come_round_is_seen_to_be_silent(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = FrontEndRing(tmp_path / "ring")
        assert front_end.worker_silent_s == 0.0
        await front_end.start()
        worker.poll()
        await until(lambda: front_end.worker_silent_s > 0.3)  # though it lives and is READY
        assert front_end.attached
        worker._next_sweep = 0.0
        worker.poll()
        front_end.check()
        assert front_end.worker_silent_s < 0.3
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_a_directory_without_room_stops_the_start_and_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        front_end = FrontEndRing(tmp_path / "ring")
        with monkeypatch.context() as patched:
            patched.setattr(os, "mkfifo", full)
            with pytest.raises(ConfigError, match="No space"):
                await front_end.start()
        assert os.listdir(tmp_path / "ring") == []

    asyncio.run(run())


def test_pending_and_slots_show_the_whole_ring(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        fronts = [await make_front_end(tmp_path / "ring", worker) for _ in range(2)]
        fronts[0].submit(b"", prompt())
        fronts[1].submit(b"", prompt(9))
        worker.poll()
        assert fronts[0].num_pending() == fronts[1].num_pending() == 2
        waiting = [one for one in fronts[0].slots() if one.num_prompt_tokens]
        assert [(one.front_end, one.num_prompt_tokens) for one in waiting] == [(0, 3), (1, 9)]
        for front in fronts:
            await front.close()
        worker.close()

    asyncio.run(run())
