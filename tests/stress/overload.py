"""Ten times more clients than a server has room for, with slow, idle and hostile ones among them.

    python -m tests.stress.overload --seconds 60 --idle 5000
    python -m tests.stress.overload --model smollm2-135m --device cpu

Phases with the same company (slow readers, idle connections, a byte a second): *polite*, ten times as many
clients as there are slots, each coming back after the time it was told; *tenfold*, ten times the requests a
second that the server was seen to finish, evenly, whatever it says to them; *rude*, ten times as many
clients that come back at once, without end. Before and after each is a *peak*: as many clients as there are
slots. Every answer must be whole or an honest refusal, goodput and the time between two tokens stay near
those of the peaks around, memory bounded, and the server as quick as before right after. Figures are
printed. Clients and server share this machine's cores, and rude clients take theirs from the server: their
cost is in the figures too.
"""

import argparse
import asyncio
import contextlib
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx
import msgspec
import uvloop

from ds4.models import resolve_model
from tests.stress.chaos import resident_bytes
from tests.support.flood import Arrivals, Caller, Idler, Tally, http_post, read_slowly
from tests.support.raw_http import chat
from tests.support.server import Server, chat_request, serving
from tests.support.tiny_model import TinyShape, write_tiny_model

# Of a process: 5,000 connections and all buffers, and nothing without end. The worker's KV cache is bounded
# by --kv-cache-tokens, and is memory when it was used.
MAX_GROWTH_BYTES: Final = 128 << 20
_KV_TOKEN_BYTES: Final = 32 << 10  # at most, in the models that this is run with
_MOST_CLIENTS: Final = 3000
_MOST_S: Final = 10.0  # that an answer takes: who is held at the door, and then served
TOKENS: Final = 32  # of an answer, on average
_PATH: Final = "/v1/chat/completions"
_GENERATED: Final = re.compile(r"^ds4_generation_tokens_total (\S+)$", re.MULTILINE)


class Plan(msgspec.Struct, frozen=True):
    """One run. `seconds` are those of an overloaded phase; the peaks take half of it."""

    seconds: float
    idle: int
    model: str = ""  # a tiny one
    device: str = "reference"
    sessions: int = 32
    slots: int = 32
    front_ends: int = 2
    kv_cache_tokens: int = 16384
    factor: int = 10
    slow: int = 8
    dribbling: int = 32


class Phase(msgspec.Struct):
    """What the clients of one phase saw. Percentiles in milliseconds."""

    name: str
    clients: int
    answered_per_s: float  # requests, in one way or the other
    late: int  # requests that were not sent in time because no client was free
    tokens_per_s: float
    of_peak_percent: float  # of the mean of the peaks around it; 0 for a peak
    whole: int
    refused: int
    between_tokens_ms: dict[str, float]
    first_token_ms: dict[str, float]
    refusal_ms: dict[str, float]
    cpu_percent: dict[str, int]  # of one core, for each process of the server, and of all clients


class Outcome(msgspec.Struct):
    """What was measured. `faults` is empty when every promise held."""

    phases: list[Phase]
    recovery_s: float
    idle_open: int
    resident_mib: dict[str, list[int]]  # of each process: before and after
    faults: list[str]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(1000 * ordered[int(part * (len(ordered) - 1))], 1) for name, part in at.items()}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Load:
    """One server under load, phase after phase."""

    def __init__(self, server: Server, plan: Plan) -> None:
        self.server = server
        self.plan = plan
        self.faults: list[str] = []
        self.processes = {"supervisor": server.process.pid, "worker": server.worker()}
        self.processes |= {f"front-{index}": pid for index, pid in enumerate(server.front_ends())}

    async def _generated(self) -> float:
        """Tokens the worker has made so far, by its own count: each goes to an answer that must be whole."""
        async with httpx.AsyncClient(timeout=60) as client:
            found = _GENERATED.search((await client.get(f"{self.server.url}/metrics")).text)
        assert found is not None
        return float(found[1])

    async def phase(
        self, name: str, num_polite: int, seconds: float, *, num_rude: int = 0, rate: float = 0.0
    ) -> Phase:
        """Run one: so many clients, and `rate` requests a second."""
        tally = Tally()
        # One prompt, so that the prefix cache helps all phases alike; lengths that do not end in step.
        requests = [
            http_post(
                _PATH,
                chat_request(
                    "hello", TOKENS // 2 + seed % (TOKENS + 1), seed=seed, temperature=0.7, stream=True
                ),
            )
            for seed in range(max(num_polite + num_rude, min(_MOST_CLIENTS, int(rate * _MOST_S))))
        ]
        callers = [
            Caller(self.server.port, request, tally, is_rude=seed >= num_polite)
            for seed, request in enumerate(requests[: num_polite + num_rude])
        ]
        clients = {**self.processes, "clients": os.getpid()}
        used = {who: _cpu_s(pid) for who, pid in clients.items()}
        began_s, before = time.monotonic(), await self._generated()
        await asyncio.gather(*(caller.connect() for caller in callers))
        if rate:
            arrivals = Arrivals(self.server.port, requests, tally, rate)
            callers = arrivals.callers
            arriving = asyncio.ensure_future(arrivals.run())
        await asyncio.sleep(seconds)
        with contextlib.suppress(TimeoutError):  # a machine so slow that nobody is through by now
            async with asyncio.timeout(60):
                while not tally.counts["whole"]:  # noqa: ASYNC110 - the callers bring it about
                    await asyncio.sleep(0.05)
        tokens, took_s = await self._generated() - before, time.monotonic() - began_s
        shares = {who: round(100 * (_cpu_s(pid) - used[who]) / took_s) for who, pid in clients.items()}
        tally.stopping = True
        late = 0
        if rate:
            await arriving
            late = arrivals.num_late
        for caller in callers:
            caller.hang_up()
        await asyncio.sleep(1.0)  # until their slots are free
        self.faults += [f"{name}: {fault}" for fault in tally.faults]
        return Phase(
            name=name,
            clients=len(callers),
            answered_per_s=round((tally.counts["whole"] + tally.counts["429"]) / took_s, 1),
            late=late,
            tokens_per_s=round(tokens / took_s, 1),
            of_peak_percent=0.0,
            whole=tally.counts["whole"],
            refused=tally.counts["429"],
            between_tokens_ms=_percentiles(tally.gaps_s),
            first_token_ms=_percentiles(tally.first_s),
            refusal_ms=_percentiles(tally.refused_s),
            cpu_percent=shares,
        )

    async def recovery_s(self) -> float:
        """How long until a request is served, from now on."""
        began_s = time.monotonic()
        while not (answer := await chat(self.server.port, chat_request("hello", 1))).is_done:
            if time.monotonic() - began_s > 60:
                self.faults.append(f"no recovery: {answer}")
                break
            await asyncio.sleep(0.02)
        return time.monotonic() - began_s


