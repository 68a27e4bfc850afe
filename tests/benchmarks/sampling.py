"""Milliseconds to sample one batch on the host: `python -m tests.benchmarks.sampling`.

Logits follow a power law of the rank, with an exponent per row between a flat continuation and a
nearly certain one; each step has fresh positions, so that draws end at every depth of the search.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ds4.generation import SamplingParams
from workers.sampling.interface import SeatParams, StepResult
from workers.sampling.sampler import HostSampler

VOCAB_SIZE = 49152
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "top-k 40, top-p 0.95, min-p 0.05": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "plain temperature": SamplingParams(temperature=1.0),
    "top-k 40, all penalties": SamplingParams(
        top_k=40, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1
    ),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, num_logprobs=5),
}


def milliseconds(call: Callable[[], None], repeats: int = 60) -> float:
    """Mean without the slowest tenth, which is the machine's noise."""
    call()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    kept = sorted(times)[: repeats - repeats // 10]
    return sum(kept) / len(kept) * 1e3


def power_law_logits(rng: np.random.Generator, num_rows: int) -> NDArray[np.float32]:
    rank = rng.permuted(np.tile(np.arange(1.0, VOCAB_SIZE + 1), (num_rows, 1)), axis=1)
    exponents = rng.uniform(1.3, 3.0, (num_rows, 1)) if num_rows > 1 else np.array([[1.8]])
    logits: NDArray[np.float32] = (-exponents * np.log(rank)).astype(np.float32)
    return logits


def main() -> None:
    rng = np.random.default_rng(0)
    print(f"vocab {VOCAB_SIZE}, mean ms of this thread per batch (it uses no other)")
    print(f"{'case':34s}" + "".join(f"{'B=' + str(n):>10s}" for n in (1, 8, 32)))
    for name, params in CASES.items():
        line = f"{name:34s}"
        for num_rows in (1, 8, 32):
            logits = power_law_logits(rng, num_rows)
            sampler, result = HostSampler(num_rows, VOCAB_SIZE), StepResult(num_rows)
            history = rng.integers(0, VOCAB_SIZE, 500).astype(np.uint32)
            for seat in range(num_rows):
                sampler.seat(seat, SeatParams(sampling=params, history=history, num_prompt_tokens=400))
            seats = np.arange(num_rows, dtype=np.int32)
            positions = np.full(num_rows, 500, np.int32)

            def step(
                sampler: HostSampler = sampler,
                logits: NDArray[np.float32] = logits,
                seats: NDArray[np.int32] = seats,
                positions: NDArray[np.int32] = positions,
                result: StepResult = result,
            ) -> None:
                sampler.sample(logits, seats, positions, result)
                positions[:] += 1

            line += f"{milliseconds(step):10.3f}"
        print(line)


if __name__ == "__main__":
    main()
