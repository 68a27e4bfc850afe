"""What an idle ring costs: CPU time of a worker and of attached front ends that have nothing to do."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop

from ds4.ring.front_end import FrontEndRing
from ds4.ring.layout import RingShape
from ds4.ring.states import WorkerState
from ds4.ring.worker_end import WorkerRing

_SLEEP_S = 0.1  # as the engine's
_SETTLE_S = 1.0


class IdleCost(msgspec.Struct, frozen=True):
    """Share of one core, in percent."""

    worker_percent: float
    front_end_percent: list[float]


def _worker(directory: Path, seconds: float) -> float:
    ring = WorkerRing(directory, RingShape(), b"")
    ring.set_state(WorkerState.READY)
    for wanted in (True, False):  # first wait for the front ends, then measure
        began, cpu = time.perf_counter(), time.process_time()
        while ring.num_front_ends < 2 if wanted else time.perf_counter() - began < seconds:
            ring.poll()
            ring.sleep(_SLEEP_S)
    used = 100 * (time.process_time() - cpu) / seconds
    while ring.num_front_ends:  # they still measure
        ring.poll()
        ring.sleep(_SLEEP_S)
    ring.close()
    return used


async def _front_end(directory: Path, seconds: float) -> float:
    ring = FrontEndRing(directory)
    await ring.start()
    await ring.wait_attached()
    await asyncio.sleep(_SETTLE_S)  # NumPy's thread pool is still starting
    cpu = time.process_time()
    await asyncio.sleep(seconds)
    used = 100 * (time.process_time() - cpu) / seconds
    await ring.close()
    return used


def measure_idle(seconds: float) -> IdleCost:
    """One worker and two front ends, each a process of its own."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=base) as directory:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.ring_idle", role, f"{directory}/ring", str(seconds)],
                stdout=subprocess.PIPE,
            )
            for role in ("worker", "front", "front")
        ]
        used = [float(child.communicate(timeout=60 + seconds)[0]) for child in children]
    return IdleCost(used[0], used[1:])


if __name__ == "__main__":
    place, length = Path(sys.argv[2]), float(sys.argv[3])
    if sys.argv[1] == "worker":
        print(_worker(place, length))
    else:
        print(uvloop.run(_front_end(place, length)))
