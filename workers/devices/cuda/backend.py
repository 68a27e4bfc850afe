"""The seam below the CUDA device: memory, copies, launches, graphs and events of one stream.

Owns: the `Backend` protocol. Runs in: the worker's thread. Source: the parts of CUDA's runtime that
CuPy reaches; `cupy_backend` is the GPU, `workers.devices.emulator.backend` runs the same kernels on
the CPU, with the same rules, in tests.

Rules, on both:

- Everything is queued on one stream and runs in that order. `upload` from memory made by `pinned`
  reads it when the copy runs, so the caller leaves it alone until an event after it was reached;
  any other array is copied before the call returns. `download` needs pinned memory.
- While a graph is captured only `launch` is allowed: nothing runs, and the values of scalars and the
  addresses of arrays are frozen. Arrays and kernels outlive the graphs that use them.
- `allocate` returns memory without meaning (the emulator fills it with NaN).
- The first fault of a kernel is raised by the next call that waits, and by every call after it.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from numpy.typing import DTypeLike, NDArray

from workers.kernels.sources import Kernel

__all__ = ["Argument", "Backend", "DeviceArray", "Event", "Graph", "Kernel", "taken_bytes"]

PIECE_BYTES: Final = 2 << 20  # in which the driver maps device memory; small arrays share one


def taken_bytes(num_bytes: int) -> int:
    """What an array of that size takes of the device's memory."""
    return num_bytes if num_bytes < PIECE_BYTES // 2 else -(-num_bytes // PIECE_BYTES) * PIECE_BYTES


class DeviceArray(Protocol):
    """C-contiguous memory on the device. Host code never looks inside."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths, row-major."""
        ...

    def part(self, start_byte: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> "DeviceArray":
        """An array in this one's memory. `start_byte` is a multiple of 16."""
        ...


class Graph(Protocol):
    """Captured launches."""

    @property
    def num_launches(self) -> int:
        """How many kernels a replay runs."""
        ...


class Event(Protocol):
    """A mark in the stream."""

    @property
    def reached(self) -> bool:
        """Whether everything queued before it is done; does not wait. Raises DeviceFaultError."""
        ...


Argument = DeviceArray | int | float | None  # None: a null pointer


class Backend(Protocol):
    """One stream of one device."""

    name: str

    def allocate(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Memory with undefined contents. Raises MemoryError."""
        ...

    def pinned(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray:  # type: ignore[type-arg]
        """Host memory that asynchronous copies may use."""
        ...

    def upload(self, host: NDArray, device: DeviceArray) -> None:  # type: ignore[type-arg]
        """Queue a copy of the whole of `host`, C-contiguous, to the first bytes of `device`."""
        ...

    def download(self, device: DeviceArray, host: NDArray) -> None:  # type: ignore[type-arg]
        """Queue a copy of the first bytes of `device` into the whole of `host`, pinned and C-contiguous."""
        ...

    def fill(self, device: DeviceArray, byte: int) -> None:
        """Queue setting every byte."""
        ...

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compile and load, so that no later launch has to. Raises ConfigError where that fails."""
        ...

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Queue one kernel. Raises TypeError where the arguments do not match its parameters."""
        ...

    @property
    def can_multiply(self) -> bool:
        """Whether `multiply` works: the GPU's library of matrix products may be missing."""
        ...

    def multiply(
        self,
        out: DeviceArray,
        stride: int,
        activations: DeviceArray,
        weights: DeviceArray,
        size: tuple[int, int, int],
        *,
        accumulate: bool,
    ) -> None:
        """Queue out = (out +) activations times weights transposed, outside any capture.

        `size` is (rows, outputs, inputs): activations [rows, inputs] and weights [outputs, inputs] bfloat16,
        out [rows, stride] float32, all row-major; sums are float32 in an order of the library's own.
        """
        ...

    def begin_capture(self) -> None:
        """Record launches instead of queueing them."""
        ...

    def end_capture(self) -> Graph:
        """What was recorded. Raises DeviceFaultError where the capture was broken; never left open."""
        ...

    def replay(self, graph: Graph) -> None:
        """Queue everything the graph holds."""
        ...

    def record(self) -> Event:
        """Mark this point of the stream."""
        ...

    def synchronise(self, event: Event | None = None) -> None:
        """Wait for the mark, or for everything queued. Raises DeviceFaultError."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...