async def measure(server: Server, plan: Plan) -> Outcome:
    """All phases."""
    load, company = Load(server, plan), Tally()
    capacity = plan.slots * plan.front_ends
    many = plan.factor * capacity
    await load.phase("warm", capacity, plan.seconds / 6)
    before = {who: resident_bytes(pid) for who, pid in load.processes.items()}
    dribble = b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: " + b"a" * 100_000
    idlers = [Idler(server.port, company) for _ in range(plan.idle)]
    idlers += [Idler(server.port, company, dribble) for _ in range(plan.dribbling)]
    for idler in idlers:
        await idler.connect()
    # Far more than fits in the buffers between us.
    much = chat_request("slow", 1000, seed=2, stream=True, logprobs=True, top_logprobs=20)
    slow = [
        asyncio.ensure_future(read_slowly(server.port, http_post(_PATH, much), company))
        for _ in range(plan.slow)
    ]
    await load.phase("settle", capacity, plan.seconds / 3)  # until slow readers have full buffers
    peak = await load.phase("peak", capacity, plan.seconds / 2)
    phases, recovery_s = [peak], 0.0
    for name in ("polite", "tenfold", "rude"):
        phase = await load.phase(
            name,
            many if name == "polite" else 0,
            plan.seconds,
            num_rude=many if name == "rude" else 0,
            rate=plan.factor * peak.tokens_per_s / TOKENS if name == "tenfold" else 0.0,
        )
        recovery_s = max(recovery_s, await load.recovery_s())
        after = await load.phase("peak", capacity, plan.seconds / 2)
        phase.of_peak_percent = round(200 * phase.tokens_per_s / (peak.tokens_per_s + after.tokens_per_s), 1)
        phases += [phase, after]
        peak = after
    with contextlib.suppress(TimeoutError):  # who was hung up on is about to come back
        async with asyncio.timeout(60):
            while not all(idler.is_open for idler in idlers):  # noqa: ASYNC110 - the loop brings it about
                await asyncio.sleep(0.05)
    idle_open = sum(idler.is_open for idler in idlers)
    company.stopping = True
    for task in slow:
        task.cancel()
    for error in await asyncio.gather(*slow, return_exceptions=True):
        if not isinstance(error, asyncio.CancelledError):
            load.faults.append(f"a slow reader failed: {error!r}")
    resident = {who: resident_bytes(pid) for who, pid in load.processes.items()}
    for idler in idlers:
        idler.hang_up()
    await asyncio.sleep(0.2)  # for connections on their way, which are hung up on as they are made
    for who, size in before.items():
        most = MAX_GROWTH_BYTES + (plan.kv_cache_tokens * _KV_TOKEN_BYTES if who == "worker" else 0)
        if resident[who] - size > most:
            load.faults.append(f"{who} grew by {resident[who] - size} bytes")
    return Outcome(
        phases=phases,
        recovery_s=round(recovery_s, 3),
        idle_open=idle_open,
        resident_mib={who: [size >> 20, resident[who] >> 20] for who, size in before.items()},
        faults=load.faults,
    )


def overload(plan: Plan) -> Outcome:
    """One whole run."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as directory:
        if plan.model:
            model = Path(resolve_model(plan.model, progress=True))
        else:
            model = write_tiny_model(Path(directory) / "tiny.gguf", shape=TinyShape(max_context_tokens=4096))
        flags = ["--device", plan.device, "--front-ends", str(plan.front_ends), "--log-level", "error"]
        flags += ["--slots-per-front-end", str(plan.slots), "--batched-sessions", str(plan.sessions)]
        flags += ["--kv-cache-tokens", str(plan.kv_cache_tokens)]
        with serving(model, *flags) as server:
            children = server.children()
            outcome: Outcome = uvloop.run(measure(server, plan))
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
    parser.add_argument("--model", default="", help="a known name or a file; without it a tiny model")
    parser.add_argument("--device", default="auto")
    plan = Plan(**vars(parser.parse_args()))
    outcome = overload(plan)
    print(f"cores: {len(os.sched_getaffinity(0))}")
    print(msgspec.json.format(msgspec.json.encode({"plan": plan, "outcome": outcome})).decode())
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
