"""Random blows to a real server while checked streams run.

    python -m tests.stress.chaos --seconds 600 --streams 64        (also: make chaos)

Every stream must end exactly right, or with an explicit error, or with its connection where the very
front end that held it was struck; what came before must be right in any case. At the end nothing may be
left: slots, pages, prompt files, descriptors, memory, processes. A run is a function of its seed as far
as the machine allows.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from tests.support.jumping_clock import JumpingClock, find_compiler
from tests.support.raw_http import Answer, chat, status_of
from tests.support.server import Server, chat_request, complete, process_children, serving, wait_until
from tests.support.struck import POISON, STRIKE
from tests.support.tiny_model import TinyShape, write_tiny_model

STUCK_AFTER_S: Final = 300.0  # with no end: several outages may come one after the other
READY_AFTER_S: Final = 60.0
OVERLAP: Final = 0.3  # of the blows come before the one before them is over
CALM_S: Final = 300.0
GONE_S: Final = 120.0  # for what is left of the blows to be gone
TMPFS_BYTES: Final = 64 << 20
MAX_DESCRIPTORS: Final = 48  # of a process with no connection; an idle front end has 36
MAX_GROWTH_BYTES: Final = 16 << 20  # of the supervisor, the one process that lives all along
MAX_BYTES: Final = 400 << 20  # of any process at the end; a fresh one has half of it
DAY_S: Final = 86_400
# What a successor rebuilds from the tokens so far; requests take one each in turn.
KINDS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.8},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2, "stop": ["never in it"]},
    {"temperature": 0.8, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "stream": False},
    {"temperature": 1.0, "guided_regex": "[a-z]{20}( [a-z]{3,9}){9}", "ignore_eos": False, "max_tokens": 200},
    {"temperature": 0.0, "n": 2, "stream": False},
)


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    seconds: float
    streams: int
    seed: int
    front_ends: int = 2
    pause_s: float = 2.0  # mean, between two blows

    @property
    def has_poison(self) -> bool:
        """Whether there is time to hunt for a request that kills the worker."""
        return self.seconds > 60


class Outcome(msgspec.Struct):
    """What happened. `faults` is empty when every promise held."""

    blows: dict[str, int]
    counts: dict[str, int]
    metrics: dict[str, float]
    longest_s: float
    faults: list[str]


class Run:
    """The server under attack, the streams that are checked, and what was found."""

    def __init__(self, plan: Plan, server: Server, shared: Path, clock: JumpingClock | None) -> None:
        self.plan = plan
        self.server = server
        self.shared = shared
        self.clock = clock
        self.rng = random.Random(plan.seed)
        self.counts: Counter[str] = Counter()
        self.blows: Counter[str] = Counter()
        self.faults: list[str] = []
        self.struck_s = 0.0  # when a front end was last struck
        self.longest_s = 0.0
        self.stopping = False
        self.num_poisons = 0
        self.pending: list[asyncio.Future[None]] = []  # poison on its way, and what ends a blow
        self.bodies = [
            # Every fifth prompt is too long for its descriptor and goes through a file.
            chat_request(
                "request " * (150 if number % 5 == 4 else 1) + str(number), 40 + 20 * number, seed=number
            )
            | KINDS[number % len(KINDS)]
            for number in range(12)
        ]
        self.expected = [
            "".join(choice["message"]["content"] for choice in complete(server.url, body)["choices"])
            for body in self.bodies
        ]

    # -- streams

    async def stream(self, rng: random.Random) -> None:
        """One request after the other."""
        while not self.stopping:
            await self.request(rng)

    async def request(self, rng: random.Random) -> Answer:
        """One request; what comes back is checked."""
        number = rng.randrange(len(self.bodies))
        leave_after = rng.randrange(1, 30) if rng.random() < 0.1 else 0
        pause_s = 0.02 if rng.random() < 0.1 else 0.0
        answer, began_s = Answer(), time.monotonic()
        try:
            async with asyncio.timeout(STUCK_AFTER_S):
                await chat(
                    self.server.port,
                    self.bodies[number],
                    leave_after=leave_after,
                    pause_s=pause_s,
                    answer=answer,
                )
        except TimeoutError:
            self.faults.append(f"a stream was stuck after {answer.num_events} events")
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        self.judge(answer, self.expected[number], began_s, left=leave_after > 0)
        if not answer.is_done:
            await asyncio.sleep(0.05)
        return answer

    def judge(self, answer: Answer, expected: str, began_s: float, *, left: bool) -> None:
        """Count an answer, and note what must not be."""
        if not expected.startswith(answer.text):
            self.faults.append(f"wrong text after {answer.num_events} events")
        if answer.is_done and not answer.error:
            self.counts["exact"] += 1
            if answer.text != expected:
                self.faults.append("a text that ended early")
        elif answer.is_refused:
            self.counts[f"refused {answer.status}"] += 1
        elif answer.error.startswith("connection"):
            self.counts["connection ended"] += 1
            # Its own front end may have been struck, and nothing else may end a connection.
            if self.struck_s < began_s - 1.0:
                self.faults.append(f"{answer.error} though no front end was struck")
        elif answer.error:
            self.counts[f"error {answer.error}"] += 1
        elif left:
            self.counts["left"] += 1
        else:
            self.faults.append(f"an end without an end: {answer}")

    # -- blows

    def blow(self) -> float:
        """Strike once; how long to leave it at that, in seconds."""
        kinds: list[Callable[[], float]] = [
            self.kill_worker,
            self.kill_worker,
            self.kill_front_end,
            self.stop_worker,
            self.stop_front_end,
            self.end_worker,
            self.strike_device,
            self.reload_front_ends,
            self.hand_over,
            self.kill_checker,
            self.stop_supervisor,
        ]
        if self.clock is not None:
            kinds.append(self.jump_clock)
        if self.plan.has_poison:
            kinds.append(self.send_poison)
        if os.path.ismount(self.shared):
            kinds.append(self.fill_disk)
        kind = self.rng.choice(kinds)
        self.blows[kind.__name__] += 1
        try:
            return kind()
        except (ProcessLookupError, IndexError, ValueError):
            return 0.0  # it was dead already

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """End a blow in some seconds, and in any case."""

        async def wait() -> None:
            await asyncio.sleep(seconds)
            action()

        self.pending.append(asyncio.ensure_future(wait()))

    def _one(self, words: str) -> int:
        return self.rng.choice(self.server.children(words))

    def kill_worker(self) -> float:
        os.kill(self._one("workers.main"), signal.SIGKILL)
        return 0.0

    def end_worker(self) -> float:
        os.kill(self._one("workers.main"), signal.SIGTERM)
        return 0.0

    def strike_device(self) -> float:
        """Its next step fails, and the worker ends."""
        os.kill(self._one("workers.main"), STRIKE)
        return 0.0

    def kill_checker(self) -> float:
        """The process in which a front end checks grammars."""
        (checker,) = process_children(self._one("-m ds4 front"), "grammar_check")
        os.kill(checker, signal.SIGKILL)
        return 0.0

    def stop_supervisor(self) -> float:
        """Nobody restarts anything for a while."""
        self.server.send(signal.SIGSTOP)
        self._later(3.0, lambda: self.server.send(signal.SIGCONT))
        return self.rng.choice((0.0, 3.0))

    def jump_clock(self) -> float:
        """The wall clock of every process is years off from one moment to the next."""
        assert self.clock is not None
        self.clock.set(self.rng.choice((0, 60, -60, DAY_S, -DAY_S, 3000 * DAY_S, -3000 * DAY_S)))
        return 0.0

    def send_poison(self) -> float:
        """A request that no worker survives; it must fail, and only it."""
        self.num_poisons += 1
        body = chat_request(f"{POISON} {self.num_poisons}", 20)

        async def send() -> None:
            answer = await chat(self.server.port, body)
            if answer.error.startswith("connection"):
                answer.error = "connection"
            self.counts[f"poison {answer.error}"] += 1
            if answer.is_done and not answer.error:
                self.faults.append("a request that kills the worker came to its end")

        self.pending.append(asyncio.ensure_future(send()))
        return 0.0

    def kill_front_end(self) -> float:
        self.struck_s = float("inf")
        os.kill(self._one("-m ds4 front"), signal.SIGKILL)
        self.struck_s = time.monotonic()
        return 0.0

    def stop_worker(self) -> float:
        return self._stop(self._one("workers.main"))

    def stop_front_end(self) -> float:
        return self._stop(self._one("-m ds4 front"))

    def _stop(self, pid: int) -> float:
        """SIGSTOP, for a moment or until the supervisor notices."""
        os.kill(pid, signal.SIGSTOP)
        seconds = self.rng.choice((0.2, 1.0, 15.0 if self.plan.seconds > 60 else 1.0))
        self.struck_s = max(self.struck_s, time.monotonic() + seconds)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            self.struck_s = max(self.struck_s, time.monotonic())

        self._later(seconds, go_on)
        return seconds if seconds < 2 else 0.0

    def reload_front_ends(self) -> float:
        self.server.send(signal.SIGHUP)
        return 0.0

    def hand_over(self) -> float:
        self.server.send(signal.SIGUSR2)
        return 0.0

    def fill_disk(self) -> float:
        """Not a byte left in the shared directory for a while."""
        filler = self.shared / "filler"

        def empty() -> None:
            filler.unlink(missing_ok=True)

        self._later(1.5, empty)
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        return 1.5

    # -- the whole

    async def strike(self) -> None:
        """Streams and blows, then calm."""
        streams = [
            asyncio.ensure_future(self.stream(random.Random(f"{self.plan.seed} {number}")))
            for number in range(self.plan.streams)
        ]
        end_s = time.monotonic() + self.plan.seconds
        while time.monotonic() < end_s:
            await asyncio.sleep(self.rng.expovariate(1 / self.plan.pause_s))
            await asyncio.sleep(self.blow())
            if self.rng.random() >= OVERLAP:
                await self.recover()
            if self.server.process.poll() is not None:
                self.faults.append(f"the server ended with {self.server.process.returncode}")
                break
        self.stopping = True
        await asyncio.gather(*streams, *self.pending)

    async def recover(self) -> None:
        """Wait until there is a worker again, and front ends that know it: a slow machine takes its time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_AFTER_S):
                for _ in range(4):  # meets every front end, most times
                    while await status_of(self.server.port, "/health/ready") != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)

    async def calm(self) -> None:
        """After the blows everything works again: each body once, without an exception."""
        deadline_s = time.monotonic() + CALM_S
        rng = random.Random(0)
        left = set(range(len(self.bodies)))
        while left and time.monotonic() < deadline_s:
            number = min(left)
            answer = await chat(self.server.port, self.bodies[number])
            if answer.is_done and not answer.error and answer.text == self.expected[number]:
                left.discard(number)
            elif answer.error == "request_quarantined":  # struck again and again in its turn, as it seems
                self.counts["quarantined at the end"] += 1
                left.discard(number)
            else:
                await asyncio.sleep(rng.random())
        if left:
            self.faults.append(f"{len(left)} requests do not work after the blows")

    def check_leaks(self, supervisor_bytes: int) -> dict[str, float]:
        """What must be back to nothing."""
        wanted = {"ds4_slots_used": 0, "ds4_num_requests_running": 0, "ds4_num_requests_waiting": 0}
        wanted |= {"ds4_kv_pages_used": 0, "ds4_decode_pending": 0}
        with contextlib.suppress(AssertionError):
            wait_until(lambda: wanted.items() <= self.metrics().items(), "free slots and pages", GONE_S)
        metrics = self.metrics()
        self.faults += [
            f"{name} is {metrics.get(name)}" for name, value in wanted.items() if metrics.get(name) != value
        ]
        prompts = list(self.shared.glob("prompts/*"))
        if prompts:
            self.faults.append(f"{len(prompts)} prompt files are left")
        # Front ends that were replaced leave with their last stream.
        num_wanted = 1 + self.plan.front_ends
        with contextlib.suppress(AssertionError):
            wait_until(lambda: len(self.server.children()) == num_wanted, "one worker", GONE_S)
        children = self.server.children()
        if len(children) != num_wanted:
            self.faults.append(f"{len(children)} children")
        for pid in (self.server.process.pid, *children):
            if (count := fewest_descriptors(pid)) > MAX_DESCRIPTORS:
                self.faults.append(f"process {pid} has {count} descriptors")
            if (size := resident_bytes(pid)) > MAX_BYTES:
                self.faults.append(f"process {pid} has {size >> 20} MiB")
        growth = resident_bytes(self.server.process.pid) - supervisor_bytes
        if growth > MAX_GROWTH_BYTES:
            self.faults.append(f"the supervisor grew by {growth} bytes")
        return metrics

    def metrics(self) -> dict[str, float]:
        """Every metric without labels."""
        text = httpx.get(f"{self.server.url}/metrics", timeout=GONE_S).text
        return {name: float(value) for name, value in re.findall(r"^(ds4_\w+) (\S+)$", text, re.MULTILINE)}


