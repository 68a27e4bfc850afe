"""A wall clock that jumps, for processes that a test starts: a small library between them and the kernel.

Owns: one file with the offset, and the library, compiled at first use. Runs in: tests; needs a C compiler.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_suffix(".c")


def find_compiler() -> str | None:
    """A C compiler, if one is installed."""
    return shutil.which("cc") or shutil.which("gcc")


class JumpingClock:
    """The wall clock of every process that was started with `environment`."""

    def __init__(self, directory: Path, compiler: str) -> None:
        library = directory / "jumping_clock.so"
        command = [compiler, "-O1", "-shared", "-fPIC", str(_SOURCE), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True)
        self._file = directory / "clock"
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "JUMPING_CLOCK_FILE": str(self._file)}

    def set(self, offset_s: int) -> None:
        """From now on it shows the true time and so many seconds."""
        with self._file.open("r+b", buffering=0) as file:
            file.write(offset_s.to_bytes(8, "little", signed=True))
