"""What the tests of the CUDA device share: tiny models on it and on the reference, driven alike.

Runs in: tests. The backend is the one of `tests.workers.kernels.rig`: the emulator, and in tests/gpu a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.model_file import ModelFile
from tests.support.device_driver import DeviceDriver, small_limits
from tests.support.tiny_model import TinyShape, write_tiny_model
from tests.workers.kernels import rig
from workers.devices.cuda.backend import Backend
from workers.devices.cuda.device import CudaDevice
from workers.devices.interface import Limits
from workers.devices.reference.device import ReferenceDevice
from workers.model.program import Program
from workers.model.registry import load_program

needs_compiler = rig.needs_compiler
PROMPT = [5, 9, 200, 31, 77, 12, 250, 8, 64, 3, 119, 40, 41, 42, 9, 9, 17, 100, 230, 1, 6, 88, 180]


def new_backend() -> Backend:
    """A fresh backend of the kind that is under test."""
    return rig.emulator()


def tiny_program(directory: Path, quant: str, shape: TinyShape | None = None, seed: int = 0) -> Program:
    path = write_tiny_model(directory / f"{quant}-{seed}.gguf", quant=quant, shape=shape, seed=seed)
    return load_program(ModelFile.open(path))


class Pair:
    """The same program on the CUDA device and on the reference."""

    def __init__(self, program: Program, limits: Limits, backend: Backend, **options: Any) -> None:
        self.cuda = CudaDevice(program, limits, backend, **options)
        self.reference = ReferenceDevice(program, limits)
        self.driver = DeviceDriver(self.cuda, limits)
        self.oracle = DeviceDriver(self.reference, limits)

    def logits(self, rows: dict[int, list[int]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits of the sampled rows of one step on both."""
        self.driver.step(rows)
        self.oracle.step(rows)
        return self.cuda.logits(), np.array(self.reference.logits())

    def close(self) -> None:
        self.cuda.close()
        self.reference.close()


@contextmanager
def pair(
    program: Program,
    *,
    limits: Limits | None = None,
    make_backend: Callable[[], Backend] = new_backend,
    **options: Any,
) -> Iterator[Pair]:
    both = Pair(program, limits or small_limits(max_seats=8), make_backend(), **options)
    try:
        yield both
    finally:
        both.close()


def distance(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """Largest root mean square difference of a row, in units of the right row's standard deviation."""
    return float((np.sqrt(((left - right) ** 2).mean(1)) / right.std(1)).max())
