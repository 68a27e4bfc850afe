"""What Python costs per step: everything but the device's arithmetic.

    python -m tests.benchmarks.engine_step [NUM_SEQUENCES ...] [--model MODEL.gguf]

A device that computes nothing, the real ring, readers that keep up. Prints the median and the 90th
percentile of one turn of the engine (poll, plan, fill, collect, publish, account). With a model the CPU
engine runs it, once with arg-max and once with draws, and the time in its machine code is taken off:
`device` is what is left of its `submit` (filling the control block, sampling), `turn` of the whole turn.
Times are this thread's own (which computes and runs all the Python), so that busy neighbours matter little.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ds4.generation import SamplingParams
from ds4.model_file import ModelFile
from tests.support.engine_rig import VOCAB_SIZE, EngineRig
from workers.devices.interface import Device, Limits, SeatParams, StepBatch, StepResult
from workers.model.registry import load_program

NUM_STEPS = 300
WARM_UP_STEPS = 50
CONTEXT = 600
SAMPLINGS = {
    "arg-max": SamplingParams(temperature=0.0),
    "top-k 40, top-p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "plain temperature": SamplingParams(temperature=1.0),
}


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


class Meter:
    """The CPU engine on a model, with the time that `submit` and its machine code take."""

    def __init__(self, model: Path) -> None:
        self._program = load_program(ModelFile.open(model))
        self.vocab_size = self._program.dimensions.vocab_size
        self.code_s = self.submit_s = 0.0

    def make(self, limits: Limits) -> Device:
        """The device, metered."""
        from workers.devices.cpu.device import CpuDevice  # needs Numba

        device: Any = CpuDevice(self._program, limits)
        run, submit = device._pool.run, device.submit

        def timed_run(num_threads: int) -> None:
            start = time.thread_time()
            run(num_threads)
            self.code_s = time.thread_time() - start

        def timed_submit(batch: StepBatch) -> None:
            start = time.thread_time()
            submit(batch)
            self.submit_s = time.thread_time() - start

        device._pool.run, device.submit = timed_run, timed_submit
        return device  # type: ignore[no-any-return]


class Turn(msgspec.Struct, frozen=True):
    """One turn of the engine: its time, and what of it passed in `submit` and in machine code. Seconds."""

    whole_s: float
    submit_s: float = 0.0
    code_s: float = 0.0


async def measure(
    num_sequences: int,
    make_device: Callable[[Limits], Device],
    vocab_size: int = VOCAB_SIZE,
    sampling: SamplingParams | None = None,
    meter: Meter | None = None,
) -> list[Turn]:
    """Turns in which every sequence decodes one token."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        rig = EngineRig(
            Path(directory),
            seats=num_sequences,
            rows=max(512, num_sequences),
            pages=num_sequences * 40,
            context=CONTEXT,
            slots=num_sequences,
            make_device=make_device,
            vocab_size=vocab_size,
        )
        async with rig.serving():
            clients = [
                rig.submit([number % 900] * 16, CONTEXT - 16, sampling=sampling)
                for number in range(num_sequences)
            ]
            await rig.until(lambda: all(client.tokens for client in clients))
            await rig.turn(WARM_UP_STEPS)
            turns = []
            for _ in range(NUM_STEPS):
                start = time.thread_time()
                rig.engine.step()
                whole_s = time.thread_time() - start
                turns.append(Turn(whole_s, meter.submit_s, meter.code_s) if meter else Turn(whole_s))
                for _ in range(3):
                    await asyncio.sleep(0)
            for client in clients:
                client.task.cancel()
            rig.engine._runner._device.close()
            return turns


def show(name: str, times: list[float], num_sequences: int) -> str:
    """Median and 90th percentile in microseconds."""
    middle, tail = statistics.median(times) * 1e6, statistics.quantiles(times, n=10)[8] * 1e6
    return f"{name} median={middle:6.0f} us p90={tail:6.0f} us, a sequence={middle / num_sequences:6.2f} us"


def main() -> None:
    """Print a line for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sequences", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    for number in arguments.sequences:
        if arguments.model is None:
            turns = asyncio.run(measure(number, IdleDevice))
            print(f"sequences={number:4d}", show("turn", [turn.whole_s for turn in turns], number))
            continue
        meter = Meter(arguments.model)
        for name, sampling in SAMPLINGS.items():
            turns = asyncio.run(measure(number, meter.make, meter.vocab_size, sampling, meter))
            code_ms = statistics.median(turn.code_s for turn in turns) * 1e3
            print(f"sequences={number:4d} {name}: machine code median={code_ms:.2f} ms; the rest:")
            print("   ", show("device", [turn.submit_s - turn.code_s for turn in turns], number))
            print("   ", show("turn  ", [turn.whole_s - turn.code_s for turn in turns], number))


if __name__ == "__main__":
    main()
