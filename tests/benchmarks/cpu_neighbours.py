"""CPU engines that share one machine: what each gets, and what all of them get together, beside one alone.

    python -m tests.benchmarks.cpu_neighbours MODEL.gguf [--engines 2] [--rows 1 8 32] [--seconds 6]

Each engine is a process of its own that decodes as fast as it can on every core, as servers do that know
nothing of each other. They start at one moment; each counts the tokens of the same stretch of time, after
a second in which thread counts may settle. A share of 100 % means that sharing costs nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from ds4.model_file import ModelFile
from tests.support.device_driver import DeviceDriver, small_limits
from workers.devices.cpu.device import CpuDevice
from workers.model.registry import load_program

CONTEXT: Final = 512
PROMPT: Final = 128
SETTLE_S: Final = 1.0


def engine(model: Path, num_rows: int, threads: int, seconds: float) -> int:
    """Load, say so, wait for the start on standard input, decode; prints tokens a second."""
    limits = small_limits(max_seats=num_rows, max_context_tokens=CONTEXT)
    device = CpuDevice(load_program(ModelFile.open(model)), limits, threads)
    driver, seats = DeviceDriver(device, limits), range(num_rows)

    def fill() -> None:
        for seat in seats:
            driver.seat(seat)
            driver.step({seat: range(1000, 1000 + PROMPT)})

    fill()
    print("ready", flush=True)
    start = float(sys.stdin.readline()) + SETTLE_S
    num_tokens, decoding_s = 0, 0.0
    while (before := time.monotonic()) < start + seconds:
        if driver.lengths[0] == CONTEXT:
            fill()  # not counted
            continue
        driver.decode(seats)
        if before >= start:
            num_tokens += num_rows
            decoding_s += time.monotonic() - before
    device.close()
    print(json.dumps(num_tokens / decoding_s))
    return 0


def side_by_side(num_engines: int, arguments: argparse.Namespace, num_rows: int) -> list[float]:
    """Tokens a second of each of the engines."""
    command = [sys.executable, "-m", "tests.benchmarks.cpu_neighbours", str(arguments.model), "--engine"]
    command += ["--rows", str(num_rows), "--threads", str(arguments.threads)]
    command += ["--seconds", str(arguments.seconds)]
    engines = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(num_engines)
    ]
    for process in engines:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("an engine did not start")
    start = f"{time.monotonic() + 0.2}\n"
    for process in engines:
        assert process.stdin is not None
        process.stdin.write(start)
        process.stdin.flush()
    outputs = [process.communicate()[0] for process in engines]
    return [float(json.loads(output)) for output in outputs]


def main() -> int:
    """Print one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=0, help="of each engine; 0: physical cores")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        return engine(arguments.model, arguments.rows[0], arguments.threads, arguments.seconds)
    print(f"{os.cpu_count()} cpus, load {os.getloadavg()[0]:.1f}, tokens/s")
    for num_rows in arguments.rows:
        (alone,) = side_by_side(1, arguments, num_rows)
        each = side_by_side(arguments.engines, arguments, num_rows)
        shown = " + ".join(f"{rate:.0f}" for rate in each)
        print(f"{num_rows} rows: alone {alone:.0f}, together {shown} = {sum(each) / alone:.0%} of alone")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
