"""Tokens per second of the GPU against what its memory allows, and against llama.cpp.

    python -m tests.benchmarks.gpu [--llama-batched-bench PATH] [--json FILE]

One command: writes random models of Llama-3.1-8B's shape (Q4_K_M and Q8_0; kept in --directory for the
next run, else removed), measures the GPU's own copy bandwidth, then for each model decode at 1, 8, 32,
64 and 128 rows with 512 and 2048 tokens of context each, and prefill. For every figure: the bytes that a
step must read (weights once, each row's keys and values) and the share of the copy bandwidth that
makes. With --llama-batched-bench the same shapes are run by llama.cpp on the same file. The device is
driven as the engine drives it, one step ahead; HTTP is measured elsewhere. `--device emulator` runs
the same code on the CPU for a tiny shape, to test this file.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ds4.config import Settings
from ds4.generation import SamplingParams
from ds4.model_file import ModelFile
from tests.support.shaped_model import Mix, ModelShape, write_shaped_model
from workers.devices.cuda import opening
from workers.devices.interface import (
    PAGE_TOKENS,
    PREVIOUS_SAMPLE,
    Device,
    Limits,
    SeatParams,
    StepBatch,
)
from workers.model.registry import load_program

TINY: Final = ModelShape(
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    ffn_size=512,
    vocab_size=512,
    max_context_tokens=256,
)
MIXES: Final[tuple[Mix, ...]] = ("Q4_K_M", "Q8_0")
PREFILL_TOKENS: Final = 2048


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    model: str
    what: str  # decode or prefill
    rows: int
    context: int
    tokens_per_s: float
    step_ms: float
    step_bytes: int  # that must be read, at least
    bandwidth_share: float  # of the measured copy bandwidth; 0 for prefill
    llama_cpp_tokens_per_s: float = 0.0


class Bench:
    """Drives one device with `rows` sequences, one step ahead. Owns the step buffers and the pages."""

    def __init__(self, device: Device, limits: Limits, vocab_size: int) -> None:
        self._device = device
        self._limits = limits
        self._buffers = deque(StepBatch(limits) for _ in range(device.pipeline_depth + 2))
        self._flights: deque[StepBatch] = deque()
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size
        # Each sequence's pages lie scattered, as after an hour of service.
        pages = self._rng.permutation(limits.num_pages).astype(np.int32)
        self._pages = pages[: limits.num_pages // limits.max_seats * limits.max_seats].reshape(
            limits.max_seats, -1
        )

    def _submit(self, batch: StepBatch) -> None:
        self._device.submit(batch)
        self._flights.append(batch)
        if len(self._flights) > self._device.pipeline_depth:
            self._collect()

    def _collect(self) -> None:
        result = self._device.collect()
        assert result.ok[: result.num_samples].all(), "the model produced values that are not numbers"
        self._buffers.append(self._flights.popleft())

    def _drain(self) -> None:
        while self._flights:
            self._collect()

    def prefill(self, seat: int, num_tokens: int) -> float:
        """Seconds for one prompt on a fresh seat."""
        self._device.seat(
            seat,
            SeatParams(
                sampling=SamplingParams(temperature=0.0), history=np.zeros(0, np.uint32), num_prompt_tokens=0
            ),
        )
        tokens = self._rng.integers(0, self._vocab_size, num_tokens).astype(np.int32)
        started = time.perf_counter()
        for first in range(0, num_tokens, self._limits.max_rows):
            count = min(self._limits.max_rows, num_tokens - first)
            batch = self._buffers.popleft()
            batch.num_rows, batch.num_sequences = count, 1
            batch.token_ids[:count] = tokens[first : first + count]
            batch.positions[:count] = np.arange(first, first + count)
            batch.sequence_seats[0] = batch.sample_seats[0] = seat
            batch.sequence_starts[:2] = 0, count
            self._set_pages(batch, 0, seat, first + count)
            batch.num_samples = int(first + count == num_tokens)
            batch.sample_rows[0] = count - 1
            self._submit(batch)
        self._drain()
        return time.perf_counter() - started

    def decode(self, rows: int, context: int, num_steps: int) -> float:
        """Seconds for `num_steps` steps of `rows` sequences that hold `context` tokens each."""
        started = 0.0
        warm_up = 3
        for step in range(-warm_up, num_steps):
            if step == 0:
                self._drain()
                started = time.perf_counter()
            batch = self._buffers.popleft()
            batch.num_rows = batch.num_sequences = batch.num_samples = rows
            batch.token_ids[:rows] = PREVIOUS_SAMPLE
            position = context + warm_up + step
            batch.positions[:rows] = position
            batch.sequence_seats[:rows] = batch.sample_seats[:rows] = np.arange(rows)
            batch.sequence_starts[: rows + 1] = np.arange(rows + 1)
            batch.sample_rows[:rows] = np.arange(rows)
            for seat in range(rows):
                self._set_pages(batch, seat, seat, position + 1)
            self._submit(batch)
        self._drain()
        return time.perf_counter() - started

    def _set_pages(self, batch: StepBatch, index: int, seat: int, num_tokens: int) -> None:
        count = -(-num_tokens // PAGE_TOKENS)
        batch.page_tables[index, :count] = self._pages[seat, :count]


def open_device(
    path: Path, kind: str, rows: int, context: int, step_tokens: int, *, batch_invariant: bool
) -> tuple[Device, Limits]:
    """The device under test, sized for the largest run."""
    settings = Settings(
        device="cuda",
        batch_invariant=batch_invariant,
        batched_sessions=rows,
        ctx=context,
        kv_cache_tokens=rows * -(-context // PAGE_TOKENS) * PAGE_TOKENS,
        max_batch_tokens=step_tokens,
    )
    backend = opening.open_gpu() if kind == "cuda" else _emulator()
    model = ModelFile.open(path)
    return opening.load(settings, model, load_program(model), backend)


def _emulator() -> Any:
    from workers.devices.emulator.backend import EmulatorBackend

    return EmulatorBackend()


def copy_bandwidth(kind: str) -> float:
    """Bytes per second that a copy within device memory reads and writes together."""
    if kind != "cuda":
        return 1e9  # a placeholder: the emulator's speed says nothing
    import cupy

    source = cupy.zeros(1 << 30, cupy.uint8)
    target = cupy.empty_like(source)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    repeats = 20
    for index in range(repeats + 3):
        if index == 3:
            start.record()
        target[...] = source
    end.record()
    end.synchronize()
    seconds = cupy.cuda.get_elapsed_time(start, end) / 1e3
    return float(2 * source.nbytes * repeats / seconds)


def weight_bytes(model: ModelFile) -> int:
    """What one step reads of the weights: all but the embedding table, of which it reads a few rows."""
    return sum(
        tensor.num_bytes
        for name, tensor in model.tensors.items()
        if name != "token_embd.weight" or "output.weight" not in model.tensors
    )


def measure(
    path: Path,
    *,
    mix: str,
    shape: ModelShape,
    kind: str,
    rows: Sequence[int],
    contexts: Sequence[int],
    steps: int,
    batch_invariant: bool = False,
) -> Iterator[Row]:
    """All figures of one model."""
    bandwidth = copy_bandwidth(kind)
    model = ModelFile.open(path)
    weights = weight_bytes(model)
    longest = max(contexts) + steps + PAGE_TOKENS
    prompt = min(PREFILL_TOKENS, max(contexts))
    device, limits = open_device(path, kind, max(rows), longest, prompt, batch_invariant=batch_invariant)
    kv_bytes = 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_size  # of one token
    try:
        bench = Bench(device, limits, shape.vocab_size)
        bench.prefill(0, prompt)  # compiles and warms up
        seconds = min(bench.prefill(0, prompt) for _ in range(3))
        yield Row(
            model=mix,
            what="prefill",
            rows=1,
            context=prompt,
            tokens_per_s=prompt / seconds,
            step_ms=seconds * 1e3,
            step_bytes=weights,
            bandwidth_share=0.0,
        )
        for context in contexts:
            for seat in range(max(rows)):
                bench.prefill(seat, context)
            for count in rows:
                seconds = bench.decode(count, context, steps)
                read = weights + count * (context + steps // 2) * kv_bytes
                yield Row(
                    model=mix,
                    what="decode",
                    rows=count,
                    context=context,
                    tokens_per_s=count * steps / seconds,
                    step_ms=seconds / steps * 1e3,
                    step_bytes=read,
                    bandwidth_share=read * steps / seconds / bandwidth,
                )
    finally:
        device.close()


def llama_cpp(
    program: Path, path: Path, rows: Sequence[int], contexts: Sequence[int], steps: int
) -> dict[tuple[int, int], dict[str, float]]:
    """What `llama-batched-bench` says of the same file, by (rows, context)."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    size = max(rows) * (max(contexts) + steps)
    done = subprocess.run(
        [
            str(program), "-m", str(path), "-c", str(size), "-b", "2048", "-ub", "2048", "-ngl", "99", "-fa", "on",
            "-npp", ",".join(map(str, contexts)), "-ntg", str(steps), "-npl", ",".join(map(str, rows)),
            "--output-format", "jsonl",
        ],
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            found[int(entry["pl"]), int(entry["pp"])] = {
                "decode": float(entry["speed_tg"]),
                "prefill": float(entry["speed_pp"]),
            }
    return found


def _report(rows: Sequence[Row], bandwidth: float) -> None:
    print(f"\ncopy bandwidth {bandwidth / 1e9:.0f} GB/s")
    print("| model | | rows | context | tokens/s | step ms | GB read | of copy rate | llama.cpp tokens/s |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        share = f"{row.bandwidth_share:.0%}" if row.bandwidth_share else ""
        peer = f"{row.llama_cpp_tokens_per_s:.0f}" if row.llama_cpp_tokens_per_s else ""
        print(
            f"| {row.model} | {row.what} | {row.rows} | {row.context} | {row.tokens_per_s:.0f} | "
            f"{row.step_ms:.2f} | {row.step_bytes / 1e9:.2f} | {share} | {peer} |"
        )


def run(arguments: argparse.Namespace, directory: Path) -> list[Row]:
    shape = TINY if arguments.tiny else ModelShape()
    report: list[Row] = []
    for mix in arguments.mixes:
        path = directory / f"{'tiny' if arguments.tiny else 'llama-3.1-8b'}-{mix}.gguf"
        if not path.exists():
            print(f"writing {path}", file=sys.stderr)
            write_shaped_model(path.with_suffix(".part"), shape=shape, mix=mix)
            path.with_suffix(".part").rename(path)
        peer = {}
        if arguments.llama_batched_bench:
            peer = llama_cpp(
                arguments.llama_batched_bench,
                path,
                arguments.rows,
                arguments.contexts,
                arguments.steps,
            )
        for row in measure(
            path,
            mix=mix,
            shape=shape,
            kind=arguments.device,
            rows=arguments.rows,
            contexts=arguments.contexts,
            steps=arguments.steps,
            batch_invariant=arguments.batch_invariant,
        ):
            speed = peer.get((row.rows, row.context), {}).get(row.what, 0.0)
            row = msgspec.structs.replace(row, llama_cpp_tokens_per_s=speed)
            report.append(row)
            print(row, file=sys.stderr)
    return report


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu")
    parser.add_argument("--device", choices=("cuda", "emulator"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to test this program")
    parser.add_argument("--mixes", type=lambda text: text.split(","), default=list(MIXES))
    parser.add_argument("--rows", type=_numbers, default=[1, 8, 32, 64, 128])
    parser.add_argument("--contexts", type=_numbers, default=[512, 2048])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--directory", type=Path, help="where the models are kept (14 GB for both)")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="only kernels that --batch-invariant allows"
    )
    parser.add_argument("--llama-batched-bench", type=Path)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        report = run(arguments, arguments.directory or Path(temporary))
    _report(report, copy_bandwidth(arguments.device))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
