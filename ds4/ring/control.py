"""The control page: a few settings that may be changed while everything runs.

Owns: the file `control` in the shared directory. Runs in: `ds4-server control` (writes), worker and front
ends (read). Source: ours.

It outlives workers, so a change holds until it is taken back or the server ends. One 64-bit word per
control, 0: as started, else the value + 1. A word is written by one instruction and means nothing together
with another one, so writers need no lock: the last one wins. The last word of the page is the supervisor's:
the process id of the worker that was killed last, and not by what it did.
"""

import contextlib
import mmap
import os
from pathlib import Path
from typing import Final

from ds4.errors import ConfigError

FILE_NAME: Final = "control"
PAGE_BYTES: Final = 4096
_KILLED: Final = PAGE_BYTES // 8 - 1
# The order is the layout: only ever add at the end.
NAMES: Final = (
    "decode_coalesce_us",
    "batch_log",
    "batched_sessions",
    "max_batch_tokens",
    "slots_per_front_end",
)


class ControlPage:
    """One mapping of the page. Owned by the process that made it."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError where the directory cannot be used."""
        path = directory / FILE_NAME
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, PAGE_BYTES)  # or touching it could kill us
                self._map = mmap.mmap(descriptor, PAGE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(
                f"the shared directory {directory} cannot be used ({error.strerror}); "
                "make room in it or choose another with --shared-dir",
                setting="shared_dir",
            ) from None
        self._words = memoryview(self._map).cast("Q")

    def get(self, name: str, started_with: int) -> int:
        """The value in force."""
        word = self._words[NAMES.index(name)]
        return word - 1 if word else started_with

    def is_set(self, name: str) -> bool:
        """Whether somebody changed it."""
        return self._words[NAMES.index(name)] != 0

    def set(self, name: str, value: int | None) -> None:
        """Change it, or with None take the change back."""
        self._words[NAMES.index(name)] = 0 if value is None else value + 1

    @property
    def killed_worker(self) -> int:
        """The process id of the worker that was killed last, by somebody outside; 0: none was."""
        return self._words[_KILLED]

    def note_killed(self, pid: int) -> None:
        """That worker was. For the supervisor, before it starts the next one."""
        self._words[_KILLED] = pid

    def snapshot(self) -> bytes:
        """All words, to see whether anything changed."""
        return self._map[: 8 * len(NAMES)]

    def close(self) -> None:
        """Unmap it."""
        self._words.release()
        with contextlib.suppress(BufferError):
            self._map.close()
