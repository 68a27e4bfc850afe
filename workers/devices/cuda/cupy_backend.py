"""The GPU through CuPy: the only module of the product that imports it.

Owns: the CUDA context, one stream, compiled modules, all memory it hands out. Runs in: the worker's
thread, after exec (a context does not survive fork). Source: CuPy 14; what is older does not find the libraries
that pip installs.

Of CuPy only its thin parts are used: allocation, RawModule, streams, events, graphs and the runtime's
asynchronous copies. No array arithmetic, so nothing compiles or launches behind our back. Parts of the
array API refuse to work while a graph is captured; `runtime.memcpyAsync` with a raw address is what
they are made of, and is never called then.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import cupy
import cupyx
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ds4.errors import ConfigError
from workers.devices.cuda.arguments import Cell, convert
from workers.devices.cuda.backend import Argument, DeviceArray, Event, Graph
from workers.devices.cuda.driver import Driver
from workers.devices.interface import DeviceFaultError
from workers.kernels.sources import Kernel, compile_options, source_text

log = logging.getLogger(__name__)

_RUNTIME: Final = cupy.cuda.runtime
_ERRORS: Final = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY
_NOT_READY: Final = 600  # cudaErrorNotReady
_HOST_TO_DEVICE: Final = 1  # cudaMemcpyKind
_DEVICE_TO_HOST: Final = 2
# Values of cublasOperation_t, cudaDataType_t, cublasComputeType_t and cublasGemmAlgo_t.
_BLAS_PLAIN: Final = 0
_BLAS_TRANSPOSED: Final = 1
_BLAS_FLOAT32: Final = 0
_BLAS_BFLOAT16: Final = 14
_BLAS_COMPUTE_FLOAT32: Final = 68
_BLAS_DEFAULT: Final = -1
_LARGE_BYTES: Final = 1 << 20
_PLAIN_SHARED_BYTES: Final = 48 * 1024  # what a block gets without asking
_OLDEST_MAJOR: Final = 8  # compute capability: asynchronous copies, and matrix instructions of 16 inputs


@contextmanager
def _faults(what: str) -> Iterator[None]:
    """CUDA's errors as ours: memory that ran out, or a device that must be rebuilt."""
    try:
        yield
    except MemoryError:
        raise
    except _ERRORS as error:
        if getattr(error, "status", None) == _OUT_OF_MEMORY:
            raise MemoryError(f"{what}: {error}") from error
        raise DeviceFaultError(f"{what}: {error}") from error


