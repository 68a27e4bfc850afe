"""Real processes, killed and stopped in each state a request can be in."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds4.errors import RingUnavailableError
from ds4.ring.front_end import FrontEndRing
from ds4.ring.worker_end import Polled, Submission, WorkerRing
from tests.ds4.ring.harness import DEADLINE_S, STOP, array, make_worker, prompt, until

# Says each state it reached; reads only while told to.
FRONT_END = """
import asyncio, sys
from pathlib import Path
import numpy as np
from ds4.errors import RingUnavailableError
from ds4.ring.front_end import FrontEndRing

async def main():
    ring = FrontEndRing(Path(sys.argv[1]))
    await ring.start()
    await ring.wait_attached()
    print("attached", flush=True)
    if sys.argv[2] == "attached":
        await asyncio.sleep(600)
    for _ in range(2):
        try:
            stream = ring.submit(b"", np.zeros(5000, np.uint32))
            print("submitted", flush=True)
            tokens, end = 0, None
            while end is None:
                events, end = await stream.read()
                tokens += len(events)
                print("read", flush=True)
            print(f"ended {tokens}", flush=True)
            break
        except RingUnavailableError:
            print("unavailable", flush=True)
            await ring.wait_attached()
    await ring.close()

asyncio.run(main())
"""

WORKER = """
import sys
from pathlib import Path
import numpy as np
from ds4.ring.states import WorkerState
from ds4.ring.layout import RingShape
from ds4.ring.worker_end import WorkerRing

ring = WorkerRing(Path(sys.argv[1]), RingShape(num_front_ends=3, slots_per_front_end=4), b"")
ring.set_state(WorkerState.READY)
print("ready", flush=True)
while True:
    for one in ring.poll().submissions:
        ring.publish(np.array([one.slot]), np.array([5], np.int32))
    ring.sleep(0.1)
"""

Child = subprocess.Popen[str]


@contextmanager
def child(script: str, *arguments: str) -> Iterator[Child]:
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: Child) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def poll_until(worker: WorkerRing, kind: str) -> Polled:
    """Serve the worker's end until something of this kind happens."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        polled = worker.poll()
        if getattr(polled, kind):
            return polled
        worker.sleep(0.05)
    pytest.fail(f"no {kind} in time")


@pytest.mark.parametrize("state", ["attached", "submitted", "taken", "unread"])
def test_a_front_end_killed_in_any_state_leaves_nothing(tmp_path: Path, state: str) -> None:
    directory = tmp_path / "ring"
    worker = make_worker(directory)
    with child(FRONT_END, str(directory), state) as front_end:
        taken: list[Submission] = []
        while worker.num_front_ends == 0:
            taken += worker.poll().submissions  # the poll that attaches it may already bring its request
            worker.sleep(0.05)
        assert said(front_end) == "attached"
        if state != "attached":
            assert said(front_end) == "submitted"
        if state in ("taken", "unread"):
            [submission] = taken or poll_until(worker, "submissions").submissions
            taken = [submission]
            if state == "unread":
                front_end.send_signal(signal.SIGSTOP)
                for _ in range(10):
                    worker.publish(array(submission.slot), array(1).astype("int32"))
        front_end.kill()
        front_end.wait()
        seen: list[int] = []
        while worker.num_front_ends:
            worker.sleep(0.05)
            polled = worker.poll()
            seen += polled.dropped
            taken += polled.submissions
        seen += worker.poll().dropped
        assert seen == [one.slot for one in taken]
    assert worker.num_outstanding == worker.num_pending == 0
    assert os.listdir(directory / "prompts") == []
    worker.close()
    assert os.listdir(directory) == []


def test_a_stopped_front_end_is_evicted_and_comes_back_clean(tmp_path: Path) -> None:
    directory = tmp_path / "ring"
    worker = make_worker(directory)
    with child(FRONT_END, str(directory), "all") as front_end:
        [first] = poll_until(worker, "submissions").submissions
        front_end.send_signal(signal.SIGSTOP)
        patience_s, worker._evict_after_s = worker._evict_after_s, 0.5  # only now: it may be slow to start
        assert poll_until(worker, "dropped").dropped == [first.slot]
        assert worker.num_outstanding == 0
        worker._evict_after_s = patience_s
        front_end.send_signal(signal.SIGCONT)
        [second] = poll_until(worker, "submissions").submissions
        assert second.request_id != first.request_id
        worker.publish(array(second.slot), array(1).astype("int32"), ends={0: STOP})
        assert [said(front_end) for _ in range(6)] == [
            "attached",
            "submitted",
            "unavailable",
            "submitted",
            "read",
            "ended 1",
        ]
        assert front_end.wait(DEADLINE_S) == 0
    worker.close()
    assert os.listdir(directory) == []


def test_a_killed_worker_process_fails_its_streams_and_a_new_one_is_found(tmp_path: Path) -> None:
    async def run() -> None:
        directory = tmp_path / "ring"
        front_end = FrontEndRing(directory)
        await front_end.start()
        for _ in range(2):
            with child(WORKER, str(directory)) as worker:
                await asyncio.wait_for(front_end.wait_attached(), DEADLINE_S)
                stream = front_end.submit(b"", prompt(5000))
                events, _ = await asyncio.wait_for(stream.read(), DEADLINE_S)
                assert events[0].token_id == 5
                worker.kill()
                with pytest.raises(RingUnavailableError):
                    await asyncio.wait_for(stream.read(), DEADLINE_S)
                await until(lambda: not front_end.attached)
        await front_end.close()
        assert os.listdir(directory) == []

    asyncio.run(run())
