"""Reading the CUDA sources: one text per module, the parameters of its kernels, compiler options.

Owns: `Kernel` and the rules that kernel files follow. Runs in: the worker at load; tests. Source: this
project.

Rules of a `.cu` file, so that NVRTC, CuPy and the emulator all take it unchanged:

- it includes only `*.cuh` of this package; inline PTX lives in `prelude.cuh` beside its CPU twin;
- an entry point is written out as `extern "C" __global__ void __launch_bounds__(n) name(plain parameters)`,
  so that its parameters can be read here; pointers, int, float, u32 and u64 only;
- compile-time parameters are preprocessor symbols, given by `Kernel.defines`;
- dynamic shared memory is declared by `DYNAMIC_SHARED(type, name)`, at most one a kernel;
- no block waits for another (the emulator runs blocks one after the other).
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

FOLDER: Final = Path(__file__).parent
_INCLUDE: Final = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_COMMENT: Final = re.compile(r"//[^\n]*")
_ENTRY: Final = re.compile(
    r'extern "C" __global__ void\s+__launch_bounds__\(([^()]*)\)\s+(\w+)\(([^()]*)\)\s*\{'
)


class ParameterKind(Enum):
    """The type of one kernel parameter; the value is its letter in `signature`."""

    POINTER = "p"
    INT32 = "i"
    UINT32 = "u"
    UINT64 = "q"
    FLOAT32 = "f"


_KIND_OF: Final = {
    "int": ParameterKind.INT32,
    "u32": ParameterKind.UINT32,
    "u64": ParameterKind.UINT64,
    "float": ParameterKind.FLOAT32,
}


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One entry point of one compiled module. Equal (source, defines) share a module."""

    source: str  # a file of this package, "elementwise.cu"
    entry: str
    defines: tuple[tuple[str, int], ...] = ()  # compile-time parameters, sorted by name


def source_text(name: str) -> str:
    """The file with its headers in place: one text for a compiler that knows no include folder."""
    done: set[str] = set()

    def expand(file: str) -> str:
        def include(match: re.Match[str]) -> str:
            header = match[1]
            if header in done:
                return ""
            done.add(header)
            return f'#line 1 "{header}"\n{expand(header)}#line {{}} "{file}"'

        text = (FOLDER / file).read_text()
        pieces, end = [], 0
        for match in _INCLUDE.finditer(text):
            next_line = text.count("\n", 0, match.end()) + 2
            pieces += [text[end : match.start()], include(match).replace("{}", str(next_line))]
            end = match.end()
        return "".join([*pieces, text[end:]])

    return f'#line 1 "{name}"\n{expand(name)}'


@cache
def parameters(source: str) -> Mapping[str, tuple[ParameterKind, ...]]:
    """Entry point to its parameters, for every kernel of a file."""
    text = _COMMENT.sub("", (FOLDER / source).read_text())
    found = {}
    for match in _ENTRY.finditer(text):
        kinds = []
        for declared in match[3].split(","):
            words = re.sub(r"\b(const|__restrict__)\b", "", declared).split()
            kinds.append(ParameterKind.POINTER if "*" in declared else _KIND_OF[words[0]])
        found[match[2]] = tuple(kinds)
    return found


@cache
def launch_bounds(source: str) -> Mapping[str, int]:
    """Entry point to the most threads a block of it may have, for every kernel of a file."""
    text = _COMMENT.sub("", (FOLDER / source).read_text())
    return {match[2]: int(match[1].split(",")[0]) for match in _ENTRY.finditer(text)}


def signature(kernel: Kernel) -> str:
    """One letter per parameter."""
    return "".join(kind.value for kind in parameters(kernel.source)[kernel.entry])


def compile_options(defines: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Options for NVRTC, whatever the architecture.

    No fast-math option: where a kernel may be approximate it says so by the intrinsic it calls. But CuPy adds
    -ftz=true to everything it compiles, so on a GPU float32 has no numbers below the normal ones; the emulator and
    `nvrtc` do the same.
    """
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in defines))
