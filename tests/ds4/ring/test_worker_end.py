"""What the worker sees of front ends that come, work, misbehave and die."""

import asyncio
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from ds4.errors import ConfigError, ErrorCode, RingError, RingUnavailableError
from ds4.generation import FinishReason, GenerationEnd
from ds4.ring import layout
from ds4.ring.front_end import FrontEndRing
from ds4.ring.layout import RingShape
from ds4.ring.states import SlotState, WorkerState
from ds4.ring.worker_end import WorkerRing
from tests.ds4.ring.harness import (
    CANCELLED,
    SMALL,
    STOP,
    array,
    is_attached,
    kill,
    make_front_end,
    make_worker,
    prompt,
    publish,
    read_all,
    until,
)


def test_a_second_worker_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "ring"
    worker = make_worker(directory)
    before = sorted(os.listdir(directory))
    with pytest.raises(RingError, match="another worker"):
        make_worker(directory)
    assert sorted(os.listdir(directory)) == before
    worker.close()
    assert os.listdir(directory) == []


def test_a_directory_without_room_is_a_clear_error_and_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("posix_fallocate", "mkfifo"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, full)
            with pytest.raises(ConfigError, match="shared directory"):
                make_worker(tmp_path / "ring")
        assert os.listdir(tmp_path / "ring") == []
    make_worker(tmp_path / "ring").close()  # and the lease is free again


