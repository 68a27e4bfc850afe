"""The directory that front ends and worker share: where it is, whether it is safe, how it is emptied.

Owns the default place and the checks that every role makes before it touches the ring. Runs in the
supervisor and at the start of each role. One user, mode 0700: whoever can write here can read
prompts and disturb every session.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from ds4.config import Settings
from ds4.errors import ConfigError

_MEMORY: Final = Path("/dev/shm")
# What the ring and the metrics keep here; nothing else in a configured directory is ever deleted.
_OURS: Final = ("ctl*", "lease", "*.bell", "metrics*", "prompt")


def shared_directory(settings: Settings) -> Path:
    """The configured directory, else one for this user and port under /dev/shm or the temporary directory.

    Nothing is created.
    """
    if settings.shared_dir:
        return Path(settings.shared_dir).absolute()
    base = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"ds4-server-{os.getuid()}-{settings.port}"


def prepare_shared_directory(settings: Settings) -> Path:
    """The shared directory, made if missing and checked. Raises ConfigError naming the cure."""
    path = shared_directory(settings)
    try:
        path.mkdir(mode=0o700, parents=bool(settings.shared_dir), exist_ok=True)
        about = path.lstat()
    except FileExistsError:
        raise ConfigError(
            f"shared directory {path} is not a directory; set --shared-dir", setting="shared_dir"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"shared directory {path} cannot be made: {reason}; set --shared-dir to a tmpfs directory of this user",
            setting="shared_dir",
        ) from None
    if not stat.S_ISDIR(about.st_mode):  # a symbolic link: somebody else may choose where it leads
        raise ConfigError(
            f"shared directory {path} is not a directory; set --shared-dir", setting="shared_dir"
        )
    if about.st_uid != os.getuid():
        raise ConfigError(
            f"shared directory {path} belongs to user {about.st_uid}, not to {os.getuid()}; "
            "remove it or set --shared-dir",
            setting="shared_dir",
        )
    if about.st_mode & 0o022:
        raise ConfigError(
            f"shared directory {path} can be written by other users; run: chmod 700 {path}",
            setting="shared_dir",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"shared directory {path} cannot be written; run: chmod 700 {path}, or set --shared-dir",
            setting="shared_dir",
        )
    return path


def clear_shared_directory(settings: Settings) -> None:
    """Delete what a run left, and the directory itself where it is the default one.

    Only for the supervisor, after every child has ended.
    """
    path = shared_directory(settings)
    for pattern in _OURS:
        for entry in path.glob(pattern):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    if not settings.shared_dir:
        with contextlib.suppress(OSError):  # something foreign in it: leave it, and its directory
            path.rmdir()
