"""Ten times more clients than a server has room for, with slow, idle and hostile ones among them.

    python -m tests.stress.overload --seconds 60 --idle 5000

Peak: as many clients as there are slots. Overload: ten times as many, each coming back after the time
the server told it. In both, some clients read slowly, some open connections and say nothing, some send
a byte a second. Every answer must be whole or an honest refusal, memory bounded, and the server as quick
as before right after. Figures are printed; clients and server share this machine's cores.
"""

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from tests.stress.chaos import resident_bytes
from tests.support.raw_http import Answer, chat
from tests.support.server import Server, chat_request, serving
from tests.support.tiny_model import TinyShape, write_tiny_model

MAX_GROWTH_BYTES: Final = (
    128 << 20
)  # of a process: 5,000 connections and all buffers, and nothing without end
TOKENS: Final = 32


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    seconds: float
    idle: int
    slots: int = 16
    front_ends: int = 2
    factor: int = 10
    slow: int = 8
    dribbling: int = 32


class Outcome(msgspec.Struct):
    """What was measured. `faults` is empty when every promise held."""

    peak_tokens_per_s: float
    overload_tokens_per_s: float
    counts: dict[str, int]
    longest_gap_s: float
    recovery_s: float
    idle_open: int
    growth_bytes: dict[str, int]
    faults: list[str]


class Load:
    """Clients of one server, and what they saw."""

    def __init__(self, server: Server, plan: Plan) -> None:
        self.port = server.port
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_tokens = 0
        self.stopping = False

    async def client(self, seed: int) -> None:
        """One polite client: comes back when it was told to."""
        body = chat_request(f"hello {seed}", TOKENS, seed=seed, temperature=0.7)
        while not self.stopping:
            answer = await chat(self.port, body)
            self.judge(answer)
            if answer.is_refused:
                await asyncio.sleep(answer.retry_after_s)

    def judge(self, answer: Answer) -> None:
        """Whole, or refused with a time to come back; nothing between."""
        if answer.is_done and not answer.error:
            self.counts["whole"] += 1
            self.num_tokens += TOKENS
        elif answer.status == 429 and answer.retry_after_s >= 1:
            self.counts["429"] += 1
        elif not self.stopping:
            self.faults.append(f"neither whole nor an honest refusal: {answer}")

    async def run(self, num_clients: int, seconds: float) -> float:
        """Tokens of whole answers in a second."""
        self.stopping, self.num_tokens = False, 0
        clients = [asyncio.ensure_future(self.client(seed)) for seed in range(num_clients)]
        began_s = time.monotonic()
        await asyncio.sleep(seconds)
        rate = self.num_tokens / (time.monotonic() - began_s)
        self.stopping = True
        for client in clients:  # those that wait to come back do not
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return rate

    async def longest_gap(self, stop: asyncio.Event) -> float:
        """The longest silence inside a stream that runs beside all that."""
        longest = 0.0
        body = chat_request("probe", 200, seed=1)
        while not stop.is_set():
            answer = Answer()
            running = asyncio.ensure_future(chat(self.port, body, answer=answer))
            seen, since_s = 0, time.monotonic()
            while not running.done():
                await asyncio.sleep(0.02)
                if answer.num_events != seen:
                    if seen > 1:
                        longest = max(longest, time.monotonic() - since_s)
                    seen, since_s = answer.num_events, time.monotonic()
            if not answer.is_done:
                await asyncio.sleep(0.5)
        return longest

    async def slow_reader(self, stop: asyncio.Event) -> None:
        """Reads so slowly that its stream has to wait for it."""
        while not stop.is_set():
            await chat(self.port, chat_request("slow", 1000, seed=2), pause_s=0.5)
            await asyncio.sleep(0.5)

    async def dribble(self) -> None:
        """One byte a second."""
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            with contextlib.closing(writer):
                for byte in b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: " + b"a" * 100_000:
                    writer.write(bytes((byte,)))
                    await writer.drain()
                    await asyncio.sleep(1.0)


async def _idle(port: int, count: int) -> list[asyncio.StreamWriter]:
    writers = []
    for _ in range(count):
        try:
            writers.append((await asyncio.open_connection("127.0.0.1", port))[1])
        except OSError:
            break
    return writers


async def measure(server: Server, plan: Plan) -> Outcome:
    """Peak, overload, recovery."""
    load = Load(server, plan)
    capacity = plan.slots * plan.front_ends
    await load.run(capacity, plan.seconds / 6)  # warm
    before = {pid: resident_bytes(pid) for pid in (server.process.pid, *server.children())}
    idle = await _idle(server.port, plan.idle)
    stop = asyncio.Event()
    probe = asyncio.ensure_future(load.longest_gap(stop))
    others = [asyncio.ensure_future(load.slow_reader(stop)) for _ in range(plan.slow)]
    others += [asyncio.ensure_future(load.dribble()) for _ in range(plan.dribbling)]
    # The company is the same in both: slow readers hold slots too.
    peak = await load.run(capacity, plan.seconds / 2)
    load.counts.clear()
    overload = await load.run(plan.factor * capacity, plan.seconds)
    stop.set()
    for task in others:
        task.cancel()
    began_s = time.monotonic()
    while not (answer := await chat(server.port, chat_request("hello", 1))).is_done:
        if time.monotonic() - began_s > 60:
            load.faults.append(f"no recovery: {answer}")
            break
        await asyncio.sleep(0.02)
    recovery_s = time.monotonic() - began_s
    longest_gap_s = await probe
    growth = {f"{pid}": resident_bytes(pid) - size for pid, size in before.items()}
    load.faults += [
        f"process {pid} grew by {size}" for pid, size in growth.items() if size > MAX_GROWTH_BYTES
    ]
    for writer in idle:
        writer.close()
    return Outcome(
        peak_tokens_per_s=round(peak, 1),
        overload_tokens_per_s=round(overload, 1),
        counts=dict(load.counts),
        longest_gap_s=round(longest_gap_s, 3),
        recovery_s=round(recovery_s, 3),
        idle_open=len(idle),
        growth_bytes=growth,
        faults=load.faults,
    )


def overload(plan: Plan) -> Outcome:
    """One whole run."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "tiny.gguf", shape=TinyShape(max_context_tokens=4096))
        flags = ["--device", "reference", "--front-ends", str(plan.front_ends)]
        flags += ["--slots-per-front-end", str(plan.slots), "--log-level", "error"]
        with serving(model, *flags) as server:
            children = server.children()
            outcome = asyncio.run(measure(server, plan))
            if server.children() != children:
                outcome.faults.append("a process did not survive")
            server.send(signal.SIGTERM)
            if code := server.wait():
                outcome.faults.append(f"the server ended with {code}")
    return outcome


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--idle", type=int, default=5000)
    arguments = parser.parse_args()
    plan = Plan(seconds=arguments.seconds, idle=arguments.idle)
    outcome = overload(plan)
    print(f"cores: {len(os.sched_getaffinity(0))}")
    print(msgspec.json.format(msgspec.json.encode({"plan": plan, "outcome": outcome})).decode())
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
