"""The `Backend` that runs the kernels on the CPU, as strictly as a GPU and more so.

Owns: one stream as a queue of calls, the loaded modules, pinned memory. Runs in: tests, and the emulator
device; one thread. Source: this project.

Nothing runs before something waits for it: a result that is read too early, or an input that is
rewritten too early, shows. `reached` runs one queued call, so that polling makes progress.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from workers.devices.cuda.arguments import convert
from workers.devices.cuda.backend import Argument, DeviceArray, Kernel
from workers.devices.emulator import compiler
from workers.devices.emulator.memory import EmulatorArray
from workers.devices.interface import DeviceFaultError
from workers.kernels.sources import launch_bounds, signature

_MAX_COMPILERS: Final = 2  # g++ processes at once

Call = Callable[[], None]


class EmulatorGraph:
    """Captured launches with their frozen arguments."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    @property
    def num_launches(self) -> int:
        """How many kernels a replay runs."""
        return len(self.calls)


class EmulatorEvent:
    """The stream's position after `target` calls."""

    def __init__(self, backend: "EmulatorBackend", target: int) -> None:
        self.target = target
        self._backend = backend

    @property
    def reached(self) -> bool:
        """Whether everything queued before it is done."""
        return self._backend.poll(self.target)


class EmulatorBackend:
    """See `workers.devices.cuda.backend.Backend`. Counters are for tests."""

    name = "emulator"

    def __init__(self, *, memory_bytes: int = 1 << 34, thread_order: int = 0) -> None:
        """`thread_order`: 0 ascending, 1 descending, more: a shuffle by that seed. Odd seeds are greedy: a warp
        runs as far as it can before the others.
        """
        self.num_launches = 0
        self.num_allocations = 0
        self._thread_order = thread_order
        self._memory_bytes = memory_bytes
        self._used_bytes = 0
        self._queue: deque[Call] = deque()
        self._num_queued = 0
        self._num_done = 0
        self._captured: list[Call] | None = None
        self._capture_error: str | None = None
        self._fault: DeviceFaultError | None = None
        self._pinned: list[NDArray[np.uint8]] = []
        self._libraries: dict[tuple[str, tuple[tuple[str, int], ...]], ctypes.CDLL] = {}
        self._checked: set[Kernel] = set()

    # -- the stream --------------------------------------------------------------------------------

    def _enqueue(self, call: Call) -> None:
        if self._fault:
            raise self._fault
        self._queue.append(call)
        self._num_queued += 1

    def _run_next(self) -> None:
        call = self._queue.popleft()
        self._num_done += 1
        if self._fault is None:
            try:
                call()
            except DeviceFaultError as fault:
                self._fault = fault

    def _refuse_in_capture(self, what: str) -> None:
        """Like CUDA: what may not be captured breaks the capture, not only the call."""
        if self._captured is not None:
            self._capture_error = f"{what} while a graph is captured"
            raise DeviceFaultError(self._capture_error)

    def poll(self, target: int) -> bool:
        """Whether `target` calls are done, after letting one more run."""
        self._refuse_in_capture("an event was asked for")
        if self._num_done < target:
            self._run_next()
        if self._fault:
            raise self._fault
        return self._num_done >= target

    def record(self) -> EmulatorEvent:
        """Mark this point of the stream."""
        self._refuse_in_capture("an event was recorded")
        return EmulatorEvent(self, self._num_queued)

    def synchronise(self, event: object | None = None) -> None:
        """Run what is queued, up to the event."""
        self._refuse_in_capture("something waited")
        target = event.target if isinstance(event, EmulatorEvent) else self._num_queued
        while self._num_done < target:
            self._run_next()
        if self._fault:
            raise self._fault

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> EmulatorArray:
        """Memory full of NaN."""
        self._refuse_in_capture("memory was allocated")
        lengths = (shape,) if isinstance(shape, int) else shape
        wanted = int(np.prod(lengths, dtype=np.int64)) * np.dtype(dtype).itemsize
        if self._used_bytes + wanted > self._memory_bytes:
            raise MemoryError(f"{wanted} bytes wanted, {self._memory_bytes - self._used_bytes} free")
        array = EmulatorArray.allocate(lengths, dtype)
        self._used_bytes += wanted  # arrays live as long as the device; what is freed is not counted
        self.num_allocations += 1
        return array

    def pinned(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """Host memory that asynchronous copies may use, with no meaning yet."""
        array = np.empty(shape, dtype)
        flat = array.reshape(-1).view(np.uint8)
        flat.fill(0xA5)
        self._pinned.append(flat)
        return array

    def _is_pinned(self, host: NDArray[np.generic]) -> bool:
        return any(np.may_share_memory(host, memory) for memory in self._pinned)

    def upload(self, host: NDArray[np.generic], device: DeviceArray) -> None:
        """Queue a copy to the device."""
        self._refuse_in_capture("host memory was copied")
        target = _ours(device)
        if not host.flags.c_contiguous or host.nbytes > target.nbytes:
            raise ValueError(
                f"{host.nbytes} bytes of host memory for {target.nbytes} bytes, or not contiguous"
            )
        source = (host if self._is_pinned(host) else host.copy()).reshape(-1).view(np.uint8)
        memory, lives = target.bytes[: source.size], target.lives()

        def copy() -> None:
            _require(lives())
            memory[:] = source

        self._enqueue(copy)

    def download(self, device: DeviceArray, host: NDArray[np.generic]) -> None:
        """Queue a copy to pinned memory."""
        self._refuse_in_capture("device memory was copied")
        source = _ours(device)
        if not host.flags.c_contiguous or host.nbytes > source.nbytes:
            raise ValueError(
                f"{source.nbytes} bytes for {host.nbytes} bytes of host memory, or not contiguous"
            )
        if not self._is_pinned(host):
            raise ValueError("only pinned memory can be the target of an asynchronous copy")
        target = host.reshape(-1).view(np.uint8)
        memory, lives = source.bytes[: target.size], source.lives()

        def copy() -> None:
            _require(lives())
            target[:] = memory

        self._enqueue(copy)

    def fill(self, device: DeviceArray, byte: int) -> None:
        """Queue setting every byte."""
        self._refuse_in_capture("memory was filled")
        memory, lives = _ours(device).bytes, _ours(device).lives()

        def fill() -> None:
            _require(lives())
            memory.fill(byte)

        self._enqueue(fill)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        return self._memory_bytes - self._used_bytes, self._memory_bytes

    # -- kernels -----------------------------------------------------------------------------------

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compile what is missing, two modules at a time."""
        modules = {(kernel.source, kernel.defines) for kernel in kernels} - self._libraries.keys()
        with ThreadPoolExecutor(_MAX_COMPILERS) as pool:
            paths = list(pool.map(lambda module: compiler.build(*module), sorted(modules)))
        for module, path in zip(sorted(modules), paths, strict=True):
            self._libraries[module] = compiler.load(path)
        for kernel in kernels:
            self._check_signature(kernel)

    def _check_signature(self, kernel: Kernel) -> None:
        """The C++ compiler and our reading of the source must agree on the parameters."""
        if kernel in self._checked:
            return
        library = self._libraries[kernel.source, kernel.defines]
        read = getattr(library, f"signature_{kernel.entry}")
        read.restype = ctypes.c_char_p
        compiled = read().decode()
        if compiled != signature(kernel):
            raise TypeError(f"{kernel.entry}: C++ has parameters {compiled}, Python read {signature(kernel)}")
        self._checked.add(kernel)

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Queue one kernel; values and addresses are fixed now."""
        cells = [_bits(cell) for cell in convert(kernel, arguments)]
        bound = launch_bounds(kernel.source)[kernel.entry]
        if block > bound:
            raise TypeError(f"{kernel.entry} is built for blocks of {bound} threads, not {block}")
        if kernel not in self._checked:
            self._refuse_in_capture("a kernel was loaded")
            self.prepare([kernel])
        library = self._libraries[kernel.source, kernel.defines]
        run = getattr(library, f"run_{kernel.entry}")
        values = (ctypes.c_uint64 * len(cells))(*cells)
        start = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(cells))(*(start + 8 * index for index in range(len(cells))))
        dimensions = (ctypes.c_uint * 3)(*grid)

        def call(_values: object = values) -> None:  # keeps the frozen cells alive
            self.num_launches += 1
            library.emulator_set_order(self._thread_order)
            if run(dimensions, ctypes.c_uint(block), ctypes.c_uint(shared_bytes), pointers):
                raise DeviceFaultError(library.emulator_message().decode())

        if self._captured is not None:
            self._captured.append(call)
        else:
            self._enqueue(call)

    can_multiply = True

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
        """In NumPy what cuBLAS does on the GPU; refused while a graph is captured, as there."""
        self._refuse_in_capture("a matrix product was asked for")
        rows, outputs, inputs = size
        x = _bfloat16(_ours(activations), (rows, inputs))
        w = _bfloat16(_ours(weights), (outputs, inputs))
        end = 4 * ((rows - 1) * stride + outputs)
        target = _ours(out).bytes[:end].view(np.float32)

        def multiply() -> None:
            product = x() @ w().T
            for row in range(rows):
                part = target[row * stride : row * stride + outputs]
                part[:] = part + product[row] if accumulate else product[row]

        self._enqueue(multiply)

    def begin_capture(self) -> None:
        """Record launches instead of queueing them."""
        self._refuse_in_capture("a capture was begun")
        if self._fault:
            raise self._fault
        self._captured = []
        self._capture_error = None

    def end_capture(self) -> EmulatorGraph:
        """What was recorded."""
        captured, error = self._captured, self._capture_error
        self._captured = self._capture_error = None
        if captured is None:
            raise DeviceFaultError("no graph is being captured")
        if error:
            raise DeviceFaultError(f"the capture is broken: {error}")
        return EmulatorGraph(captured)

    def replay(self, graph: object) -> None:
        """Queue everything the graph holds."""
        self._refuse_in_capture("a graph was replayed")
        assert isinstance(graph, EmulatorGraph)
        for call in graph.calls:
            self._enqueue(call)

    def close(self) -> None:
        """Forget what is queued."""
        self._queue.clear()
        self._num_done = self._num_queued
        self._pinned.clear()


def _require(lives: bool) -> None:
    if not lives:
        raise DeviceFaultError("a call uses device memory that was freed after it was queued")


def _bfloat16(array: EmulatorArray, shape: tuple[int, int]) -> Callable[[], NDArray[np.float32]]:
    """Reads the matrix at the start of `array` when it is called."""
    bits = array.bytes[: 2 * shape[0] * shape[1]].view(np.uint16).reshape(shape)
    return lambda: (bits.astype(np.uint32) << 16).view(np.float32)


def _ours(array: DeviceArray) -> EmulatorArray:
    if not isinstance(array, EmulatorArray):
        raise TypeError(f"an array of the emulator is needed, not {type(array).__name__}")
    return array


def _bits(cell: DeviceArray | np.generic | None) -> int:
    """One argument as the 8 bytes a kernel reads its parameter from."""
    if cell is None:
        return 0
    if isinstance(cell, np.generic):
        return int.from_bytes(cell.tobytes(), "little")
    return _ours(cell).address
