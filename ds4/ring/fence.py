"""One full (sequentially consistent) memory fence, without a compiled extension.

Owns: choosing and testing a fence. Runs in: worker and front ends.
Source: the C11 function `atomic_thread_fence`; Intel SDM vol. 2 (MFENCE); Arm ARM (DMB ISH);
membarrier(2).

Every shared word has one writer and is a naturally aligned 64-bit integer, which x86-64 and arm64
load and store in one piece. So this fence is the only ordering primitive of the ring. A lock pair
(acquire, release) would not do on arm64: both neighbours may move into the locked region.
"""

import ctypes
import functools
import os
import platform
from collections.abc import Callable
from typing import Final

import msgspec

from ds4.errors import RingError

_SEQ_CST: Final = 5  # __ATOMIC_SEQ_CST
_PROT_READ: Final = 1
_PROT_EXEC: Final = 4
_MAP_PRIVATE: Final = 2
_CODE_BYTES: Final = 4096
_SELF_TEST_CALLS: Final = 100

# The instruction alone, and a function body that is the instruction and a return.
_BARRIERS: Final = {
    "x86_64": (bytes.fromhex("0faef0"), bytes.fromhex("f0")),  # mfence; any locked instruction
    "aarch64": (bytes.fromhex("bf3b03d5"), bytes.fromhex("bf3f03d5")),  # dmb ish; dmb sy
}
_FUNCTIONS: Final = {
    "x86_64": bytes.fromhex("0faef0c3"),  # mfence; ret
    "aarch64": bytes.fromhex("bf3b03d5c0035fd6"),  # dmb ish; ret
}
_MEMBARRIER_CALL: Final = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_QUERY: Final = 0
_MEMBARRIER_GLOBAL_EXPEDITED: Final = 1 << 1
_MEMBARRIER_REGISTER_GLOBAL_EXPEDITED: Final = 1 << 2


class Fence(msgspec.Struct, frozen=True):
    """`call()` is the fence; `name` says how it is made."""

    name: str
    call: Callable[[], object]


def libatomic_fence() -> Fence:
    """The C library function, through PyDLL: it keeps the interpreter lock, which halves the cost."""
    function = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    function.restype, function.argtypes = None, (ctypes.c_int,)
    address = ctypes.cast(function, ctypes.c_void_p).value
    barriers = _BARRIERS.get(platform.machine(), ())
    # A library that compiled the fence away, or only jumps elsewhere, is not trusted.
    if address is None or not any(code in ctypes.string_at(address, 64) for code in barriers):
        raise OSError("atomic_thread_fence contains no barrier instruction")
    return Fence("libatomic", functools.partial(function, _SEQ_CST))


def code_page_fence() -> Fence:
    """A few bytes of machine code, written to a memory file and mapped read and execute.

    The page is never writable and executable at once, and the kernel keeps the instruction cache
    coherent when it maps it.
    """
    code = _FUNCTIONS.get(platform.machine())
    if code is None:
        raise OSError(f"no machine code for {platform.machine()}")
    descriptor = os.memfd_create("ds4-fence", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, code.ljust(_CODE_BYTES, b"\0"))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )
        address = libc.mmap(None, _CODE_BYTES, _PROT_READ | _PROT_EXEC, _MAP_PRIVATE, descriptor, 0)
    finally:
        os.close(descriptor)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "the system refuses executable mappings")
    if ctypes.string_at(address, len(code)) != code:
        raise OSError("the code page does not hold the code")
    return Fence("code page", ctypes.PYFUNCTYPE(None)(address))


def membarrier_fence() -> Fence:
    """The system call that makes every registered process pass a barrier; slow, but needs nothing."""
    number = _MEMBARRIER_CALL.get(platform.machine())
    if number is None:
        raise OSError(f"no membarrier on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    offered = libc.syscall(number, _MEMBARRIER_QUERY, 0, 0)
    if offered < 0 or not offered & _MEMBARRIER_GLOBAL_EXPEDITED:
        raise OSError(ctypes.get_errno(), "membarrier is not offered")
    if libc.syscall(number, _MEMBARRIER_REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "membarrier registration is refused")

    def call() -> None:
        if libc.syscall(number, _MEMBARRIER_GLOBAL_EXPEDITED, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "membarrier failed")

    return Fence("membarrier", call)


MAKERS: Final[tuple[Callable[[], Fence], ...]] = (libatomic_fence, code_page_fence, membarrier_fence)


def choose_fence(makers: tuple[Callable[[], Fence], ...] = MAKERS) -> Fence:
    """The first maker whose fence exists and survives its test. Raises RingError when none does."""
    refusals = []
    for make in makers:
        try:
            fence = make()
            for _ in range(_SELF_TEST_CALLS):
                fence.call()
        except (OSError, AttributeError) as error:
            refusals.append(f"{make.__name__}: {error}")
        else:
            return fence
    raise RingError(
        "this machine offers no memory fence; install libatomic (Debian: libatomic1). " + "; ".join(refusals)
    )


@functools.cache
def process_fence() -> Fence:
    """The fence of this process, chosen once."""
    return choose_fence()
