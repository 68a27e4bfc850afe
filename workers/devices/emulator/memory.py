"""Device memory of the emulator: host memory that faults where a GPU would, or should.

Owns: `EmulatorArray` and the mapping below it. Runs in: tests, and the emulator device. Source: this
project. An array ends at a page without access, so an overrun is a fault. Freed memory keeps its
addresses but loses all access: a launch or a graph that still uses it faults.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED: Final = 0x10
_NO_RESERVE: Final = 0x4000
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_FAILED: Final = ctypes.c_void_p(-1).value
ALIGNMENT: Final = 16  # less than a GPU's 256, so that an array's end is close to the fence


def _revoke(address: int, num_bytes: int) -> None:
    """Give the pages back but never the addresses."""
    _LIBC.mmap(address, num_bytes, 0, _PRIVATE | _FIXED, -1, 0)


class _Mapping:
    """One allocation; its memory dies with it.

    Addresses that are never given back would leave holes where the process maps everything else, and code
    that is loaded later (the CPU engine's) would not find room within the 2 GiB that its jumps reach. So
    mappings are asked for one after the other in a region of their own; the system may place them elsewhere.
    """

    _next_address: ClassVar[int] = 1 << 44

    def __init__(self, num_bytes: int) -> None:
        used = max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        whole = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
        access, hint = mmap.PROT_READ | mmap.PROT_WRITE, _Mapping._next_address
        _Mapping._next_address += whole + mmap.PAGESIZE
        address = _LIBC.mmap(hint, whole + mmap.PAGESIZE, access, _PRIVATE, -1, 0)
        if address == _FAILED:
            raise MemoryError(f"the emulator cannot map {num_bytes} bytes")
        _LIBC.mprotect(address + whole, mmap.PAGESIZE, 0)
        weakref.finalize(self, _revoke, address, whole)
        self.address = address + whole - used
        buffer = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self.data: NDArray[np.uint8] = np.ctypeslib.as_array(buffer) if num_bytes else np.zeros(0, np.uint8)


class EmulatorArray:
    """A `DeviceArray`. `data` is for the backend and for tests that look at what kernels left."""

    def __init__(self, mapping: _Mapping, data: NDArray[np.generic]) -> None:
        self._mapping = mapping
        self.data = data
        self.address = data.ctypes.data if data.size else mapping.address

    @classmethod
    def allocate(cls, shape: int | tuple[int, ...], dtype: DTypeLike) -> "EmulatorArray":
        """New memory, every byte 0xFF: NaN for floats, -1 for integers."""
        kind = np.dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else shape
        mapping = _Mapping(int(np.prod(lengths, dtype=np.int64)) * kind.itemsize)
        mapping.data.fill(0xFF)
        return cls(mapping, mapping.data.view(kind).reshape(lengths))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths, row-major."""
        return self.data.shape

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The memory, flat."""
        return self.data.reshape(-1).view(np.uint8)

    def lives(self) -> Callable[[], bool]:
        """Whether the memory may still be used, as a question that does not keep it alive."""
        reference = weakref.ref(self._mapping)
        return lambda: reference() is not None

    def part(self, start_byte: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> "EmulatorArray":
        """An array in this one's memory."""
        if start_byte % ALIGNMENT or start_byte < 0:
            raise ValueError(f"a part starts at a multiple of {ALIGNMENT} bytes, not at {start_byte}")
        kind = np.dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else shape
        stop = start_byte + int(np.prod(lengths, dtype=np.int64)) * kind.itemsize
        if stop > self.nbytes:
            raise ValueError(f"bytes {start_byte}..{stop} of an array of {self.nbytes} bytes")
        return EmulatorArray(self._mapping, self.bytes[start_byte:stop].view(kind).reshape(lengths))

    def __array__(self, *_: object, **__: object) -> None:
        raise TypeError("host code cannot read device memory: download it")
