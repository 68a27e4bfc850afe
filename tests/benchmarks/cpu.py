"""The CPU engine beside llama.cpp's: the same file, threads and shape, in turns, medians.

python -m tests.benchmarks.cpu MODEL.gguf --peer DIRECTORY_OF_BINARIES [--rounds 5] [--busy] [--context 900]

The peer is a llama.cpp built for this machine (its llama-batched-bench and llama-quantize). A model
that is not Q4_0 is measured a second time as Q4_0, widened and requantised by the peer's own tool:
Q4_0 is the peer's fast path on most machines, Q4_1 its slow one, so one without the other says little.
Each round runs every case once, each in a process of its own. `--busy` keeps one foreign process busy.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from ds4.generation import SamplingParams
from ds4.model_file import GgmlType, ModelFile
from tests.vectors.make_greedy import widen
from workers.devices.cpu.device import CpuDevice
from workers.devices.cpu.pool import physical_cores
from workers.devices.cpu.target import host_target
from workers.devices.interface import PAGE_TOKENS, Limits, SeatParams, StepBatch
from workers.model.registry import load_program

PREFILL_TOKENS = 512
STEP_TOKENS = 512
# Ratios that the engine shall reach, by the file's type: prefill, then rows. They were set against a peer
# without tile registers (AMX), which the peer has for prefill of these types.
TARGETS = {
    "Q4_1": {"prefill": 7.0, "1": 2.5, "8": 6.0, "32": 5.0, "64": 5.0},
    "Q4_0": {"prefill": 2.3, "1": 2.0, "8": 3.0, "32": 2.3, "64": 2.3},
}
Figures = dict[str, float]  # tokens a second: "prefill", and decoding by number of rows


class Shape(msgspec.Struct, frozen=True):
    """What is measured: rows decoded together, each after a prompt of `prompt` tokens."""

    rows: list[int]
    prompt: int
    generated: int
    threads: int


class _Bench:
    """Our device, driven the way llama-batched-bench drives its own."""

    def __init__(self, model: Path, shape: Shape) -> None:
        self._shape = shape
        tokens = max(PREFILL_TOKENS, shape.prompt + shape.generated)
        pages, seats = -(-tokens // PAGE_TOKENS), max(shape.rows)
        self._limits = Limits(
            max_rows=max(STEP_TOKENS, seats),
            max_seats=seats,
            max_context_tokens=pages * PAGE_TOKENS,
            num_pages=seats * pages,
        )
        self._device = CpuDevice(load_program(ModelFile.open(model)), self._limits, shape.threads)
        self._batch = StepBatch(self._limits)
        self._batch.page_tables[:] = np.arange(seats * pages).reshape(seats, pages)
        self._rng = np.random.default_rng(0)
        for seat in range(seats):
            params = SeatParams(
                sampling=SamplingParams(temperature=0.0), history=np.zeros(0, np.uint32), num_prompt_tokens=0
            )
            self._device.seat(seat, params)
        self._tables = self._batch.page_tables.copy()

    def measure(self) -> Figures:
        self._prompt(0, PREFILL_TOKENS)  # warm
        figures = {"prefill": PREFILL_TOKENS / median(self._timed_prompt() for _ in range(3))}
        for rows in self._shape.rows:
            for seat in range(rows):
                self._prompt(seat, self._shape.prompt)
            self._decode(rows, self._shape.prompt)
            started = time.perf_counter()
            for step in range(self._shape.generated):
                self._decode(rows, self._shape.prompt + step)
            figures[str(rows)] = rows * self._shape.generated / (time.perf_counter() - started)
        self._device.close()
        return figures

    def _timed_prompt(self) -> float:
        started = time.perf_counter()
        self._prompt(0, PREFILL_TOKENS)
        return time.perf_counter() - started

    def _prompt(self, seat: int, length: int) -> None:
        batch = self._batch
        for first in range(0, length, STEP_TOKENS):
            count = min(STEP_TOKENS, length - first)
            batch.token_ids[:count] = self._rng.integers(100, 40_000, count)
            batch.positions[:count] = np.arange(first, first + count)
            batch.num_rows, batch.num_sequences, batch.num_samples = count, 1, 1
            batch.sequence_seats[0] = batch.sample_seats[0] = seat
            batch.sequence_starts[:2] = 0, count
            batch.sample_rows[0] = count - 1
            batch.page_tables[0] = self._tables[seat]
            self._device.submit(batch)
            self._device.collect()
        batch.page_tables[0] = self._tables[0]

    def _decode(self, rows: int, position: int) -> None:
        batch = self._batch
        batch.token_ids[:rows] = -1
        batch.positions[:rows] = position
        batch.num_rows = batch.num_sequences = batch.num_samples = rows
        batch.sequence_seats[:rows] = batch.sample_seats[:rows] = batch.sample_rows[:rows] = np.arange(rows)
        batch.sequence_starts[: rows + 1] = np.arange(rows + 1)
        self._device.submit(batch)
        self._device.collect()


def ours(model: Path, shape: Shape) -> Figures:
    """Our figures, from a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.cpu", str(model), "--only-ours"]
    command += ["--rows", ",".join(map(str, shape.rows)), "--threads", str(shape.threads)]
    command += ["--context", str(shape.prompt), "--generated", str(shape.generated)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _batched_bench(
    peer: Path, model: Path, prompt: int, generated: int, rows: int, threads: int
) -> tuple[list[str], set[str]]:
    """The cells of its one line, and the buffers that it keeps weights in: "AMX" where it uses tiles."""
    context = rows * (prompt + generated) + 64
    command = [str(peer / "llama-batched-bench"), "-m", str(model), "-c", str(context), "-b", "2048"]
    command += ["-ub", str(STEP_TOKENS), "-npp", str(prompt), "-ntg", str(generated), "-npl", str(rows)]
    command += ["-t", str(threads), "-tb", str(threads), "-lv", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    output = done.stdout + done.stderr
    (line,) = re.findall(rf"^\|\s+{prompt} \|.*", output, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")[1:-1]], set(
        re.findall(r"(\w+) model buffer size", output)
    )


def peers(peer: Path, model: Path, shape: Shape) -> tuple[Figures, set[str]]:
    """The peer's figures and buffers; a row of its table is PP TG B N_KV T_PP S_PP T_TG S_TG T S."""
    cells, buffers = _batched_bench(peer, model, PREFILL_TOKENS, 1, 1, shape.threads)
    figures = {"prefill": float(cells[5])}
    for rows in shape.rows:
        cells, _ = _batched_bench(peer, model, shape.prompt, shape.generated, rows, shape.threads)
        figures[str(rows)] = float(cells[7])
    return figures, buffers


def requantised(peer: Path, model: Path, directory: Path) -> Path:
    """The model as pure Q4_0, made from its float32 form by the peer's own tool."""
    wide, narrow = directory / "f32.gguf", directory / "q4_0.gguf"
    widen(model, wide)
    command = [str(peer / "llama-quantize"), "--pure", str(wide), str(narrow), "Q4_0"]
    subprocess.run(command, capture_output=True, check=True)
    wide.unlink()
    return narrow


def type_of(model: Path) -> str:
    """The GGML type of most of the weights."""
    tensors = ModelFile.open(model).tensors.values()
    types = [tensor.ggml_type for tensor in tensors if len(tensor.shape) == 2]
    return GgmlType(max(set(types), key=types.count)).name


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """One process that does nothing but compute."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def report(name: str, peer: list[Figures], own: list[Figures], show_targets: bool) -> None:
    """One table: medians and the ratio of medians; the best of all rounds in brackets."""
    keys = list(own[0])
    print(f"\n{name}: tokens/s, median [best] of {len(own)} rounds")
    print(
        "           " + "".join(f"{'prefill 512' if key == 'prefill' else key + ' rows':>16}" for key in keys)
    )
    for label, rounds in (("llama.cpp", peer), ("ds4", own)):
        cells = [(median(r[key] for r in rounds), max(r[key] for r in rounds)) for key in keys]
        print(f"{label:<11}" + "".join(f"{f'{middle:.0f} [{best:.0f}]':>16}" for middle, best in cells))
    ratios = [median(r[key] for r in own) / median(r[key] for r in peer) for key in keys]
    print(f"{'ratio':<11}" + "".join(f"{ratio:>16.2f}" for ratio in ratios))
    targets = TARGETS.get(name, {})
    if show_targets and targets:
        print(f"{'target':<11}" + "".join(f"{targets.get(key, float('nan')):>16.1f}" for key in keys))


def main() -> int:
    """Print one table for each file."""
    parser = argparse.ArgumentParser(description="benchmark of the CPU engine beside llama.cpp")
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, help="directory of llama-batched-bench and llama-quantize")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--context", type=int, default=128, help="tokens before the decoded ones")
    parser.add_argument("--generated", type=int, default=32)
    parser.add_argument("--busy", action="store_true", help="keep one foreign process busy meanwhile")
    parser.add_argument("--only-ours", action="store_true", help="one round of ours as JSON")
    arguments = parser.parse_args()
    rows = [int(number) for number in arguments.rows.split(",")]
    shape = Shape(rows, arguments.context, arguments.generated, arguments.threads)
    if arguments.only_ours:
        print(json.dumps(_Bench(arguments.model, shape).measure()))
        return 0
    if arguments.peer is None:
        parser.error("--peer is needed")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    target = host_target()
    print(
        f"{target.cpu}, {os.cpu_count()} cpus, {target.isa.value}, load {load}, {shape.threads} threads each"
    )
    print(f"Python {platform.python_version()}; {shape.prompt} tokens before {shape.generated} generated")
    with ExitStack() as stack:
        models = {type_of(arguments.model): arguments.model}
        if "Q4_0" not in models:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            models["Q4_0"] = requantised(arguments.peer, arguments.model, directory)
        if arguments.busy:
            stack.enter_context(busy_neighbour())
            print("contended: one foreign process is busy")
        found: dict[str, tuple[list[Figures], list[Figures]]] = {name: ([], []) for name in models}
        buffers: dict[str, set[str]] = {}
        for number in range(arguments.rounds):
            for name, model in models.items():
                figures, buffers[name] = peers(arguments.peer, model, shape)
                found[name][0].append(figures)
                found[name][1].append(ours(model, shape))
            latest = {
                name: rounds[1][-1]["prefill"] / rounds[0][-1]["prefill"] for name, rounds in found.items()
            }
            shown = ", ".join(f"{name} prefill ratio {ratio:.2f}" for name, ratio in latest.items())
            print(f"round {number + 1}: load {os.getloadavg()[0]:.1f}, {shown}", file=sys.stderr)
    plain = arguments.context == 128 and not arguments.busy
    for name, (peer, own) in found.items():
        print(f"\nllama.cpp keeps {name} weights in: {', '.join(sorted(buffers[name]))}")
        report(name, peer, own, show_targets=plain)
    return 0


if __name__ == "__main__":
    sys.exit(main())
