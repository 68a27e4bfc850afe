"""Running one kernel in a test: arrays in, arrays out.

Owns: the choice of backend. Runs in: tests. Everything goes through `Backend`, so that the same tests run on
a GPU where one is at hand.
"""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from workers.devices.cuda.backend import Argument, Backend, DeviceArray
from workers.devices.emulator.backend import EmulatorBackend
from workers.kernels.catalogue import Shape

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="the emulator compiles kernels with g++, which is not installed"
)


def _emulator(thread_order: int) -> Backend:
    return EmulatorBackend(thread_order=thread_order)


# What `emulator` makes; tests/gpu puts a GPU here. Looked up at each call: tests import the function by its name.
make_backend: Callable[[int], Backend] = _emulator


def emulator(thread_order: int = 0) -> Backend:
    """A fresh backend."""
    return make_backend(thread_order)


class Rig:
    """Uploads, runs and downloads with one backend."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend or emulator()
        self._kept: list[DeviceArray] = []  # as in the product, memory outlives the launches that use it

    def put(self, host: NDArray[Any]) -> DeviceArray:
        """A device copy of `host`."""
        contiguous = np.ascontiguousarray(host)
        device = self.backend.allocate(contiguous.shape, contiguous.dtype)
        self.backend.upload(contiguous, device)
        self._kept.append(device)
        return device

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> DeviceArray:
        """Device memory without meaning."""
        device = self.backend.allocate(shape, dtype)
        self._kept.append(device)
        return device

    def get(self, device: DeviceArray, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """A host copy, of the device array's shape if the type has the same size."""
        host = self.backend.pinned(device.nbytes // np.dtype(dtype).itemsize, dtype)
        self.backend.download(device, host)
        self.backend.synchronise()
        result: NDArray[Any] = host.copy()
        return result.reshape(device.shape) if result.size == int(np.prod(device.shape)) else result

    def run(self, shape: Shape, arguments: Sequence[Argument]) -> None:
        """Launch one kernel."""
        self.backend.launch(shape.kernel, shape.grid, shape.block, shape.shared_bytes, arguments)
