"""What structured output costs a step: masks, their application, and the whole step with and without.

Runs by hand: `python -m tests.benchmarks.grammar MODEL.gguf [--step]`. Documents are random walks under
a schema of an ordinary size, which is harder for the masks than what a model writes: half of the time
is spent in strings of random words.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ds4.generation import SamplingParams
from ds4.grammar_library import GrammarVocabulary
from ds4.model_file import ModelFile
from ds4.text.grammar import grammar_of, json_source
from workers.sampling.grammar import Grammars
from workers.sampling.interface import SeatParams, StepResult
from workers.sampling.masks import SeatMasks
from workers.sampling.sampler import HostSampler

STEPS: Final = 200
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer"},
        "rating": {"type": "number"},
        "genre": {"enum": ["drama", "comedy", "thriller", "documentary"]},
        "cast": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "role": {"type": "string"}},
                "required": ["name", "role"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "year", "rating", "genre", "cast"],
    "additionalProperties": False,
}


def percentiles(seconds: list[float]) -> str:
    """Mean, median and 99th percentile in milliseconds."""
    values = np.array(seconds) * 1e3
    return (
        f"mean {values.mean():7.3f}  median {np.median(values):7.3f}  p99 {np.percentile(values, 99):7.3f} ms"
    )


def masks(grammars: Grammars, vocab_size: int, rows: int, text: Callable[[int], list[int]]) -> None:
    """Masks alone: what the background thread does each step, and what is left to the sampler."""
    grammar = grammar_of(json_source(SCHEMA))
    seats = SeatMasks(rows, vocab_size)
    scripts = [text(row) for row in range(rows)]
    for row in range(rows):
        seats.seat(row, grammars.constraint(grammar))
    seats.wait()
    computed, applied = [], []
    logits = np.zeros(vocab_size, np.float32)
    for step in range(min(STEPS, min(map(len, scripts)))):
        started = time.perf_counter()
        seats.accept([(row, scripts[row][step]) for row in range(rows)])
        seats.wait()
        computed.append(time.perf_counter() - started)
        started = time.perf_counter()
        for row in range(rows):
            seats.apply(row, logits)
        applied.append(time.perf_counter() - started)
    print(f"masks   rows={rows:2}  computed: {percentiles(computed)}")
    print(f"        rows={rows:2}   applied: {percentiles(applied)}")


def sampler(grammars: Grammars, vocab_size: int, rows: int, constrained: int, work_s: float) -> None:
    """The sampler with `constrained` of `rows` rows, after a device step of `work_s` that leaves a core."""
    grammar = grammar_of(json_source(SCHEMA))
    host, result = HostSampler(rows, vocab_size), StepResult(rows)
    random = np.random.default_rng(1)
    logits = [random.standard_normal((rows, vocab_size)).astype(np.float32) * 4 for _ in range(4)]

    def seat(row: int) -> None:
        host.seat(
            row,
            SeatParams(
                sampling=SamplingParams(seed=row, min_p=0.05),
                history=np.zeros(0, np.uint32),
                num_prompt_tokens=0,
                constraint=grammars.constraint(grammar) if row < constrained else None,
            ),
        )

    for row in range(rows):
        seat(row)
    index = np.arange(rows, dtype=np.int32)
    seconds = []
    for step in range(STEPS):
        time.sleep(work_s)
        started = time.perf_counter()
        host.sample(logits[step % 4], index, np.full(rows, step, np.int32), result)
        seconds.append(time.perf_counter() - started)
        for row in range(constrained):
            if not result.ok[row] or result.token_ids[row] in grammars.end_ids:
                seat(row)
    print(f"sampler rows={rows:2} constrained={constrained:2}  {percentiles(seconds)}")


def main() -> None:
    """Print the figures for one model's vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--step-ms", type=float, default=5.0, help="time of the device's part of a step")
    options = parser.parse_args()
    file = ModelFile.open(options.model)
    started = time.perf_counter()
    grammars = Grammars(GrammarVocabulary.of_model(file))
    print(f"vocabulary of {file.vocab_size}: {1e3 * (time.perf_counter() - started):.0f} ms")
    grammar = grammar_of(json_source(SCHEMA))
    for _ in range(2):
        started = time.perf_counter()
        grammars.constraint(grammar)
        print(f"compile: {1e3 * (time.perf_counter() - started):.2f} ms")

    def walk(seed: int) -> list[int]:
        random = np.random.default_rng(seed)
        output: list[int] = []
        matcher = grammars.constraint(grammar).matcher
        while len(output) < STEPS:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            token_id = int(random.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little"))))
            if token_id in grammars.end_ids:
                break
            output.append(token_id)
            matcher.consume_token(token_id)
        return output

    for rows in (1, 8, 32):
        masks(grammars, file.vocab_size, rows, walk)
    for constrained in (0, 1, 8, 32):
        sampler(grammars, file.vocab_size, 32, constrained, options.step_ms / 1e3)


if __name__ == "__main__":
    main()
