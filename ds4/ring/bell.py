"""Doorbell: a named FIFO in the shared directory, one byte means "look again".

Owns: the descriptor of one FIFO. Runs in: worker and front ends. Source: fifo(7).

Both sides open it read-write and non-blocking, so there is never end-of-file, EPIPE or ENXIO, and it
outlives either side. A full FIFO means that wake-ups are waiting anyway.
"""

import contextlib
import os
import select
import stat
from pathlib import Path
from typing import Final

from ds4.errors import RingError

_SELECT_LIMIT: Final = 1024  # select(2) takes no descriptor from here on
_DRAIN_BYTES: Final = 4096


class Bell:
    """One end of a doorbell. Owned by the process that opened it."""

    def __init__(self, path: Path, *, create: bool) -> None:
        if create:
            with contextlib.suppress(FileExistsError):  # an earlier process's FIFO works on
                os.mkfifo(path, 0o600)
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not stat.S_ISFIFO(os.fstat(self.fd).st_mode):
            self.close()
            raise RingError(f"{path} is not a FIFO; remove it")

    def ring(self) -> None:
        """Wake the other side. Call after a fence, so that what it is woken for is visible."""
        with contextlib.suppress(BlockingIOError):
            os.write(self.fd, b"\1")

    def drain(self) -> None:
        """Forget all rings so far."""
        try:
            while len(os.read(self.fd, _DRAIN_BYTES)) == _DRAIN_BYTES:
                pass
        except BlockingIOError:
            pass

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a ring or the timeout. True after a ring."""
        if self.fd < _SELECT_LIMIT:  # resolves microseconds, poll(2) rounds up to milliseconds
            return bool(select.select([self.fd], [], [], timeout_s)[0])
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def close(self) -> None:
        """Give the descriptor back; the FIFO stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
