"""Kill and stop front ends and the worker at random; every token is checked at the far end.

    python -m tests.stress.ring_kill --seconds 60

Each token is a hash of (request id, index), so a wrong, crossed, repeated or missing one shows. At
the end everybody stops cleanly: every slot of every survivor is free, the worker holds nothing, the
directory is empty. A run is a function of its seed as far as the machine allows.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.errors import RingError, RingFullError, RingUnavailableError
from ds4.generation import FinishReason, GenerationEnd
from ds4.ring.front_end import FrontEndRing
from ds4.ring.layout import RingShape
from ds4.ring.states import SlotState, WorkerState
from ds4.ring.stream import RingStream
from ds4.ring.worker_end import WorkerRing

STUCK_AFTER_S: Final = 60.0
EVICT_AFTER_S: Final = 1.5
STEP_S: Final = 0.0005
_MIX_ID: Final = 0x9E3779B97F4A7C15
_MIX_INDEX: Final = 0xC2B2AE3D27D4EB4F
_MASK: Final = (1 << 64) - 1


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    seconds: float
    front_ends: int
    streams: int
    seed: int
    calm_s: float = 0.3  # least time between two blows
    blows: int = 0  # at least, if that takes longer


class Outcome(msgspec.Struct):
    """What happened. `faults` is empty when every promise held."""

    blows: dict[str, int]
    counts: dict[str, int]
    worst_recovery_s: float
    faults: list[str]


def expected_token(request_id: int, index: int) -> int:
    """The only right token at this place (31 bits)."""
    return ((request_id * _MIX_ID + index * _MIX_INDEX) & _MASK) >> 33


def expected_tokens(request_ids: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The same for arrays [n]."""
    with np.errstate(over="ignore"):
        mixed = request_ids * np.uint64(_MIX_ID) + indices * np.uint64(_MIX_INDEX)
    return (mixed >> np.uint64(33)).astype(np.int32)


# -- the worker: a fake model on the real ring


class FakeEngine:
    """Arrays of what runs; every step gives each writable row its token."""

    def __init__(self, ring: WorkerRing) -> None:
        self.ring = ring
        size = ring.shape.num_slots
        self.request_ids = np.zeros(size, np.uint64)
        self.sent = np.zeros(size, np.uint64)
        self.limits = np.zeros(size, np.uint64)
        self.wants_top = np.zeros(size, np.bool_)
        self.active = np.zeros(size, np.bool_)
        self.dropped = 0

    def step(self) -> bool:
        """Poll, then publish one step; False when nothing could be done."""
        polled = self.ring.poll()
        self.active[polled.dropped] = False
        self.dropped += len(polled.dropped)
        for submission in polled.submissions:
            slot = submission.slot
            limit, length, checksum = np.frombuffer(submission.params, np.uint64).tolist()
            if len(submission.prompt) != length or int(submission.prompt.sum()) != checksum:
                raise AssertionError("a prompt arrived damaged")
            self.request_ids[slot] = submission.request_id
            self.sent[slot] = 0
            self.limits[slot] = limit
            self.wants_top[slot] = limit % 7 == 0
            self.active[slot] = True
        self.ring.admit([one.slot for one in polled.submissions])
        if polled.cancelled:
            self.active[polled.cancelled] = False
            self.ring.finish({slot: GenerationEnd(FinishReason.CANCELLED) for slot in polled.cancelled})
        slots = np.flatnonzero(self.active)
        if not len(slots):
            return False
        rows = slots[self.ring.writable(slots)]
        if not len(rows):
            return False
        tokens = expected_tokens(self.request_ids[rows], self.sent[rows])
        last = np.flatnonzero(self.sent[rows] + np.uint64(1) >= self.limits[rows]).tolist()
        top = {
            row: [
                (int(tokens[row]) + k & 0x7FFFFFFF, -0.5 * k) for k in range(int(self.limits[rows[row]]) % 21)
            ]
            for row in np.flatnonzero(self.wants_top[rows]).tolist()
        }
        ends = {row: GenerationEnd(FinishReason.LENGTH, 0, "", int(rows[row])) for row in last}
        self.ring.publish(rows, tokens, (tokens % 1000).astype(np.float32), top, ends)
        self.sent[rows] += np.uint64(1)
        self.active[rows[last]] = False
        self.ring.set_status(rows, 0, 0, self.sent[rows].astype(np.int64), SlotState.DECODE)
        return True


