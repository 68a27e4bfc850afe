"""A stand-in for the parts of CuPy that the backend calls: records launches, moves bytes for real.

Owns: what was called. Runs in: tests of the CuPy backend on machines without a GPU. It proves names, order
and argument types, not that a GPU would do the same; those tests run on a GPU where one is.
"""

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaErrorNumber{status}: said the driver")
        self.status = status


class CompileException(Exception):  # noqa: N818 - CuPy's name
    pass


class FakeCupy:
    """The two modules and their state. `fail[name] = status` makes that call raise."""

    def __init__(self, runtime_version: int = 13020) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, int] = {}
        self.compile_error: Exception | None = None
        self.nvrtc_error: Exception | None = None
        self.cublas_error: Exception | None = None
        self.sources: list[tuple[str, tuple[str, ...]]] = []
        self.runtime_version = runtime_version
        self.nvrtc_version = (runtime_version // 1000, 0)
        self.compute_capability = (9, 0)
        self.cupy, self.cupyx = ModuleType("cupy"), ModuleType("cupyx")
        self._fill()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Make `import cupy` find this one, and the backend import it anew."""
        patch.setitem(sys.modules, "cupy", self.cupy)
        patch.setitem(sys.modules, "cupyx", self.cupyx)
        patch.delitem(sys.modules, "workers.devices.cuda.cupy_backend", raising=False)

    def _note(self, name: str, *details: Any) -> None:
        if name in self.fail:
            raise CUDARuntimeError(self.fail[name])
        self.calls.append((name, *details))

    def _fill(self) -> None:
        fake = self

        class Memory:
            def __init__(self, size: int) -> None:
                fake._note("allocate", size)
                self._buffer = (ctypes.c_uint8 * size)()
                self.ptr = ctypes.addressof(self._buffer)

        class Stream:
            ptr = 7

            def __init__(self, non_blocking: bool) -> None:
                assert non_blocking  # the default stream cannot be captured
                fake._note("stream")

            def use(self) -> None:
                fake._note("use")

            def synchronize(self) -> None:
                fake._note("synchronise")

            def begin_capture(self) -> None:
                fake._note("begin")

            def end_capture(self) -> Any:
                fake._note("end")
                return SimpleNamespace(
                    launch=lambda stream: fake._note("replay", stream.ptr),
                    upload=lambda stream: fake._note("upload", stream.ptr),
                )

        class Event:
            def __init__(self, disable_timing: bool) -> None:
                assert disable_timing

            ptr = 11

            def record(self, stream: Stream) -> None:
                fake._note("record", stream.ptr)

            def synchronize(self) -> None:
                fake._note("wait")

        class Function:
            def __init__(self, entry: str) -> None:
                self.entry = entry
                self._shared = 48 * 1024

            @property
            def max_dynamic_shared_size_bytes(self) -> int:
                return self._shared

            @max_dynamic_shared_size_bytes.setter
            def max_dynamic_shared_size_bytes(self, value: int) -> None:
                fake._note("shared", value)
                self._shared = value

            def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
                assert shared_mem <= self._shared
                fake._note("launch", self.entry, grid, block, arguments, shared_mem)

        class RawModule:
            def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
                fake.sources.append((code, options))

            def get_function(self, entry: str) -> Function:
                if fake.compile_error is not None:
                    raise fake.compile_error
                return Function(entry)

        def copy(target: int, source: int, size: int, kind: int, stream: int) -> None:
            fake._note("copy", size, kind, stream)
            ctypes.memmove(target, source, size)

        def fill(target: int, value: int, size: int, stream: int) -> None:
            fake._note("fill", size, stream)
            ctypes.memset(target, value, size)

        def nvrtc_version() -> tuple[int, int]:
            if fake.nvrtc_error is not None:
                raise fake.nvrtc_error
            return fake.nvrtc_version

        def properties(device: int) -> dict[str, Any]:
            fake._note("properties")
            major, minor = fake.compute_capability
            return {"name": b"Fake GPU", "major": major, "minor": minor}

        def query(event: int) -> int:  # never raises
            fake.calls.append(("query", event))
            return fake.fail.get("query", 0)

        def cublas_handle() -> int:
            if fake.cublas_error is not None:
                raise fake.cublas_error
            return 99

        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            eventQuery=query,
            getDevice=lambda: 0,
            getDeviceProperties=properties,
            memGetInfo=lambda: (3 << 30, 4 << 30),
            memcpyAsync=copy,
            memsetAsync=fill,
            runtimeGetVersion=lambda: fake.runtime_version,
        )
        self.cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            Event=Event,
            Memory=Memory,
            Stream=Stream,
            cublas=SimpleNamespace(gemmEx=lambda *arguments: fake._note("gemm", *arguments)),
            device=SimpleNamespace(get_cublas_handle=cublas_handle),
            compiler=SimpleNamespace(CompileException=CompileException),
            driver=SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {})),
            nvrtc=SimpleNamespace(getVersion=nvrtc_version),
            runtime=runtime,
        )
        self.cupy.RawModule = RawModule  # type: ignore[attr-defined]
        self.cupyx.empty_pinned = np.empty  # type: ignore[attr-defined]
