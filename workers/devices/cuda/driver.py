"""Is there an NVIDIA driver and a GPU? Asked of the driver's own library, without CuPy.

Owns: nothing. Runs in: the worker, at start. Source: the CUDA driver API (cuInit, cuDeviceGetCount,
cuDriverGetVersion). `auto` asks here first, so a machine without a GPU never imports CuPy.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import msgspec

_LIBRARY: Final = "libcuda.so.1"


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver said. `problem` is empty where a GPU can be used."""

    num_devices: int = 0
    cuda_version: int = 0  # newest CUDA version it runs, as 1000 * major + 10 * minor
    problem: str = ""

    @property
    def cuda(self) -> str:
        """The version as people write it."""
        return f"{self.cuda_version // 1000}.{self.cuda_version % 1000 // 10}"


def probe(load: Callable[[str], Any] = ctypes.CDLL) -> Driver:
    """Ask the driver. `load` opens its library; tests give their own."""
    try:
        library = load(_LIBRARY)
    except OSError:
        return Driver(problem="no NVIDIA driver is installed (libcuda.so.1 is missing)")
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    status = library.cuInit(0)
    if status == 0:
        status = library.cuDeviceGetCount(ctypes.byref(count))
    # CUDA_ERROR_NO_DEVICE: also what an empty CUDA_VISIBLE_DEVICES gives
    if status == 100 or (status == 0 and count.value == 0):
        return Driver(cuda_version=version.value, problem="the NVIDIA driver sees no GPU")
    if status != 0:
        return Driver(
            cuda_version=version.value, problem=f"the NVIDIA driver does not start (CUDA error {status})"
        )
    return Driver(num_devices=count.value, cuda_version=version.value)