def run_worker(directory: Path, log: Path, plan: Plan) -> None:
    shape = RingShape(num_front_ends=plan.front_ends + 2, slots_per_front_end=plan.streams)
    while True:
        try:
            ring = WorkerRing(directory, shape, b"kill test", evict_after_s=EVICT_AFTER_S)
            break
        except RingError:
            time.sleep(0.02)  # the killed one's lease falls in a moment
    engine = FakeEngine(ring)
    stopping: list[int] = []

    def stop(number: int, _: object) -> None:
        stopping.append(number)
        ring.wake()

    signal.signal(signal.SIGTERM, stop)
    ring.set_state(WorkerState.READY)
    _save(log / f"started-{os.getpid()}.json", {})
    while not stopping:
        if engine.step():
            time.sleep(STEP_S)
        else:
            ring.sleep(0.1)
    report = {
        "active": int(engine.active.sum()),
        "outstanding": ring.num_outstanding,
        "pending": ring.num_pending,
        "prompt_files": len(os.listdir(directory / "prompts")),
        "busy_status": sum(one.state != SlotState.FREE for one in ring._segment.slot_statuses()),
    }
    ring.close()
    _save(log / f"worker-{os.getpid()}.json", report)


def _save(path: Path, report: Mapping[str, float]) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(report))
    unfinished.replace(path)


# -- a front end: many streams, each checking all it gets


class Client:
    """Counts of one front-end process."""

    def __init__(self, ring: FrontEndRing, rng: random.Random) -> None:
        self.ring = ring
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.worst_recovery_s = 0.0
        self.stopping = asyncio.Event()

    async def stream(self) -> None:
        """One request after the other."""
        while not self.stopping.is_set():
            began = time.monotonic()
            try:
                async with asyncio.timeout(STUCK_AFTER_S):
                    await self.ring.wait_attached()
            except TimeoutError:
                self.counts["stuck"] += 1
                continue
            self.worst_recovery_s = max(self.worst_recovery_s, time.monotonic() - began)
            await self.request()

    async def request(self) -> None:
        rng = self.rng
        limit = rng.choice((1, 5, 49, 300, 2000))
        length = rng.choice((0, 10, 200, 900, 1000, 3000, 40_000))
        prompt = np.full(length, rng.randrange(1 << 31), np.uint32)
        params = np.array([limit, length, int(prompt.sum())], np.uint64).tobytes()
        cancel_at = rng.randrange(limit + 1) if rng.random() < 0.3 else None
        is_slow = rng.random() < 0.05
        is_abandoned = rng.random() < 0.03  # cancelled and never read
        try:
            stream = self.ring.submit(params, prompt)
        except RingFullError:
            self.counts["full"] += 1
            await asyncio.sleep(0.005)
            return
        except RingUnavailableError:
            await asyncio.sleep(0.005)
            return
        self.counts["submitted"] += 1
        if cancel_at == 0 or is_abandoned:
            stream.cancel()
        if is_abandoned:
            self.counts["abandoned"] += 1
            return
        try:
            await self.consume(stream, limit, cancel_at, is_slow)
        except RingUnavailableError:
            self.counts["unavailable"] += 1
        except TimeoutError:
            self.counts["stuck"] += 1

    async def consume(self, stream: RingStream, limit: int, cancel_at: int | None, is_slow: bool) -> None:
        received = 0
        while True:
            async with asyncio.timeout(STUCK_AFTER_S):
                events, end = await stream.read()
            for event in events:
                token = expected_token(stream.request_id, received)
                top = limit % 21 if limit % 7 == 0 else 0
                if (
                    event.token_id != token
                    or event.logprob != token % 1000
                    or event.top != tuple((token + k & 0x7FFFFFFF, -0.5 * k) for k in range(top))
                ):
                    self.counts["wrong"] += 1
                received += 1
            self.counts["tokens"] += len(events)
            if end is not None:
                break
            if cancel_at is not None and received >= cancel_at:
                stream.cancel()
            if is_slow:
                await asyncio.sleep(0.05)
        if end.reason == FinishReason.LENGTH:
            self.counts["finished"] += 1
            self.counts["missing"] += received != limit
            self.counts["wrong"] += end.num_cached_tokens != stream.slot
        elif end.reason == FinishReason.CANCELLED:
            self.counts["cancelled"] += 1
            self.counts["wrong"] += cancel_at is None
        else:
            self.counts["wrong"] += 1


