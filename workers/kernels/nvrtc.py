"""Compiling kernels to machine code with no GPU and no driver, and what the assembler says about them.

Owns: nothing. Runs in: tests and `python -m workers.kernels.nvrtc`, a developer's report; the device itself
compiles through CuPy. Source: NVRTC through NVIDIA's bindings (packages cuda-bindings, nvidia-cuda-nvrtc and
nvidia-cuda-runtime, of which the last has the headers); the limits of `Architecture` are those of the CUDA
programming guide's table of compute capabilities.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from workers.kernels.sources import Kernel, compile_options, launch_bounds, source_text


class Architecture(msgspec.Struct, frozen=True):
    """What one multiprocessor has."""

    registers: int
    threads: int
    blocks: int
    shared_bytes: int
    shared_bytes_of_block: int


_KIB: Final = 1024
ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "sm_80": Architecture(65536, 2048, 32, 164 * _KIB, 163 * _KIB),
        "sm_86": Architecture(65536, 1536, 16, 100 * _KIB, 99 * _KIB),
        "sm_89": Architecture(65536, 1536, 24, 100 * _KIB, 99 * _KIB),
        "sm_90": Architecture(65536, 2048, 32, 228 * _KIB, 227 * _KIB),
        "sm_120": Architecture(65536, 1536, 24, 100 * _KIB, 99 * _KIB),
    }
)
_CUPYS_OPTIONS: Final = ("-ftz=true", "--device-as-default-execution-space")  # which it adds to ours
_RESERVED_SHARED: Final = 1024  # of a block, taken by the system
_REGISTER_UNIT: Final = 256  # registers of a warp are given out in such units


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What one kernel takes."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    threads: int  # its launch bound

    def occupancy(self, architecture: Architecture, dynamic_shared_bytes: int = 0) -> float:
        """Threads that a multiprocessor can hold at once, of those it could."""
        warps = self.threads // 32
        per_warp = -(-self.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
        shared = self.shared_bytes + dynamic_shared_bytes + _RESERVED_SHARED
        blocks = min(
            architecture.registers // per_warp // warps,
            architecture.threads // self.threads,
            architecture.blocks,
            architecture.shared_bytes // shared,
        )
        return blocks * self.threads / architecture.threads


@cache
def include_folders() -> tuple[str, ...]:
    """Where the packages put CUDA's headers."""
    try:
        import nvidia
    except ImportError:
        return ()
    roots = [Path(root) for root in nvidia.__path__]
    return tuple(
        str(folder) for root in roots for folder in sorted(root.glob("*/include")) if folder.is_dir()
    )


class CompilationError(Exception):
    """NVRTC's log."""


def _checked(result: tuple[Any, ...]) -> Any:
    from cuda.bindings import nvrtc

    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilationError(f"NVRTC: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def compile_text(
    text: str, name: str, architecture: str, defines: Sequence[tuple[str, int]]
) -> tuple[bytes, str]:
    """(machine code, log) of one source text. Raises CompilationError."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    options = [
        *compile_options(defines),
        f"-arch={architecture}",
        "--ptxas-options=-v",
        *_CUPYS_OPTIONS,
        *(f"-I{folder}" for folder in include_folders()),
    ]
    result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    size = _checked(nvrtc.nvrtcGetProgramLogSize(program))
    buffer = b" " * size
    _checked(nvrtc.nvrtcGetProgramLog(program, buffer))
    log = buffer.decode(errors="replace").rstrip("\0\n ")
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilationError(log)
    size = _checked(nvrtc.nvrtcGetCUBINSize(program))
    code = b" " * size
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code, log


_ENTRY: Final = re.compile(r"Compiling entry function '(\w+)'")
_STACK: Final = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED: Final = re.compile(r"Used (\d+) registers")
_SHARED: Final = re.compile(r"(\d+) bytes smem")


def read_log(log: str, bounds: Mapping[str, int]) -> dict[str, Resources]:
    """The assembler's report, by entry point."""
    found: dict[str, Resources] = {}
    entry, stack = "", (0, 0)
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, stack = match[1], (0, 0)
        elif match := _STACK.search(line):
            stack = int(match[1]), int(match[2]) + int(match[3])
        elif (match := _USED.search(line)) and entry:
            shared = _SHARED.search(line)
            found[entry] = Resources(
                registers=int(match[1]),
                stack_bytes=stack[0],
                spill_bytes=stack[1],
                shared_bytes=int(shared[1]) if shared else 0,
                threads=bounds[entry],
            )
    return found


def resources(source: str, defines: Sequence[tuple[str, int]], architecture: str) -> dict[str, Resources]:
    """Compile one module and report on its kernels. Raises CompilationError."""
    code, log = compile_text(source_text(source), source, architecture, defines)
    assert code[:4] == b"\x7fELF"
    return read_log(log, launch_bounds(source))


def compile_kernel(kernel: Kernel, architecture: str) -> bytes:
    """Machine code of the kernel's module. Raises CompilationError."""
    return compile_text(source_text(kernel.source), kernel.source, architecture, kernel.defines)[0]
