"""What the engine's own Python costs per step: everything but the device.

    python -m tests.benchmarks.engine_step [NUM_SEQUENCES ...]

A device that computes nothing, the real ring, readers that keep up. Prints the median and the 90th
percentile of one turn of the engine (poll, plan, fill, collect, publish, account).
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from tests.support.engine_rig import EngineRig
from workers.devices.interface import Limits, SeatParams, StepBatch, StepResult
from workers.runner import Runner

NUM_STEPS = 300
WARM_UP_STEPS = 50
CONTEXT = 600


class IdleDevice:
    """Samples token 5 at once."""

    name = "idle"
    pipeline_depth = 1

    def __init__(self, limits: Limits) -> None:
        self._queued: deque[int] = deque()
        self._result = StepResult(limits.max_seats)

    def seat(self, seat: int, params: SeatParams) -> None:
        pass

    def submit(self, batch: StepBatch) -> None:
        self._queued.append(batch.num_samples)

    def collect(self) -> StepResult:
        count = self._result.num_samples = self._queued.popleft()
        self._result.token_ids[:count] = 5
        self._result.ok[:count] = True
        self._result.elapsed_s = 0.001
        return self._result

    def close(self) -> None:
        pass


async def measure(num_sequences: int) -> list[float]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        rows = max(512, num_sequences)
        limits = Limits(
            max_rows=rows,
            max_seats=num_sequences,
            max_context_tokens=CONTEXT,
            num_pages=num_sequences * 40,
        )
        rig = EngineRig(
            Path(directory),
            pipeline_depth=1,
            seats=num_sequences,
            rows=rows,
            pages=limits.num_pages,
            context=CONTEXT,
            slots=num_sequences,
        )
        rig.engine._runner = Runner(IdleDevice(limits), limits)
        async with rig.serving():
            clients = [rig.submit([number % 900] * 16, CONTEXT - 16) for number in range(num_sequences)]
            await rig.until(lambda: all(client.tokens for client in clients))
            await rig.turn(WARM_UP_STEPS)
            times = []
            for _ in range(NUM_STEPS):
                start = time.perf_counter()
                rig.engine.step()
                times.append(time.perf_counter() - start)
                for _ in range(3):
                    await asyncio.sleep(0)
            for client in clients:
                client.task.cancel()
            return times


def main() -> None:
    for num_sequences in [int(argument) for argument in sys.argv[1:]] or [1, 32, 256]:
        times = asyncio.run(measure(num_sequences))
        tenths = statistics.quantiles(times, n=10)
        print(
            f"sequences={num_sequences:5d}  median={statistics.median(times) * 1e6:7.0f} us  "
            f"p90={tenths[8] * 1e6:7.0f} us  per sequence={statistics.median(times) / num_sequences * 1e6:6.2f} us"
        )


if __name__ == "__main__":
    main()
