"""Who lives: kernel locks on single bytes of one file, which nobody ever waits for.

Owns: the lease file of a shared directory. Runs in: worker, front ends, `ds4-server ring`.
Source: fcntl(2), open file description locks.

Byte 0 is the worker's, byte 1 + i that of front end i; holding the byte *is* holding the place. The
kernel drops a lock with the holder's last descriptor, SIGKILL included. Locks belong to the inode, so
they work across containers whose process numbers mean nothing to each other.
"""

import fcntl
import os
import struct
import weakref
from pathlib import Path
from typing import Final

WORKER_BYTE: Final = 0
FIRST_FRONT_END_BYTE: Final = 1
SUSPECT_BYTE: Final = 5000  # the front end one of whose requests goes on alone; above every place
LEASE_NAME: Final = "lease"

_OFD_GETLK: Final = 36
_OFD_SETLK: Final = 37
_FLOCK: Final = struct.Struct("@hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid
_TO_THE_END: Final = 0


class Leases:
    """The leases this process holds. Owned by one `WorkerRing` or `FrontEndRing`."""

    def __init__(self, directory: Path, *, create: bool = True) -> None:
        self.path = directory / LEASE_NAME
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._fd = self._open()
        close_in_child = weakref.WeakMethod(self.abandon)

        def forked() -> None:
            # A child that kept the descriptor would keep our leases alive after our death.
            close = close_in_child()
            if close is not None:
                close()

        os.register_at_fork(after_in_child=forked)

    def _open(self) -> int:
        return os.open(self.path, self._flags, 0o600)

    def _lock(self, kind: int, first_byte: int, num_bytes: int) -> bool:
        try:
            fcntl.fcntl(self._fd, _OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, first_byte, num_bytes, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_current(self) -> bool:
        """False when the file was removed (by the last one to leave) after we opened it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def take(self, byte: int) -> bool:
        """Take a place; False when somebody else lives there. Never waits."""
        while True:
            if not self._lock(fcntl.F_WRLCK, byte, 1):
                return False
            if self._is_current():
                return True
            os.close(self._fd)
            self._fd = self._open()

    def drop(self, byte: int) -> None:
        """Give a place back."""
        self._lock(fcntl.F_UNLCK, byte, 1)

    def is_held_by_other(self, byte: int) -> bool:
        """Whether another process lives there (asks without taking)."""
        answer = fcntl.fcntl(self._fd, _OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def take_all(self) -> bool:
        """Take every place: True when nobody else lives here, and then nobody can arrive."""
        return self._fd >= 0 and self._lock(fcntl.F_WRLCK, 0, _TO_THE_END) and self._is_current()

    def keep_only(self, byte: int) -> None:
        """Give back every place but this one, which nobody can take meanwhile."""
        self._lock(fcntl.F_UNLCK, 0, byte)
        self._lock(fcntl.F_UNLCK, byte + 1, _TO_THE_END)

    def take_all_leaving(self) -> bool:
        """Give up our own places, and take every place if we are the last one: then True.

        Of several that leave at once each may hold what stops the others. So the places are given up before
        the second look: whoever looks last finds nobody.
        """
        if self.take_all():
            return True
        self._lock(fcntl.F_UNLCK, 0, _TO_THE_END)
        return self.take_all()

    def remove(self) -> None:
        """Remove the file. Only while `take_all` holds: an arrival then finds out and opens a new one."""
        self.path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Close the descriptor: all leases fall, as they do when the process is killed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