async def run_front_end(directory: Path, log: Path, plan: Plan, seed: int) -> None:
    ring = FrontEndRing(directory, window=256)
    await ring.start()
    client = Client(ring, random.Random(seed))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, client.stopping.set)
    _save(log / f"started-{os.getpid()}.json", {})
    path = log / f"front-{os.getpid()}.json"

    def save(*, survived: bool) -> None:
        report = {**client.counts, "worst_recovery_s": client.worst_recovery_s, "survived": survived}
        if survived:
            report["free_slots"] = ring.num_free_slots
            report["open"] = ring.num_open
        _save(path, report)

    async def keep_saving() -> None:
        while True:
            save(survived=False)
            await asyncio.sleep(0.1)

    saver = asyncio.ensure_future(keep_saving())
    await asyncio.gather(*(client.stream() for _ in range(plan.streams)))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STUCK_AFTER_S):
            while ring.num_open:  # noqa: ASYNC110 (endings of abandoned streams, which nobody awaits)
                await asyncio.sleep(0.01)
    saver.cancel()
    save(survived=True)
    await ring.close()


# -- the one who strikes


def strike(plan: Plan) -> Outcome:
    """A whole run, with its directories of its own; returns what happened."""
    memory = Path("/dev/shm")
    base = str(memory) if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as shared, tempfile.TemporaryDirectory() as logs:
        return _strike(plan, Path(shared) / "ring", Path(logs))


def _strike(plan: Plan, directory: Path, log: Path) -> Outcome:
    rng = random.Random(plan.seed)
    blows: Counter[str] = Counter()
    faults: list[str] = []

    def start(role: str) -> subprocess.Popen[bytes]:
        arguments = [role, str(directory), str(log), json.dumps(msgspec.structs.asdict(plan))]
        command = [
            sys.executable,
            "-m",
            "tests.stress.ring_kill",
            "--child",
            *arguments,
            str(rng.randrange(1 << 30)),
        ]
        return subprocess.Popen(command)

    worker = start("worker")
    front_ends = [start("front") for _ in range(plan.front_ends)]
    stopped: list[tuple[float, subprocess.Popen[bytes]]] = []
    try:
        end = time.monotonic() + plan.seconds
        time.sleep(1.0)
        while time.monotonic() < end or blows.total() < plan.blows:
            time.sleep(rng.uniform(plan.calm_s, 3 * plan.calm_s))
            now = time.monotonic()
            for due, process in [entry for entry in stopped if entry[0] <= now]:
                process.send_signal(signal.SIGCONT)
                stopped.remove((due, process))
            kind = rng.choices(("worker", "front", "stop", "hang", "stop worker"), (20, 50, 15, 5, 10))[0]
            blows[kind] += 1
            victim = rng.randrange(plan.front_ends)
            if kind == "worker":
                worker.kill()
                worker.wait()
                time.sleep(rng.choice((0.0, 0.0, 0.3)))
                worker = start("worker")
            elif kind == "stop worker":
                worker.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.05, 0.6))
                worker.send_signal(signal.SIGCONT)
            elif kind == "front":
                stopped = [entry for entry in stopped if entry[1] is not front_ends[victim]]
                front_ends[victim].kill()
                front_ends[victim].wait()
                front_ends[victim] = start("front")
            else:  # a hang outlasts the eviction deadline
                front_ends[victim].send_signal(signal.SIGSTOP)
                pause_s = rng.uniform(0.1, 1.0) if kind == "stop" else 2 * EVICT_AFTER_S
                stopped.append((now + pause_s, front_ends[victim]))
        for _, process in stopped:
            process.send_signal(signal.SIGCONT)
        for process in (worker, *front_ends):  # the youngest may not have its signal handler yet
            _until_started(log, process)
        time.sleep(1.0)
        for process in front_ends:
            process.send_signal(signal.SIGTERM)
        for number, process in enumerate(front_ends):
            if _end_of(process) != 0:
                faults.append(f"front end {number} ended with {process.returncode}")
        worker.send_signal(signal.SIGTERM)
        if _end_of(worker) != 0:
            faults.append(f"the worker ended with {worker.returncode}")
    finally:
        for process in (worker, *front_ends):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
    return _judge(plan, directory, log, dict(blows), faults)


