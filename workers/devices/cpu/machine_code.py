"""The engine's machine code: found in the user's cache or made once, then loaded.

Owns: the loaded code, and files `cpu/*.o` of the cache directory. Runs in the worker process, at start.
The cache holds plain object files, named by everything that shapes them; a damaged one is made again.
A second start imports neither Numba nor any kernel.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

import llvmlite.binding as llvm
import msgspec

from ds4.children import module_command
from workers.devices.cpu.spec import StepSpec
from workers.devices.cpu.target import Target, target_machine
from workers.devices.interface import PAGE_TOKENS
from workers.sampling.filters import UNDECIDED
from workers.sampling.seats import NO_TOP_K
from workers.sampling.summary import DRAW
from workers.sampling.uniform import GOLDEN, MIX_A, MIX_B

log: Final = logging.getLogger(__name__)
_DIGEST_BYTES: Final = 32
_COMPILE_S: Final = 900.0  # takes some ten seconds; many times that on a crowded machine
_ENTRY: Final = "ds4_cpu_step"
_FUNCTION: Final = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
)


# The modules of this package that shape the code.
SOURCES: Final = (
    "attention", "build", "control", "draw", "elementwise", "emit", "formats", "groups", "matmul", "memory",
    "operations", "spec", "step", "target", "tiles",
)  # fmt: skip
# What they take from other packages and the code holds as numbers.
CONSTANTS: Final = {
    "DRAW": DRAW.descr,
    "GOLDEN": GOLDEN,
    "MIX_A": MIX_A,
    "MIX_B": MIX_B,
    "NO_TOP_K": NO_TOP_K,
    "PAGE_TOKENS": PAGE_TOKENS,
    "UNDECIDED": UNDECIDED,
}


class MachineCode:
    """Loaded code; keeps it alive. Immutable, callable from any thread without the GIL held."""

    def __init__(self, code: bytes, target: Target) -> None:
        module = llvm.parse_assembly("")
        module.triple = target.triple
        # Code reaches its constants by 32-bit distances: llvmlite's memory manager reserves one range for
        # all sections, LLVM's own maps each wherever there is room.
        self._engine = llvm.create_mcjit_compiler(module, target_machine(target), use_lmm=True)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._function = _FUNCTION(self._engine.get_function_address(_ENTRY))
        # Numba's convention: where to put the result and an exception; the code raises none.
        self._result, self._exception = ctypes.c_int64(0), ctypes.c_int64(0)
        self._pointers = ctypes.addressof(self._result), ctypes.addressof(self._exception)

    def __call__(self, control: int, thread: int) -> None:
        """Run the entry: one step for thread 0, a helper's life for others."""
        status = self._function(*self._pointers, control, thread)
        assert status == 0


def load_machine_code(
    target: Target, spec: StepSpec, directory: Path | None, *, make: Callable[[], bytes] | None = None
) -> MachineCode:
    """The code of `object_code`, for this machine. Raises ImportError without Numba."""
    return MachineCode(object_code(target, spec, directory, make=make), target)


def object_code(
    target: Target, spec: StepSpec, directory: Path | None, *, make: Callable[[], bytes] | None = None
) -> bytes:
    """From `directory` (created when missing; None: no cache) or made now. Raises ImportError without Numba."""
    path = None if directory is None else directory / f"step-{cache_key(target, spec)}.o"
    found = None if path is None else _read(path)
    if found is not None:
        return found
    log.info("compiling the cpu engine: once a machine, some ten seconds", extra={"isa": target.isa.value})
    started = time.monotonic()
    made = (make or (lambda: _make(target, spec)))()
    log.info("compiled the cpu engine", extra={"seconds": round(time.monotonic() - started, 1)})
    if path is not None:
        _write(path, made)
    return made


def _make(target: Target, spec: StepSpec) -> bytes:
    """In a process of its own: the compiler's memory goes back, and its faults are not ours."""
    try:
        done = subprocess.run(
            module_command("workers.devices.cpu.build"),
            input=msgspec.json.encode((target, spec)),
            capture_output=True,
            check=False,
            timeout=_COMPILE_S,
        )
    except subprocess.TimeoutExpired:
        raise ImportError(f"the compiler did not end in {_COMPILE_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ImportError(lines[-1] if lines else f"the compiler ended with {done.returncode}")
    return done.stdout


def cache_key(target: Target, spec: StepSpec) -> str:
    """A digest of the target, the spec, the code's sources and constants, and the compiler's version."""
    digest = hashlib.sha256(
        msgspec.json.encode((target, spec, CONSTANTS, version("llvmlite"), version("numba")))
    )
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:32]


def _read(path: Path) -> bytes | None:
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    digest, code = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() != digest:
        log.warning("the compiled code is damaged and will be made again", extra={"path": str(path)})
        return None
    return code


def _write(path: Path, code: bytes) -> None:
    """Atomically; a directory that cannot be written only costs the next start its time."""
    name = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(name, path)
    except OSError as error:
        log.info("the compiled code could not be kept: %s", error, extra={"path": str(path)})
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)
