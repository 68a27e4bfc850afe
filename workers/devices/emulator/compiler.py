"""Compiling a kernel file with g++ into a library that runs it on the CPU.

Owns: the cache of compiled libraries, one file per content, in a folder of the user's own below the
system's temporary folder. Runs in: tests, and the emulator device. Source: this project.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from ds4.errors import ConfigError
from workers.kernels.sources import parameters, source_text

_HEADERS: Final = ("fibers.h", "matrix.h", "cuda_on_cpu.h")
_HERE: Final = Path(__file__).parent
# No contraction: the kernels say where a product and a sum are rounded together.
FLAGS: tuple[str, ...] = (  # the coverage report adds to them
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-shared",
    "-march=native",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-w",
    "-DCUDA_ON_CPU",
    "-fsanitize=alignment,bounds,shift",
    "-fno-sanitize-recover=all",
)


def compiler() -> str | None:
    """Where g++ is, if it is installed."""
    return shutil.which("g++")


def cache_folder() -> Path:
    """The folder of compiled libraries, made if needed. Raises ConfigError if another user owns it."""
    folder = Path(tempfile.gettempdir()) / f"ds4-server-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise ConfigError(f"{folder} belongs to somebody else: remove it")
    return folder


def translation_unit(source: str) -> str:
    """The kernel file as C++: everything in an anonymous namespace, then one trampoline per kernel.

    The namespace keeps a kernel from being bound to a C function of the same name.
    """
    exports = "".join(f"EMULATOR_EXPORT({entry})\n" for entry in parameters(source))
    return f'#include "cuda_on_cpu.h"\nnamespace {{\n{source_text(source)}\n}}\n{exports}'


@cache
def _key_of_headers() -> bytes:
    return (
        b"".join((_HERE / name).read_bytes() for name in _HEADERS) + platform.machine().encode() + _features()
    )


def _features() -> bytes:
    """What the processor can do, which -march=native makes use of: the cache may come from another machine."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def build(source: str, defines: Sequence[tuple[str, int]], extra_flags: Sequence[str] = ()) -> Path:
    """The library of one module, compiled unless the cache has it. Raises ConfigError with g++'s words."""
    command = compiler()
    if command is None:
        raise ConfigError("the emulator compiles the kernels with g++, which is not installed")
    text = translation_unit(source)
    flags = [*FLAGS, *(f"-D{name}={value}" for name, value in defines), *extra_flags]
    key = hashlib.sha256("\0".join([text, *flags]).encode() + _key_of_headers()).hexdigest()[:24]
    folder = cache_folder()
    library = folder / f"{Path(source).stem}-{key}.so"
    if library.exists():
        return library
    with (folder / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that want the same module: one compiles, the others wait
        if library.exists():
            return library
        unit, partial = folder / f"{library.stem}.cpp", folder / f"{library.stem}.part"
        unit.write_text(text)
        done = subprocess.run(
            [command, *flags, f"-I{_HERE}", str(unit), "-o", str(partial)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ConfigError(f"g++ cannot compile {source} with {dict(defines)}:\n{done.stderr}")
        partial.replace(library)
    return library


def load(library: Path) -> ctypes.CDLL:
    """The library, with the types of its functions that are not kernels."""
    loaded = ctypes.CDLL(str(library))
    loaded.emulator_message.restype = ctypes.c_char_p
    return loaded