def _until_started(log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 2 * STUCK_AFTER_S
    while not (log / f"started-{process.pid}.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _end_of(process: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(2 * STUCK_AFTER_S)
    return None


def _judge(plan: Plan, directory: Path, log: Path, blows: dict[str, int], faults: list[str]) -> Outcome:
    counts: Counter[str] = Counter({"tokens": 0, "wrong": 0, "missing": 0, "stuck": 0})
    worst, survivors = 0.0, 0
    for path in sorted(log.glob("front-*.json")):
        report = json.loads(path.read_text())
        worst = max(worst, report.pop("worst_recovery_s"))
        if report.pop("survived"):
            survivors += 1
            if report.pop("free_slots") != plan.streams or report.pop("open") != 0:
                faults.append(f"{path.stem} leaked slots")
        counts.update(report)
    faults.extend(f"{counts[name]} {name}" for name in ("wrong", "missing", "stuck") if counts[name])
    if survivors != plan.front_ends:
        faults.append(f"{survivors} of {plan.front_ends} front ends reported at the end")
    workers = [json.loads(path.read_text()) for path in log.glob("worker-*.json")]
    if len(workers) != 1:
        faults.append(f"{len(workers)} workers reported at the end")
    faults.extend(
        f"the worker kept {name}: {value}" for one in workers for name, value in one.items() if value
    )
    left = sorted(os.listdir(directory)) if directory.exists() else ["no directory"]
    if left:
        faults.append(f"left behind: {', '.join(left)}")
    if not counts["tokens"] or not counts["finished"]:
        faults.append("nothing was generated")
    return Outcome(blows, dict(counts), worst, faults)


def main() -> int:
    """Run once and print the figures; exit code 1 when a promise was broken."""
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        role, directory, log, raw, seed = sys.argv[2:]
        plan = msgspec.json.decode(raw, type=Plan)
        if role == "worker":
            run_worker(Path(directory), Path(log), plan)
        else:
            asyncio.run(run_front_end(Path(directory), Path(log), plan, int(seed)))
        return 0
    parser = argparse.ArgumentParser(description="kill test of the slot ring")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--front-ends", type=int, default=4)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    outcome = strike(Plan(arguments.seconds, arguments.front_ends, arguments.streams, arguments.seed))
    counts = outcome.counts
    print("blows             ", ", ".join(f"{count} x {kind}" for kind, count in outcome.blows.items()))
    print("requests          ", ", ".join(f"{n} {k}" for k, n in sorted(counts.items()) if k != "tokens"))
    print(f"tokens checked     {counts['tokens']:,}")
    print(f"wrong, missing     {counts['wrong']}, {counts['missing']}")
    print(f"stuck (> {STUCK_AFTER_S:.0f} s)     {counts['stuck']}")
    print(f"longest recovery   {outcome.worst_recovery_s:.2f} s")
    print("faults            ", "; ".join(outcome.faults) or "none: 0 leaked slots, 0 leaked files")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
