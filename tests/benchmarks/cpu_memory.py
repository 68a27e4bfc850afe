"""Memory that a large model takes on the CPU engine, beside its packed weights.

    python -m tests.benchmarks.cpu_memory [--shape 1b 8b] [--directory DIR]

Random weights of a real model's shape (Llama-3.2-1B and Llama-3.1-8B, Q4_K_M mix), written once into the
directory. A process of its own loads the model, computes a prompt of 512 tokens and a few steps of 8 rows,
and reads its anonymous memory: pages of the mapped file belong to the kernel's cache. The KV pages are
taken off, since how many there are is a setting, and so is what the interpreter held before.
"""

import argparse
import gc
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from ds4.config import Settings
from ds4.model_file import ModelFile
from tests.support.device_driver import DeviceDriver, small_limits
from tests.support.shaped_model import ModelShape, write_shaped_model
from workers.devices.cpu.device import CpuDevice
from workers.model.registry import load_program

SHAPES: Final = {
    "1b": ModelShape(num_layers=16, hidden_size=2048, num_heads=32, head_size=64, ffn_size=8192),
    "8b": ModelShape(),
}
SEATS: Final = 32
CONTEXT: Final = 528
_MIB: Final = 1 << 20


def anonymous_bytes() -> int:
    """Of this process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def resident_cache_bytes(device: CpuDevice) -> int:
    """The part of the KV cache that steps have touched, by the kernel's account of its mapping."""
    start = device._plan.cache.address
    end, resident = start + len(device._plan.cache.data), 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(bound, 16) for bound in bounds.groups())
            inside = low <= start < high or start <= low < end
        elif inside and line.startswith("Anonymous:"):
            resident += 1024 * int(line.split()[1])
    return resident


def measure(path: Path) -> None:
    """Load, step, print."""
    before = anonymous_bytes()
    rows = Settings().max_batch_tokens
    limits = small_limits(max_rows=rows, max_seats=SEATS, max_context_tokens=CONTEXT)
    device = CpuDevice(load_program(ModelFile.open(path)), limits)
    gc.collect()
    loaded = anonymous_bytes() - before - resident_cache_bytes(device)
    driver = DeviceDriver(device, limits)
    for seat in range(8):
        driver.seat(seat)
        driver.step({seat: range(1000, 1512 if seat == 0 else 1016)})
    for _ in range(4):
        driver.decode(range(8))
    cache = resident_cache_bytes(device)
    stepped = anonymous_bytes() - before - cache
    packed = device._plan.packed_bytes
    print(
        f"{path.stem}: packed weights {packed // _MIB} MiB; loaded {loaded / packed - 1:+.1%}, "
        f"stepping {stepped / packed - 1:+.1%} ({(stepped - packed) // _MIB} MiB); KV {cache // _MIB} MiB apart"
    )
    device.close()


def main() -> int:
    """Print one line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return 0
    for name in arguments.shape:
        path = arguments.directory / f"{name}-q4_k_m.gguf"
        if not path.exists():
            part = write_shaped_model(path.with_suffix(".part"), shape=SHAPES[name])
            os.replace(part, path)
        command = [sys.executable, "-m", "tests.benchmarks.cpu_memory", "--measure", str(path)]
        subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