def test_a_submission_arrives_as_it_was_sent(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        for length in (0, 1, 900, 100_000):
            stream = front_end.submit(b"parameters", prompt(length))
            [submission] = worker.poll().submissions
            assert submission.request_id == stream.request_id
            assert submission.slot == stream.slot
            assert submission.front_end == front_end.index
            assert submission.params == b"parameters"
            assert np.array_equal(submission.prompt, prompt(length))
            worker.finish({stream.slot: STOP})
            assert await read_all(stream) == ([], STOP)
        assert os.listdir(tmp_path / "ring" / "prompts") == []
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_pending_is_what_was_submitted_and_not_admitted(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        fronts = [await make_front_end(tmp_path / "ring", worker) for _ in range(2)]
        streams = [front.submit(b"", prompt()) for front in fronts for _ in range(3)]
        assert worker.num_pending == fronts[0].num_pending() == 6  # before the worker even looked
        worker.poll()
        assert worker.num_pending == 6
        worker.admit([streams[0].slot, streams[5].slot])
        worker.admit([streams[0].slot])  # repeating changes nothing
        assert worker.num_pending == fronts[1].num_pending() == 4
        worker.finish({streams[1].slot: STOP})  # an end without a seat leaves the waiting state too
        assert worker.num_pending == 3
        publish(worker, [streams[3]], [7], {0: STOP})  # and so does one with the first token
        assert worker.num_pending == fronts[0].num_pending() == 2
        kill(fronts[1])
        assert worker_dropped(worker) == {stream.slot for stream in streams[4:]}
        assert worker.num_pending == fronts[0].num_pending() == 1
        successor = await make_front_end(tmp_path / "ring", worker)
        assert successor.index == fronts[1].index
        assert worker.num_pending == fronts[0].num_pending() == 1  # nothing of the dead one's came back
        worker.admit([stream.slot for stream in streams[4:]])  # late: these requests are gone
        successor.submit(b"", prompt())
        assert worker.num_pending == fronts[0].num_pending() == 2
        await successor.close()
        await fronts[0].close()
        worker.close()

    asyncio.run(run())


def worker_dropped(worker: WorkerRing) -> set[int]:
    """Poll through one sweep."""
    worker._next_sweep = 0.0
    return set(worker.poll().dropped)


def test_preparing_counts_only_living_front_ends(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        fronts = [await make_front_end(tmp_path / "ring", worker) for _ in range(2)]
        fronts[0].set_preparing(3)
        fronts[1].set_preparing(2)
        assert worker.num_preparing == 5
        kill(fronts[1])
        worker_dropped(worker)
        assert worker.num_preparing == 3
        await fronts[0].close()
        worker.close()

    asyncio.run(run())


def test_a_dead_front_end_loses_its_slots_prompt_files_and_bell(tmp_path: Path) -> None:
    async def run() -> None:
        directory = tmp_path / "ring"
        worker = make_worker(directory)
        front_end = await make_front_end(directory, worker)
        other = await make_front_end(directory, worker)
        polled = front_end.submit(b"", prompt())
        worker.poll()
        front_end.submit(b"", prompt(5000))  # never polled: its file stays behind
        kept = other.submit(b"", prompt())
        kill(front_end)
        worker._next_sweep = 0.0
        seen = worker.poll()
        assert seen.dropped == [polled.slot]
        assert [one.slot for one in seen.submissions] == [kept.slot]
        assert os.listdir(directory / "prompts") == []
        assert "front-0.bell" not in os.listdir(directory)
        publish(worker, [kept], [7], {0: STOP})
        assert await read_all(kept) == ([7], STOP)
        await other.close()
        worker.close()
        assert os.listdir(directory) == []

    asyncio.run(run())


def test_a_successor_gets_nothing_of_its_predecessor(tmp_path: Path) -> None:
    async def run() -> None:
        directory = tmp_path / "ring"
        worker = make_worker(directory)
        first = await make_front_end(directory, worker)
        old = first.submit(b"old", prompt())
        worker.poll()
        publish(worker, [old], [1])
        kill(first)
        second = FrontEndRing(directory)  # takes the same place before any sweep
        await second.start()
        assert second.index == first.index
        assert not second.attached
        worker._next_sweep = float("inf")  # only the nonce tells
        assert worker.poll().dropped == [old.slot]
        second.check()
        new = second.submit(b"new", prompt())
        assert new.slot == old.slot
        publish(worker, [new], [99])  # the worker has not taken it yet: nothing may be written
        [submission] = worker.poll().submissions
        assert submission.params == b"new"
        publish(worker, [new], [2], {0: STOP})
        assert await read_all(new) == ([2], STOP)
        await second.close()
        worker.close()

    asyncio.run(run())


def test_tokens_for_a_slot_dropped_by_the_ring_are_passed_over(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        fronts = [await make_front_end(tmp_path / "ring", worker) for _ in range(2)]
        streams = [front.submit(b"", prompt()) for front in fronts]
        worker.poll()
        kill(fronts[0])
        assert worker_dropped(worker) == {streams[0].slot}
        worker.publish(
            array(streams[0].slot, streams[1].slot),
            np.array([5, 6], np.int32),
            np.array([-1.0, -2.0], np.float32),
            {0: [(1, -1.0)], 1: [(2, -2.0)]},
            {0: STOP, 1: STOP},
        )
        worker.finish({streams[0].slot: STOP})
        events, end = await streams[1].read()
        assert [(e.token_id, e.logprob, e.top) for e in events] == [(6, -2.0, ((2, -2.0),))]
        assert end == STOP
        await fronts[1].close()
        worker.close()

    asyncio.run(run())


def test_a_cancel_is_reported_once_and_answered_by_an_ending(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        stream = front_end.submit(b"", prompt())
        stream.cancel()
        stream.cancel()
        polled = worker.poll()
        assert [one.slot for one in polled.submissions] == polled.cancelled == [stream.slot]
        assert front_end.num_free_slots == SMALL.slots_per_front_end - 1
        worker.finish({stream.slot: CANCELLED})
        await until(lambda: front_end.num_free_slots == SMALL.slots_per_front_end)  # though nobody read
        assert await read_all(stream) == ([], CANCELLED)
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_a_cancel_that_crosses_the_ending_hits_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        shape = RingShape(num_front_ends=1, slots_per_front_end=1)
        worker = make_worker(tmp_path / "ring", shape)
        front_end = await make_front_end(tmp_path / "ring", worker)
        for _ in range(50):  # far more commands than the ring holds
            first = front_end.submit(b"", prompt())
            worker.poll()
            worker.finish({first.slot: STOP})
            first.cancel()  # the ending is on its way
            assert await read_all(first) == ([], STOP)
            second = front_end.submit(b"", prompt())
            polled = worker.poll()
            assert polled.cancelled == []
            assert [one.request_id for one in polled.submissions] == [second.request_id]
            second.cancel()
            worker.finish({second.slot: STOP})
            await read_all(second)
        await front_end.close()
        worker.close()

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["tail", "slot", "operation", "reuse", "identity", "head"])
def test_a_misbehaving_front_end_is_cut_off_alone(tmp_path: Path, fault: str) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        bad = await make_front_end(tmp_path / "ring", worker)
        good = await make_front_end(tmp_path / "ring", worker)
        mine = bad.submit(b"", prompt())
        theirs = good.submit(b"", prompt())
        worker.poll()
        channel = bad._channel
        assert channel is not None
        bad.submit(b"", prompt())  # in the same batch of commands: must not surface
        if fault == "tail":
            channel._mine[layout.FRONT_COMMAND_TAIL] += 10_000
        elif fault == "slot":
            channel._command(layout.SUBMIT, theirs.slot, mine.request_id + 1)
        elif fault == "operation":
            channel._command(77, mine.slot, mine.request_id)
        elif fault == "reuse":
            channel._command(layout.SUBMIT, mine.slot, mine.request_id + 1)
        elif fault == "identity":
            channel._command(layout.CANCEL, mine.slot, theirs.request_id)
        else:
            channel._mine[layout.FRONT_EVENT_HEAD] += 5
            worker._next_sweep = 0.0
        polled = worker.poll()
        assert polled.dropped == [mine.slot]
        assert polled.submissions == []
        assert polled.cancelled == []
        assert not is_attached(bad)
        with pytest.raises(RingUnavailableError):
            bad.submit(b"", prompt())  # before it even noticed
        publish(worker, [theirs], [4], {0: STOP})
        assert await read_all(theirs) == ([4], STOP)
        bad.check()  # comes back with a new nonce
        worker.poll()
        bad.check()
        assert is_attached(bad)
        again = bad.submit(b"", prompt())
        worker.poll()
        publish(worker, [again], [5], {0: STOP})
        assert await read_all(again) == ([5], STOP)
        await bad.close()
        await good.close()
        worker.close()

    asyncio.run(run())


@pytest.mark.parametrize("damage", ["checksum", "length", "identity", "file"])
def test_a_damaged_descriptor_ends_that_request_alone(tmp_path: Path, damage: str) -> None:
    async def run() -> None:
        directory = tmp_path / "ring"
        worker = make_worker(directory)
        front_end = await make_front_end(directory, worker)
        good = front_end.submit(b"", prompt())
        bad = front_end.submit(b"x", prompt(5000 if damage == "file" else 3))
        assert front_end._channel is not None
        segment = front_end._channel.segment
        at = (segment.offsets.descriptors + bad.slot * segment.shape.descriptor_bytes) // 8
        if damage == "checksum":
            segment.words[at + layout.DESCRIPTOR_HEAD_BYTES // 8] ^= 1
        elif damage == "length":
            segment.words[at + layout.DESCRIPTOR_PARAMS_BYTES] = 1 << 40
        elif damage == "identity":
            segment.words[at + layout.DESCRIPTOR_REQUEST_ID] ^= 1
        else:
            [file] = (directory / "prompts").iterdir()
            file.unlink()
        polled = worker.poll()
        assert [one.slot for one in polled.submissions] == [good.slot]
        assert polled.dropped == []
        _, end = await read_all(bad)
        assert end.reason == FinishReason.ERROR
        assert end.error_code == ErrorCode.INVALID_REQUEST
        assert end.error_text
        assert worker.num_pending == 1
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_a_front_end_that_cannot_be_told_of_a_refusal_has_submitted_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        good, bad = front_end.submit(b"", prompt()), front_end.submit(b"", prompt())
        assert front_end._channel is not None
        segment = front_end._channel.segment
        at = (segment.offsets.descriptors + bad.slot * segment.shape.descriptor_bytes) // 8
        segment.words[at + layout.DESCRIPTOR_CHECKSUM] ^= 1
        front_end._channel._mine[layout.FRONT_EVENT_HEAD] = 1 << 40
        polled = worker.poll()
        # A submission of a slot that is free again would run into the slot's next request.
        assert polled.submissions == []
        assert sorted(polled.dropped) == [good.slot, bad.slot]
        assert worker.num_outstanding == 0
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_a_front_end_without_heartbeat_is_evicted_and_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring", evict_after_s=0.2)
        front_end = await make_front_end(tmp_path / "ring", worker)
        stream = front_end.submit(b"", prompt())
        dropped: list[int] = []
        while not dropped:  # the loop does not run here: a hung front end
            worker.sleep(0.01)
            dropped = worker.poll().dropped
        assert dropped == [stream.slot]
        front_end.check()
        with pytest.raises(RingError, match="cut this front end off"):
            await stream.read()
        worker.poll()
        await until(lambda: front_end.attached)
        assert front_end.num_free_slots == SMALL.slots_per_front_end
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_a_beating_front_end_is_not_evicted(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring", evict_after_s=0.3)
        front_end = await make_front_end(tmp_path / "ring", worker)
        stream = front_end.submit(b"", prompt())
        loop = asyncio.get_running_loop()
        stop = loop.time() + 0.9
        while loop.time() < stop:
            front_end.check()
            worker.sleep(0.02)
            assert worker.poll().dropped == []
        assert worker.num_outstanding == 1
        worker.finish({stream.slot: STOP})
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_status_is_shown_and_cleared_with_the_request(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        streams = [front_end.submit(b"", prompt(n)) for n in (5, 6)]
        worker.poll()
        shown = {one.slot: one for one in front_end.slots()}
        assert len(shown) == SMALL.num_slots
        assert shown[streams[1].slot].state == SlotState.WAITING
        assert shown[streams[1].slot].num_prompt_tokens == 6
        slots = array(*(stream.slot for stream in streams))
        worker.set_status(
            slots, array(5, 6), array(1, 2), array(3, 4), array(SlotState.DECODE, SlotState.PREFILL)
        )
        shown = {one.slot: one for one in front_end.slots()}
        assert shown[streams[0].slot].state == SlotState.DECODE
        assert shown[streams[1].slot].num_cached_tokens == 2
        assert shown[streams[1].slot].num_generated_tokens == 4
        worker.finish({streams[0].slot: STOP})
        worker.set_status(slots, 5, 0, 9, SlotState.DECODE)  # a late report must not bring it back
        shown = {one.slot: one for one in front_end.slots()}
        assert shown[streams[0].slot].state == SlotState.FREE
        assert shown[streams[1].slot].num_generated_tokens == 9
        worker.set_num_running(1)
        assert front_end.num_running == 1
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_sleep_returns_at_once_when_something_came_before_it(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        front_end.submit(b"", prompt())  # the worker is awake: no bell
        worker.sleep(3600.0)
        assert len(worker.poll().submissions) == 1
        worker.wake()
        worker.sleep(3600.0)
        await front_end.close()
        worker.sleep(3600.0)
        worker.close()

    asyncio.run(run())


async def fall_asleep(worker: WorkerRing) -> "asyncio.Future[None]":
    """The worker sleeps in another thread, past every earlier ring."""
    worker._bell.drain()
    sleeping = asyncio.get_running_loop().run_in_executor(None, worker.sleep, 3600.0)
    await until(lambda: worker._sleep_word % 2 == 1)
    return sleeping


def test_a_sleeping_worker_is_rung_for_a_submission(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        sleeping = await fall_asleep(worker)
        front_end.submit(b"", prompt())
        await asyncio.wait_for(sleeping, 20)
        assert len(worker.poll().submissions) == 1
        await front_end.close()
        worker.close()

    asyncio.run(run())


@pytest.mark.parametrize("cause", ["credit", "room"])
def test_a_sleeping_worker_with_blocked_rows_is_rung_when_they_may_go_on(tmp_path: Path, cause: str) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        window = 4 if cause == "credit" else 1 << 20
        front_end = await make_front_end(tmp_path / "ring", worker, window=window)
        stream = front_end.submit(b"", prompt())
        worker.poll()
        slots, sent = array(stream.slot), 0
        while worker.writable(slots)[0]:  # nobody reads: the loop does not run
            publish(worker, [stream], [sent])
            sent += 1
        assert sent >= 4
        if cause == "credit":  # the room is there: only the grant can wake it
            await until(lambda: len(stream._events) == sent)
            assert not worker.writable(slots)[0]
        sleeping = await fall_asleep(worker)
        events, _ = await asyncio.wait_for(stream.read(), 20)
        assert [event.token_id for event in events] == list(range(sent))
        await asyncio.wait_for(sleeping, 20)
        assert worker.writable(slots)[0]
        worker.finish({stream.slot: STOP})
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_credit_that_came_while_awake_keeps_the_worker_from_sleeping(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker, window=2)
        stream = front_end.submit(b"", prompt())
        worker.poll()
        publish(worker, [stream], [1])
        publish(worker, [stream], [2])
        assert not worker.writable(array(stream.slot))[0]
        worker._bell.drain()
        await stream.read()
        assert not worker._bell.wait(0.0)  # it was awake: nobody rang
        sleeping = asyncio.get_running_loop().run_in_executor(None, worker.sleep, 60.0)
        await asyncio.wait_for(sleeping, 20)
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_a_ring_wakes_the_worker_once(tmp_path: Path) -> None:
    worker = make_worker(tmp_path / "ring")
    worker.wake()
    worker.wake()
    worker.sleep(3600.0)
    assert not worker._bell.wait(0.0)
    worker.close()


def test_sleep_does_not_spin_for_a_blocked_row_that_is_gone(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker, window=1)
        stream = front_end.submit(b"", prompt())
        worker.poll()
        publish(worker, [stream], [1])
        assert not worker.writable(array(stream.slot))[0]
        worker.finish({stream.slot: STOP})
        assert not worker._publisher.is_unblocked()
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_close_leaves_nothing_and_front_ends_notice_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        directory = tmp_path / "ring"
        worker = make_worker(directory)
        front_end = await make_front_end(directory, worker)
        stream = front_end.submit(b"", prompt(4000))
        assert front_end._timer is not None
        front_end._timer.cancel()  # the bell alone must tell
        worker.set_state(WorkerState.RETIRED)
        with pytest.raises(RingError, match="left"):
            await asyncio.wait_for(stream.read(), 20)
        assert front_end.worker_state is None
        worker.close()
        await front_end.close()
        assert os.listdir(directory) == []

    asyncio.run(run())


def test_a_new_worker_sweeps_what_a_killed_one_left(tmp_path: Path) -> None:
    async def run() -> None:
        directory = tmp_path / "ring"
        first = make_worker(directory)
        front_end = await make_front_end(directory, first)
        front_end.submit(b"", prompt(5000))
        kill(front_end)
        kill(first)
        (directory / ".ring.0123").write_bytes(b"half")
        assert {"ring", "front-0.bell", "worker.bell"} <= set(os.listdir(directory))
        second = WorkerRing(directory, SMALL, b"")
        assert sorted(os.listdir(directory)) == ["lease", "prompts", "ring", "worker.bell"]
        assert os.listdir(directory / "prompts") == []
        second.close()
        assert os.listdir(directory) == []

    asyncio.run(run())


def test_states_are_seen_by_the_front_end(tmp_path: Path) -> None:
    async def run() -> None:
        worker = WorkerRing(tmp_path / "ring", SMALL, b"info")
        front_end = FrontEndRing(tmp_path / "ring")
        await front_end.start()
        worker.poll()
        await until(lambda: front_end.attached)
        assert front_end.worker_state == WorkerState.LOADING
        assert front_end.model_info == b"info"
        with pytest.raises(RingError):
            front_end.submit(b"", prompt())
        waiting = asyncio.ensure_future(front_end.wait_attached())
        worker.set_state(WorkerState.READY)
        await asyncio.wait_for(waiting, 20)
        stream = front_end.submit(b"", prompt())
        worker.set_state(WorkerState.DRAINING)
        with pytest.raises(RingError):
            front_end.submit(b"", prompt())
        worker.poll()
        publish(worker, [stream], [3], {0: STOP})  # what runs may finish
        assert await read_all(stream) == ([3], STOP)
        await front_end.close()
        worker.close()

    asyncio.run(run())


def test_an_ending_carries_all_its_fields(tmp_path: Path) -> None:
    async def run() -> None:
        worker = make_worker(tmp_path / "ring")
        front_end = await make_front_end(tmp_path / "ring", worker)
        for text, expected in (("", ""), ("kaputt: é", "kaputt: é"), ("é" * 2000, "é" * 512)):
            stream = front_end.submit(b"", prompt())
            worker.poll()
            end = GenerationEnd(FinishReason.ERROR, ErrorCode.NUMERIC, text, 123_456)
            worker.finish({stream.slot: end})
            _, got = await read_all(stream)
            assert got == GenerationEnd(FinishReason.ERROR, ErrorCode.NUMERIC, expected, 123_456)
        await front_end.close()
        worker.close()

    asyncio.run(run())
