"""Milliseconds to sample one batch on the host: python -m tests.benchmarks.sampling"""

import time
from collections.abc import Callable

import numpy as np

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


def milliseconds(call: Callable[[], None], repeats: int = 41) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2] * 1e3


def main() -> None:
    rng = np.random.default_rng(0)
    print(f"vocab {VOCAB_SIZE}, median ms per batch; logits: normal * 3, with a peaked head as a model has")
    print(f"{'case':34s}" + "".join(f"{'B=' + str(n):>10s}" for n in (1, 8, 32)))
    for name, params in CASES.items():
        line = f"{name:34s}"
        for num_rows in (1, 8, 32):
            logits = (rng.standard_normal((num_rows, VOCAB_SIZE)) * 3).astype(np.float32)
            logits[:, :50] += np.linspace(12, 2, 50, dtype=np.float32)
            sampler, result = HostSampler(num_rows, VOCAB_SIZE), StepResult(num_rows)
            history = rng.integers(0, VOCAB_SIZE, 500).astype(np.uint32)
            for seat in range(num_rows):
                sampler.seat(seat, SeatParams(sampling=params, history=history, num_prompt_tokens=400))
            seats = np.arange(num_rows, dtype=np.int32)
            positions = np.full(num_rows, 500, np.int32)

            def step(
                sampler: HostSampler = sampler,
                logits: np.ndarray[tuple[int, int], np.dtype[np.float32]] = logits,
                seats: np.ndarray[tuple[int], np.dtype[np.int32]] = seats,
                positions: np.ndarray[tuple[int], np.dtype[np.int32]] = positions,
                result: StepResult = result,
            ) -> None:
                sampler.sample(logits, seats, positions, result)
                positions[:] += 1

            line += f"{milliseconds(step):10.3f}"
        print(line)


if __name__ == "__main__":
    main()
