"""What structured output costs a step: masks, their application, and the whole step with and without.

Runs by hand: `python -m tests.benchmarks.grammar MODEL.gguf`. Documents are random walks under a schema of
an ordinary size, which is harder for the masks than what a model writes: half of the time is spent in
strings of random words. `--forced` shows instead what it saves that forced tokens take no steps of their
own, on the CPU device with a schema of long names.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ds4.config import Settings
from ds4.generation import SamplingParams
from ds4.grammar_library import GrammarVocabulary
from ds4.model_file import ModelFile
from ds4.text.grammar import grammar_of, json_source
from ds4.text.tokenizer import Tokenizer
from tests.support.engine_rig import EngineRig
from workers.devices.registry import open_device
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


LONG_NAMES: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99999},
        "shipping_destination_country": {"enum": ["Germany", "France", "Portugal"]},
        "requested_delivery_window_start": {"type": "string", "format": "date"},
        "requested_delivery_window_end": {"type": "string", "format": "date"},
        "is_express_delivery_requested": {"type": "boolean"},
        "preferred_communication_channel": {"enum": ["electronic mail", "telephone"]},
    },
    "additionalProperties": False,
}
LONG_NAMES["required"] = list(LONG_NAMES["properties"])


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


async def forced(file: ModelFile, path: Path, rows: int, repetitions: int = 3) -> None:
    """`rows` documents at once through the engine, with and without taking forced tokens undrawn."""
    settings = Settings(model=str(path), batched_sessions=rows, device="cpu", ctx=1024)
    device, limits = open_device(settings, file)
    try:
        with tempfile.TemporaryDirectory() as directory:
            rig = EngineRig(
                Path(directory),
                seats=limits.max_seats,
                rows=limits.max_rows,
                pages=limits.num_pages,
                context=limits.max_context_tokens,
                slots=rows,
                make_device=lambda _: device,
                vocab_size=file.vocab_size,
                grammars=Grammars(GrammarVocabulary.of_model(file)),
            )
            async with rig.serving():
                await _compare(rig, file, rows, repetitions)
    finally:
        device.close()


async def _compare(rig: EngineRig, file: ModelFile, rows: int, repetitions: int) -> None:
    tokenizer = Tokenizer.from_model(file)
    prompt = tokenizer.encode("Order of a customer, as JSON:\n", add_special=True, parse_special=False)
    rates: dict[bool, list[float]] = {False: [], True: []}
    outputs, steps = {}, {}
    for _ in range(1 + repetitions):  # the first warms up
        for skips in (False, True):
            rig.engine._compiling._fast_forwards = skips
            before, _ = rig.metrics.samples("ds4_step_time_seconds")
            started = time.perf_counter()
            clients = [
                rig.submit(
                    prompt,
                    400,
                    grammar=grammar_of(json_source(LONG_NAMES)),
                    stop_token_ids=tuple(tokenizer.end_ids),
                    sampling=SamplingParams(temperature=1.0, min_p=0.05, seed=row),
                )
                for row in range(rows)
            ]
            await rig.finish(*clients)
            outputs[skips] = [client.tokens for client in clients]
            rates[skips].append(sum(map(len, outputs[skips])) / (time.perf_counter() - started))
            steps[skips] = rig.metrics.samples("ds4_step_time_seconds")[0] - before
    assert outputs[False] == outputs[True]
    drawn, skipped = (float(np.median(rates[skips][1:])) for skips in (False, True))
    print(
        f"forced  rows={rows:2}  tokens/document {np.mean([len(each) for each in outputs[True]]):.0f}  "
        f"steps {steps[False]} -> {steps[True]}  tokens/s {drawn:.0f} -> {skipped:.0f} ({skipped / drawn:.2f}x)"
    )


def main() -> None:
    """Print the figures for one model's vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--step-ms", type=float, default=5.0, help="time of the device's part of a step")
    parser.add_argument("--forced", action="store_true", help="what skipping draws saves, instead")
    options = parser.parse_args()
    file = ModelFile.open(options.model)
    if options.forced:
        for rows in (1, 8):
            asyncio.run(forced(file, options.model, rows))
        return
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
