"""Where the directory is that front ends and worker share, and how the supervisor keeps it.

Owns the default place, the supervisor's own lease, and the sweep of what killed servers left. Runs
at the start of each role and at the end of the supervisor. What lies in the directory and who may
use it is `ds4.ring.directory`'s.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.ring.directory import LIMITS_NAME, open_directory, remove_limits
from ds4.ring.liveness import WORKER_BYTE, Leases

# Far above the places of worker and front ends. While it is held nobody finds the directory empty.
SUPERVISOR_BYTE: Final = 4096

_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "ds4-server-"
# What the ring and the metrics keep there; nothing else in a configured directory is ever deleted.
_OURS: Final = (
    "ring",
    ".ring.*",
    "*.bell",
    "prompts",
    "metrics",
    "supervisor",
    ".supervisor.new",
    "quarantine",
    "salt",
    ".salt.*",
    "usage-*",
    "control",
    LIMITS_NAME,
    f".{LIMITS_NAME}.new",
)

# Stored responses outlive their server, so that conversations go on after a restart.
_STORE: Final = "responses.sqlite*"


def _default_base() -> Path:
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def shared_directory(settings: Settings) -> Path:
    """The configured directory, else one for this user and port under /dev/shm or the temporary directory.

    Nothing is created.
    """
    if settings.shared_dir:
        return Path(settings.shared_dir).absolute()
    return _default_base() / f"{_PREFIX}{os.geteuid()}-{settings.port}"


def prepare_shared_directory(settings: Settings) -> Path:
    """The shared directory, made if missing and checked. Raises ConfigError naming the cure."""
    path = shared_directory(settings)
    open_directory(path)
    return path


class Tenancy:
    """The supervisor's hold on the shared directory, from before its children start to their end."""

    def __init__(self, settings: Settings, *, is_found_again: bool = True) -> None:
        """`is_found_again`: the next server with such settings has the same directory.

        Raises ConfigError when the directory cannot be used or another server lives in it.
        """
        self.path = prepare_shared_directory(settings)
        self._is_found_again = is_found_again
        self._is_default = not settings.shared_dir
        self._leases = Leases(self.path)
        if not self._leases.take(SUPERVISOR_BYTE) or self._leases.is_held_by_other(WORKER_BYTE):
            self._leases.abandon()
            raise ConfigError(
                f"another server uses {self.path}; stop it or choose another --shared-dir",
                setting="shared_dir",
            )
        # A server that was killed left its prompts, and what was changed while it ran.
        if self._leases.take_all():
            _clear(self.path)
            self._leases.keep_only(SUPERVISOR_BYTE)
        remove_limits(self.path)

    def end(self) -> None:
        """Delete what the run left, and the directory itself where it is the default one and empty.

        Stored responses stay where the next server finds them.
        Where a role that somebody else started still lives, all stays as it is.
        """
        if self._leases.take_all_leaving():
            _empty(self.path, self._leases)
            if not self._is_found_again:
                _delete(self.path, _STORE)
            if self._is_default:
                _remove_if_empty(self.path)
        self._leases.abandon()


def is_inhabited(path: Path) -> bool:
    """Whether a worker or a supervisor lives in this directory. Nothing is created."""
    return _is_held(path, WORKER_BYTE) or is_supervised(path)


def is_supervised(path: Path) -> bool:
    """Whether a supervisor lives in this directory. Nothing is created."""
    return _is_held(path, SUPERVISOR_BYTE)


def _is_held(path: Path, byte: int) -> bool:
    try:
        leases = Leases(path, create=False)
    except OSError:
        return False
    held = leases.is_held_by_other(byte)
    leases.abandon()
    return held


def sweep_orphans() -> None:
    """Remove the default directories of servers of this user that were killed with all their children.

    Stored responses stay, and with them their directory. Where nothing else lies, a server may be about to move
    in, which must not find its place taken or gone: it takes its lease before it makes any file.
    """
    for path in _default_base().glob(f"{_PREFIX}{os.geteuid()}-*"):
        if not any(any(path.glob(pattern)) for pattern in _OURS):
            continue
        with contextlib.suppress(OSError):
            leases = Leases(path)
            if leases.take_all():
                _empty(path, leases)
                _remove_if_empty(path)
            leases.abandon()


def _empty(path: Path, leases: Leases) -> None:
    _clear(path)
    leases.remove()


def _clear(path: Path) -> None:
    for pattern in _OURS:
        _delete(path, pattern)


def _delete(path: Path, pattern: str) -> None:
    for entry in path.glob(pattern):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # something foreign in it: leave it, and its directory
        path.rmdir()