def fewest_descriptors(pid: int) -> int:
    """How many files and sockets a process has open, once it has closed what it is about to."""

    def count() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    with contextlib.suppress(AssertionError):
        wait_until(lambda: count() <= MAX_DESCRIPTORS, "few descriptors", GONE_S)
    return count()


def resident_bytes(pid: int) -> int:
    """Memory of a process that is its own or shared, in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A private shared directory, on a small tmpfs of its own where we may mount one."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "shared"
        path.mkdir(mode=0o700)
        options = f"size={TMPFS_BYTES},mode=0700"
        mounted = (
            shutil.which("mount")
            and not subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False
            ).returncode
        )
        try:
            yield path
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(path)], check=True)


def strike(plan: Plan) -> Outcome:
    """One whole run."""
    with small_disk() as shared, tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "tiny.gguf", shape=TinyShape(max_context_tokens=4096))
        flags = ["--device", "reference", "--front-ends", str(plan.front_ends), "--shared-dir", str(shared)]
        # With poison, few enough to find it; without it, more than there are blows.
        flags += [
            "--resume-attempts",
            "6" if plan.has_poison else "100",
            "--slots-per-front-end",
            str(plan.streams),
        ]
        flags += ["--front-end-timeout-s", "5", "--resume-timeout-s", "25", "--log-level", "info"]
        compiler = find_compiler()
        clock = JumpingClock(Path(directory), compiler) if compiler else None
        environment = clock.environment if clock else None
        with serving(model, *flags, environment=environment, module="tests.support.struck") as server:
            run = Run(plan, server, shared, clock)
            supervisor_bytes = resident_bytes(server.process.pid)
            asyncio.run(run.strike())
            asyncio.run(run.calm())
            metrics = {}
            if server.process.poll() is None:
                metrics = run.check_leaks(supervisor_bytes)
                server.send(signal.SIGTERM)
                code = server.wait()
                if code != 0:
                    run.faults.append(f"the server ended with {code}")
                if left := [entry.name for entry in shared.iterdir()]:
                    run.faults.append(f"left in the shared directory: {left}")
            if run.faults:
                sys.stderr.write(server.log[-2_000_000:])
    shown = ("ds4_resumed_streams_total", "ds4_worker_restarts_total", "ds4_requests_quarantined_total")
    return Outcome(
        blows=dict(run.blows),
        counts=dict(run.counts),
        metrics={name: metrics.get(name, -1.0) for name in shown},
        longest_s=round(run.longest_s, 1),
        faults=run.faults,
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=2.0)
    arguments = parser.parse_args()
    plan = Plan(
        seconds=arguments.seconds, streams=arguments.streams, seed=arguments.seed, pause_s=arguments.pause_s
    )
    outcome = strike(plan)
    print(msgspec.json.format(msgspec.json.encode({"plan": plan, "outcome": outcome})).decode())
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
