"""Many short requests, one after the other on a few connections each: memory of every process stays flat.

python -m tests.stress.soak --requests 100000
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from tests.stress.chaos import resident_bytes
from tests.support.raw_http import chat
from tests.support.server import Server, chat_request, serving
from tests.support.tiny_model import write_tiny_model

CLIENTS: Final = 16
WARM_SHARE: Final = 0.2  # of the requests, before memory is looked at: caches fill
MAX_GROWTH_BYTES: Final = 8 << 20
MAX_NEW_DESCRIPTORS: Final = 2


class Outcome(msgspec.Struct):
    """What was measured. `faults` is empty when memory stayed flat."""

    requests: int
    requests_per_s: float
    growth_bytes: dict[str, int]
    faults: list[str]


async def _send(server: Server, count: int, first: int) -> list[str]:
    faults: list[str] = []
    left = iter(range(first, first + count))

    async def client() -> None:
        for number in left:
            answer = await chat(server.port, chat_request(f"hello {number % 500}", 2, seed=number))
            if not answer.is_done or answer.error:
                faults.append(f"request {number}: {answer}")

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return faults


def _state(pid: int) -> tuple[int, int]:
    return resident_bytes(pid), len(os.listdir(f"/proc/{pid}/fd"))


def soak(num_requests: int) -> Outcome:
    """One whole run."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "tiny.gguf")
        with serving(model, "--device", "reference", "--front-ends", "2", "--log-level", "error") as server:
            num_warm = int(num_requests * WARM_SHARE)
            faults = asyncio.run(_send(server, num_warm, 0))
            processes = [server.process.pid, *server.children()]
            before = {pid: _state(pid) for pid in processes}
            began_s = time.monotonic()
            faults += asyncio.run(_send(server, num_requests - num_warm, num_warm))
            rate = (num_requests - num_warm) / (time.monotonic() - began_s)
            if [server.process.pid, *server.children()] != processes:
                faults.append("a process did not survive")
            growth = {}
            for pid in processes:
                size, descriptors = _state(pid)
                growth[f"{pid}"] = size - before[pid][0]
                if size - before[pid][0] > MAX_GROWTH_BYTES:
                    faults.append(f"process {pid} grew by {size - before[pid][0]} bytes")
                if descriptors > before[pid][1] + MAX_NEW_DESCRIPTORS:
                    faults.append(f"process {pid} has {descriptors} descriptors, had {before[pid][1]}")
            server.send(signal.SIGTERM)
            if code := server.wait():
                faults.append(f"the server ended with {code}")
    return Outcome(num_requests, round(rate, 1), growth, faults)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    outcome = soak(parser.parse_args().requests)
    print(msgspec.json.format(msgspec.json.encode(outcome)).decode())
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
