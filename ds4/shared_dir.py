"""Where the directory is that front ends and worker share, and how the supervisor empties it.

Owns the default place. Runs at the start of each role and at the end of the supervisor. What lies
in the directory and who may use it is `ds4.ring.directory`'s.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ds4.config import Settings
from ds4.ring.directory import open_directory
from ds4.ring.liveness import Leases

_MEMORY: Final = Path("/dev/shm")
# What the ring and the metrics keep there; nothing else in a configured directory is ever deleted.
_OURS: Final = ("ring", ".ring.*", "*.bell", "prompts", "metrics")


def shared_directory(settings: Settings) -> Path:
    """The configured directory, else one for this user and port under /dev/shm or the temporary directory.

    Nothing is created.
    """
    if settings.shared_dir:
        return Path(settings.shared_dir).absolute()
    base = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"ds4-server-{os.geteuid()}-{settings.port}"


def prepare_shared_directory(settings: Settings) -> Path:
    """The shared directory, made if missing and checked. Raises ConfigError naming the cure."""
    path = shared_directory(settings)
    open_directory(path)
    return path


def clear_shared_directory(settings: Settings) -> None:
    """Delete what a run left, and the directory itself where it is the default one.

    For the supervisor, after every child has ended. Another server's directory is left alone: it
    holds places in it.
    """
    path = shared_directory(settings)
    if not path.is_dir():
        return
    leases = Leases(path)
    try:
        if not leases.take_all():
            return
        for pattern in _OURS:
            for entry in path.glob(pattern):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
        leases.remove()
    finally:
        leases.abandon()
    if not settings.shared_dir:
        with contextlib.suppress(OSError):  # something foreign in it: leave it, and its directory
            path.rmdir()
