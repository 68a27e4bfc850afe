"""The GPU: whether it computes what it should, then its tokens per second against its memory and llama.cpp.

    python -m tests.benchmarks.gpu [--llama-batched-bench PATH] [--json FILE]

One command: says which GPU, driver and CuPy there are; runs tests/gpu with a GPU promised (--skip-tests: not); writes
random models of Llama-3.1-8B's shape (Q4_K_M and Q8_0; kept in --directory for the next run, else removed); measures
the GPU's own copy bandwidth; then for each model decode at 1, 8, 32, 64 and 128 rows with 512 and 2048 tokens of
context each, and prefill. What does not fit the GPU's memory is left out and named. For every figure: the bytes
that a step must read (weights once, each row's keys and values) and the share of the copy bandwidth that
makes, beside the goal. With --llama-batched-bench the same shapes are run by llama.cpp on the same file. A model that
fails is named among what is left out; the others and the report go on. The device is driven as the engine drives it,
one step ahead; HTTP is measured elsewhere. `--device emulator --tiny` runs the same code on the CPU, to test this file.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ds4.config import Settings
from ds4.errors import ConfigError, Ds4Error
from ds4.model_file import ModelFile
from tests.benchmarks.gpu_steps import WARM_UP, Bench
from tests.support.shaped_model import Mix, ModelShape, write_shaped_model
from workers.devices.cuda import opening
from workers.devices.cuda.backend import Backend
from workers.devices.cuda.driver import probe
from workers.devices.interface import (
    PAGE_TOKENS,
    Device,
    Limits,
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
ROOT: Final = Path(__file__).parents[2]
# Of the copy bandwidth, at so many rows: what this engine is meant to reach.
GOALS: Final = {1: 0.45, 8: 0.7, 32: 0.7}


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
    goal: float = 0.0  # of bandwidth_share; 0: none
    llama_cpp_tokens_per_s: float = 0.0


class Report(msgspec.Struct, kw_only=True):
    """All that a run found, as --json writes it."""

    machine: dict[str, str]
    tests: str  # the last line of tests/gpu; empty: not run
    copy_bytes_per_s: float = 0.0
    left_out: list[str] = []
    rows: list[Row] = []


def open_device(
    path: Path,
    backend: Backend,
    *,
    rows: int,
    context: int,
    cache_tokens: int,
    step_tokens: int,
    batch_invariant: bool,
) -> tuple[Device, Limits]:
    """The device under test, sized for the largest run."""
    settings = Settings(
        device="cuda",
        batch_invariant=batch_invariant,
        batched_sessions=rows,
        ctx=context,
        kv_cache_tokens=cache_tokens,
        max_batch_tokens=step_tokens,
    )
    model = ModelFile.open(path)
    return opening.load(settings, model, load_program(model), backend)


def open_backend(kind: str) -> Backend:
    """The GPU. Raises ConfigError saying what is missing."""
    if kind == "cuda":
        return opening.open_gpu()
    from workers.devices.emulator.backend import EmulatorBackend

    return EmulatorBackend()


def describe(kind: str) -> dict[str, str]:
    """What is measured. Raises ConfigError where there is no GPU to use."""
    found = {"device": kind, "python": sys.version.split()[0], "numpy": np.__version__}
    if kind != "cuda":
        return found
    backend, driver = open_backend(kind), probe()
    import cupy

    runtime, device = cupy.cuda.runtime, cupy.cuda.runtime.getDevice()
    properties = runtime.getDeviceProperties(device)
    found |= {
        "gpu": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": str(properties["multiProcessorCount"]),
        "memory_mib": str(backend.memory_info()[1] >> 20),
        "l2_mib": str(properties["l2CacheSize"] >> 20),
        "driver_cuda": driver.cuda,
        "runtime_cuda": str(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "cublas": str(backend.can_multiply),
    }
    backend.close()
    return found


def run_tests() -> str:
    """The last line of tests/gpu. Raises SystemExit where one fails: figures of wrong results mean nothing."""
    environment = {**os.environ, "DS4_TEST_GPU": "1"}  # noqa: TID251 - a promise to the tests
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit("tests/gpu fails: nothing is measured (--skip-tests measures all the same)")
    return done.stdout.strip().splitlines()[-1]


def copy_bandwidth(kind: str) -> float:
    """Bytes per second that a copy within device memory reads and writes together."""
    if kind != "cuda":
        return 1e9  # a placeholder: the emulator's speed says nothing
    import cupy

    cupy.cuda.Device().synchronize()
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
    moved = 2 * source.nbytes * repeats
    del source, target
    cupy.get_default_memory_pool().free_all_blocks()
    return float(moved / seconds)


def weight_bytes(model: ModelFile) -> int:
    """What one step reads of the weights: all but the embedding table, of which it reads a few rows."""
    return sum(
        tensor.num_bytes
        for name, tensor in model.tensors.items()
        if name != "token_embd.weight" or "output.weight" not in model.tensors
    )


def cache_tokens(rows: int, context: int, steps: int) -> int:
    """Tokens of KV cache that a measurement holds."""
    return rows * -(-(context + steps + WARM_UP + 1) // PAGE_TOKENS) * PAGE_TOKENS


def token_bytes(shape: ModelShape) -> int:
    """Keys and values of one token."""
    return 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_size


def max_cache_tokens(path: Path, backend: Backend, shape: ModelShape) -> int:
    """For how much KV cache there is room beside the model, with some to spare for buffers."""
    spare = (1 << 30) if shape.num_layers > TINY.num_layers else 0
    # Packed weights are a little larger than the file's.
    free = 0.85 * backend.memory_info()[0] - 1.1 * weight_bytes(ModelFile.open(path)) - spare
    return max(0, int(free)) // token_bytes(shape)


def fitting(
    rows: Sequence[int], contexts: Sequence[int], steps: int, max_tokens: int
) -> tuple[list[tuple[int, list[int]]], list[str]]:
    """(context, its numbers of rows) for a cache of `max_tokens`, and what is left out."""
    kept: list[tuple[int, list[int]]] = []
    left_out = []
    for context in contexts:
        counts = [count for count in rows if cache_tokens(count, context, steps) <= max_tokens]
        left_out += [f"{count} rows of {context} tokens: no memory" for count in rows if count not in counts]
        if counts:
            kept.append((context, counts))
    return kept, left_out


def measure(
    path: Path,
    backend: Backend,
    *,
    mix: str,
    shape: ModelShape,
    bandwidth: float,
    plan: Sequence[tuple[int, list[int]]],
    steps: int,
    batch_invariant: bool = False,
) -> Iterator[Row]:
    """All figures of one model, for each (context, its numbers of rows) of `plan`."""
    weights, kv_bytes = weight_bytes(ModelFile.open(path)), token_bytes(shape)
    prompt = min(PREFILL_TOKENS, max(context for context, _ in plan))
    device, limits = open_device(
        path,
        backend,
        rows=max(max(counts) for _, counts in plan),
        context=-(-(max(context for context, _ in plan) + steps + WARM_UP + 1) // PAGE_TOKENS) * PAGE_TOKENS,
        cache_tokens=max(cache_tokens(max(counts), context, steps) for context, counts in plan),
        step_tokens=prompt,
        batch_invariant=batch_invariant,
    )
    try:
        bench = Bench(device, limits, shape.vocab_size)
        bench.prefill(0, prompt)  # warms up
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
        for context, counts in plan:
            bench.lay_out(max(counts), context + steps + WARM_UP + 1)
            for seat in range(max(counts)):
                bench.prefill(seat, context)
            for count in counts:
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
                    goal=GOALS.get(count, 0.0),
                )
    finally:
        device.close()


def llama_cpp(
    program: Path, path: Path, plan: Sequence[tuple[int, list[int]]], steps: int
) -> dict[tuple[int, int], dict[str, float]]:
    """What `llama-batched-bench` says of the same file, by (rows, context). Raises CalledProcessError."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for context, rows in plan:
        size = (
            max(rows) * -(-(context + steps) // 256) * 256
        )  # it rounds each sequence's share to such a multiple
        command = [
            str(program), "-m", str(path), "-c", str(size), "-b", "2048", "-ub", "2048", "-ngl", "99", "-fa", "on",
            "-npp", str(context), "-ntg", str(steps), "-npl", ",".join(map(str, rows)), "--output-format", "jsonl",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found |= _read_lines(done.stdout)
    return found


def _read_lines(text: str) -> dict[tuple[int, int], dict[str, float]]:
    found: dict[tuple[int, int], dict[str, float]] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            found[int(entry["pl"]), int(entry["pp"])] = {
                "decode": float(entry["speed_tg"]),
                "prefill": float(entry["speed_pp"]),
            }
    return found


def show(report: Report) -> None:
    """The report as a table."""
    print(f"\n{', '.join(f'{name} {value}' for name, value in report.machine.items())}")
    print(f"tests/gpu: {report.tests or 'not run'}")
    print(f"copy bandwidth {report.copy_bytes_per_s / 1e9:.0f} GB/s")
    print(
        "| model | | rows | context | tokens/s | step ms | GB read | of copy rate | goal | llama.cpp tokens/s |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in report.rows:
        share = f"{row.bandwidth_share:.0%}" if row.bandwidth_share else ""
        goal = f"{row.goal:.0%}" if row.goal else ""
        peer = f"{row.llama_cpp_tokens_per_s:.0f}" if row.llama_cpp_tokens_per_s else ""
        print(
            f"| {row.model} | {row.what} | {row.rows} | {row.context} | {row.tokens_per_s:.0f} | "
            f"{row.step_ms:.2f} | {row.step_bytes / 1e9:.2f} | {share} | {goal} | {peer} |"
        )
    for what in report.left_out:
        print(f"left out: {what}")


def run(arguments: argparse.Namespace, directory: Path) -> Report:
    """Everything, in order."""
    report = Report(machine=describe(arguments.device), tests="")
    print(report.machine, file=sys.stderr)
    if arguments.device == "cuda" and not arguments.skip_tests:
        report.tests = run_tests()
        print(f"tests/gpu: {report.tests}", file=sys.stderr)
    shape = TINY if arguments.tiny else ModelShape()
    report.copy_bytes_per_s = copy_bandwidth(arguments.device)
    for mix in arguments.mixes:
        path = directory / f"{'tiny' if arguments.tiny else 'llama-3.1-8b'}-{mix}.gguf"
        if not path.exists():
            print(f"writing {path}", file=sys.stderr)
            write_shaped_model(path.with_suffix(".part"), shape=shape, mix=mix)
            path.with_suffix(".part").rename(path)
        backend = open_backend(arguments.device)
        max_tokens = max_cache_tokens(path, backend, shape)
        plan, missing = fitting(arguments.rows, arguments.contexts, arguments.steps, max_tokens)
        report.left_out += [f"{mix}: {what}" for what in missing]
        if not plan:
            continue
        peer = {}
        if arguments.llama_batched_bench:
            try:
                peer = llama_cpp(arguments.llama_batched_bench, path, plan, arguments.steps)
            except subprocess.CalledProcessError as error:
                report.left_out.append(f"{mix}: llama.cpp failed: {error.stderr.strip().splitlines()[-1:]}")
        rows = measure(
            path,
            backend,
            mix=mix,
            shape=shape,
            bandwidth=report.copy_bytes_per_s,
            plan=plan,
            steps=arguments.steps,
            batch_invariant=arguments.batch_invariant,
        )
        try:
            for row in rows:
                speed = peer.get((row.rows, row.context), {}).get(row.what, 0.0)
                row = msgspec.structs.replace(row, llama_cpp_tokens_per_s=speed)
                report.rows.append(row)
                print(row, file=sys.stderr)
        except Ds4Error as error:
            report.left_out.append(f"{mix}: {error}")
    return report


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def _mixes(text: str) -> list[str]:
    mixes = text.split(",")
    if not set(mixes) <= set(MIXES):
        raise argparse.ArgumentTypeError(f"of {', '.join(MIXES)}, not {text}")
    return mixes


def _program(text: str) -> Path:
    """Looked for now, not after the models were written."""
    if not (found := shutil.which(text)):
        raise argparse.ArgumentTypeError(f"{text} is no program")
    return Path(found)


def _folder(text: str) -> Path:
    path = Path(text)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _report(text: str) -> Path:
    return _folder(str(Path(text).parent)) / Path(text).name


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu")
    parser.add_argument("--device", choices=("cuda", "emulator"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to test this program")
    parser.add_argument("--skip-tests", action="store_true", help="measure without running tests/gpu first")
    parser.add_argument("--mixes", type=_mixes, default=list(MIXES))
    parser.add_argument("--rows", type=_numbers, default=[1, 8, 32, 64, 128])
    parser.add_argument("--contexts", type=_numbers, default=[512, 2048])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--directory", type=_folder, help="where the models are kept (14 GB for both)")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="only kernels that --batch-invariant allows"
    )
    parser.add_argument("--llama-batched-bench", type=_program)
    parser.add_argument("--json", type=_report, help="write the figures here as well")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            report = run(arguments, arguments.directory or Path(temporary))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