def _shape(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


class _Array:
    """Memory on the GPU, or a part of it. Keeps its allocation alive."""

    def __init__(self, memory: Any, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._memory = memory
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.address = np.uint64(address)  # as a kernel takes it: eight bytes by value

    def part(self, start_byte: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> "_Array":
        """An array in this one's memory."""
        part = _Array(self._memory, int(self.address) + start_byte, _shape(shape), dtype)
        if start_byte % 16 or start_byte + part.nbytes > self.nbytes:
            raise ValueError(f"bytes {start_byte} to {start_byte + part.nbytes} of {self.nbytes}")
        return part


class _Event:
    """A mark in the stream."""

    def __init__(self, stream: Any) -> None:
        self.event = cupy.cuda.Event(disable_timing=True)
        self.event.record(stream)

    @property
    def reached(self) -> bool:
        """Whether the stream is past it. CuPy's own `done` takes every error for "not yet"."""
        status = _RUNTIME.eventQuery(self.event.ptr)
        if status in (0, _NOT_READY):
            return bool(status == 0)
        with _faults("a step"):
            raise _RUNTIME.CUDARuntimeError(status)


class _Graph:
    """A captured sequence of launches."""

    def __init__(self, graph: Any, num_launches: int) -> None:
        self.graph = graph
        self.num_launches = num_launches


class CupyBackend:
    """One stream of the first visible GPU. One owner, the device above it."""

    name = "cuda"

    def __init__(self) -> None:
        self._stream: Any = cupy.cuda.Stream(non_blocking=True)
        self._stream.use()  # kernels go to the thread's current stream
        self._modules: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}
        self._functions: dict[Kernel, Any] = {}
        self._shared_limits: dict[Kernel, int] = {}  # dynamic shared memory asked for so far
        self._pinned: list[tuple[int, int]] = []  # address ranges; they live as long as the backend
        self._held: deque[tuple[_Event, NDArray[Any]]] = deque()  # sources of copies that may still run
        self._num_captured: int | None = None  # None: not capturing
        self._blas_handle: int | None = None  # 0: there is none

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> _Array:
        """Memory with undefined contents. Raises MemoryError."""
        shape = _shape(shape)
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        with _faults("allocating"):
            memory = cupy.cuda.Memory(max(size, 1))
        return _Array(memory, memory.ptr, shape, dtype)

    def pinned(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Host memory that asynchronous copies may use."""
        with _faults("pinning host memory"):
            array: NDArray[Any] = cupyx.empty_pinned(_shape(shape), dtype)
        self._pinned.append((array.ctypes.data, array.ctypes.data + array.nbytes))
        return array

    def upload(self, host: NDArray[Any], device: DeviceArray) -> None:
        """Queue a copy to the device.

        Whether the driver stages pageable memory before it returns depends on the system (one that can read it
        from the GPU need not), so what is not pinned is copied here and held until the GPU has it, or waited
        for where it is large: that is at load.
        """
        if self._is_pinned(host):
            self._copy(host, device, _HOST_TO_DEVICE)
        elif host.nbytes > _LARGE_BYTES:
            self._copy(host, device, _HOST_TO_DEVICE)
            self.synchronise()
        else:
            while self._held and self._held[0][0].reached:
                self._held.popleft()
            own = np.array(host, order="C")
            self._copy(own, device, _HOST_TO_DEVICE)
            self._held.append((self.record(), own))

    def _is_pinned(self, host: NDArray[Any]) -> bool:
        address = host.ctypes.data
        return any(start <= address < end for start, end in self._pinned)

    def download(self, device: DeviceArray, host: NDArray[Any]) -> None:
        """Queue a copy into pinned memory."""
        self._copy(host, device, _DEVICE_TO_HOST)

    def _copy(self, host: NDArray[Any], device: DeviceArray, kind: int) -> None:
        assert self._num_captured is None, "no copies while a graph is captured"
        assert isinstance(device, _Array)
        if not host.flags.c_contiguous or host.nbytes > device.nbytes:
            raise ValueError(f"{host.nbytes} bytes do not fit {device.nbytes}, or are not contiguous")
        target, source = int(device.address), host.ctypes.data
        if kind == _DEVICE_TO_HOST:
            target, source = source, target
        with _faults("copying"):
            _RUNTIME.memcpyAsync(target, source, host.nbytes, kind, self._stream.ptr)

    def fill(self, device: DeviceArray, byte: int) -> None:
        """Queue setting every byte."""
        assert isinstance(device, _Array)
        with _faults("filling memory"):
            _RUNTIME.memsetAsync(int(device.address), byte, device.nbytes, self._stream.ptr)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        with _faults("asking for free memory"):
            free, total = _RUNTIME.memGetInfo()
        return int(free), int(total)

    # -- kernels -----------------------------------------------------------------------------------

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compile what CuPy's cache on disk does not hold, and load. Raises ConfigError."""
        for kernel in kernels:
            self._function(kernel)

    def _function(self, kernel: Kernel) -> Any:
        found = self._functions.get(kernel)
        if found is not None:
            return found
        key = (kernel.source, kernel.defines)
        try:
            if key not in self._modules:
                self._modules[key] = cupy.RawModule(
                    code=source_text(kernel.source), options=compile_options(kernel.defines)
                )
            function = self._modules[key].get_function(kernel.entry)
        except _ERRORS as error:
            raise DeviceFaultError(f"loading {kernel.entry}: {error}") from error
        except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
            raise ConfigError(
                f"the GPU's kernels cannot be compiled ({kernel.source}: {_first_line(error)})",
                setting="device",
            ) from error
        self._functions[kernel] = function
        return function

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Queue one kernel."""
        function = self._function(kernel)
        if min(grid) < 1:
            raise ValueError(f"{kernel.entry}: a grid of {grid}")
        values = tuple(map(_value, convert(kernel, arguments)))
        with _faults(f"launching {kernel.entry}"):
            if shared_bytes > self._shared_limits.get(kernel, _PLAIN_SHARED_BYTES):
                function.max_dynamic_shared_size_bytes = shared_bytes
                self._shared_limits[kernel] = shared_bytes
            function(grid, (block,), values, shared_mem=shared_bytes)
        if self._num_captured is not None:
            self._num_captured += 1

    # -- cuBLAS ------------------------------------------------------------------------------------

    @property
    def can_multiply(self) -> bool:
        """Whether cuBLAS is there; it is opened when first asked."""
        if self._blas_handle is None:
            try:
                self._blas_handle = int(cupy.cuda.device.get_cublas_handle())
            except (ImportError, RuntimeError, OSError) as error:
                log.warning(
                    "cuBLAS cannot be loaded (%s): large prompt chunks run slower; "
                    "pip install nvidia-cublas-cu12 (CUDA 13: nvidia-cublas)",
                    _first_line(error),
                )
                self._blas_handle = 0
        return self._blas_handle != 0

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
        """Queue one product of cuBLAS, which counts by columns: it computes the transpose."""
        assert self.can_multiply
        assert self._num_captured is None, "CuPy refuses cuBLAS while a graph is captured"
        assert isinstance(out, _Array)
        assert isinstance(activations, _Array)
        assert isinstance(weights, _Array)
        rows, outputs, inputs = size
        factors = np.array([1.0, float(accumulate)], np.float32)  # read before the call returns
        try:
            cupy.cuda.cublas.gemmEx(
                *(self._blas_handle, _BLAS_TRANSPOSED, _BLAS_PLAIN, outputs, rows, inputs),
                *(factors.ctypes.data, int(weights.address), _BLAS_BFLOAT16, inputs),
                *(int(activations.address), _BLAS_BFLOAT16, inputs),
                *(factors.ctypes.data + 4, int(out.address), _BLAS_FLOAT32, stride),
                *(_BLAS_COMPUTE_FLOAT32, _BLAS_DEFAULT),
            )
        except RuntimeError as error:  # cuBLAS has errors of its own
            raise DeviceFaultError(f"a matrix product: {error}") from error

    # -- graphs ------------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        """Record launches instead of queueing them."""
        assert self._num_captured is None
        with _faults("beginning a capture"):
            self._stream.begin_capture()
        self._num_captured = 0

    def end_capture(self) -> _Graph:
        """What was recorded."""
        assert self._num_captured is not None
        num_launches, self._num_captured = self._num_captured, None
        with _faults("ending a capture"):
            graph = self._stream.end_capture()
            graph.upload(self._stream)  # else its first launch would
        return _Graph(graph, num_launches)

    def replay(self, graph: Graph) -> None:
        """Queue everything the graph holds."""
        assert isinstance(graph, _Graph)
        with _faults("launching a graph"):
            graph.graph.launch(self._stream)

    # -- time --------------------------------------------------------------------------------------

    def record(self) -> _Event:
        """Mark this point of the stream."""
        with _faults("recording an event"):
            return _Event(self._stream)

    def synchronise(self, event: Event | None = None) -> None:
        """Wait for the mark, or for everything queued."""
        with _faults("a step"):
            if event is None:
                self._stream.synchronize()
            else:
                assert isinstance(event, _Event)
                event.event.synchronize()

    def close(self) -> None:
        """Drop modules; memory goes when its last array does."""
        with suppress(DeviceFaultError):  # copies may still read what is held
            self.synchronise()
        self._held.clear()
        self._functions.clear()
        self._modules.clear()


def _value(cell: Cell) -> Any:
    """A cell as CuPy passes it by value: an address is eight bytes, and None would be no argument at all."""
    if cell is None:
        return np.uint64(0)
    return cell.address if isinstance(cell, _Array) else cell


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# Each CuPy wheel is for one major version of CUDA; the extras and packages are named after it.
_PACKAGES: Final = {
    12: ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"),
    13: ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
}


def open_backend(driver: Driver) -> CupyBackend:
    """The first visible GPU, ready to compile for. Raises ConfigError saying what to install or update."""
    major, drivers = int(_RUNTIME.runtimeGetVersion()) // 1000, driver.cuda_version // 1000
    nvrtc, headers = _PACKAGES.get(major, _PACKAGES[13])
    if drivers < major:
        other = f", or install ds4-server[cuda{drivers}] instead" if drivers in _PACKAGES else ""
        raise ConfigError(
            f"the NVIDIA driver is too old: it runs CUDA {driver.cuda}, the installed CuPy needs {major}.0; "
            f"update the driver{other}",
            setting="device",
        )
    try:
        compiler = cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, ImportError, OSError) as error:
        raise ConfigError(
            f"CUDA's compiler NVRTC is missing ({_first_line(error)}); "
            f"pip install {nvrtc} {headers}, or 'ds4-server[cuda{major}]' for all of it",
            setting="device",
        ) from error
    if compiler[0] > drivers:  # CuPy takes the newest that is installed, whichever CuPy it is
        newer = " ".join(_PACKAGES.get(compiler[0], _PACKAGES[13]))
        raise ConfigError(
            f"CUDA's compiler NVRTC is newer ({compiler[0]}.{compiler[1]}) than the driver, which runs CUDA "
            f"{driver.cuda}; pip uninstall {newer}, then pip install {nvrtc} {headers}",
            setting="device",
        )
    try:
        properties = _RUNTIME.getDeviceProperties(_RUNTIME.getDevice())
        name, capability = properties["name"].decode(), f"{properties['major']}.{properties['minor']}"
        if properties["major"] < _OLDEST_MAJOR:
            raise ConfigError(
                f"the GPU is too old: {name} has compute capability {capability}, the kernels need "
                f"{_OLDEST_MAJOR}.0 (A100, RTX 30 and newer); use --device cpu",
                setting="device",
            )
        backend = CupyBackend()
    except (*_ERRORS, DeviceFaultError) as error:
        raise ConfigError(f"the GPU cannot be used: {_first_line(error)}", setting="device") from error
    log.info("GPU", extra={"gpu": name, "compute_capability": capability, "driver_cuda": driver.cuda})
    return backend
