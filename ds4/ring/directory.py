"""The shared directory: its checks, the names in it, and clearing what the dead left.

Owns: every file name below the shared directory. Runs in: worker and front ends. Source: ours.
"""

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Final

from ds4.errors import ConfigError
from ds4.ring.liveness import FIRST_FRONT_END_BYTE, Leases

SEGMENT_NAME: Final = "ring"
UNFINISHED_PREFIX: Final = ".ring."
PROMPTS_NAME: Final = "prompts"
WORKER_BELL_NAME: Final = "worker.bell"
LIMITS_NAME: Final = "limits"  # of the first worker, for its successors
_FRONT_END_BELL: Final = re.compile(r"front-(\d{1,4})\.bell")
_SETTING: Final = "shared_dir"


def front_end_bell_path(directory: Path, index: int) -> Path:
    """The doorbell of front end `index`."""
    return directory / f"front-{index}.bell"


def prompt_path(directory: Path, index: int, request_id: int) -> Path:
    """The file of one long request of front end `index`."""
    return directory / PROMPTS_NAME / f"{index}-{request_id:016x}"


def open_directory(directory: Path) -> None:
    """Make the directory, or check the one that is there. Raises ConfigError that names the cure."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(directory)
    except FileExistsError:
        raise ConfigError(
            f"{directory} is not a directory; remove it or choose another shared directory", setting=_SETTING
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the shared directory {directory} cannot be made ({error.strerror}); choose another with --shared-dir",
            setting=_SETTING,
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"{directory} is not a directory; remove it or choose another shared directory", setting=_SETTING
        )
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the shared directory {directory} belongs to user {found.st_uid}, this process runs as "
            f"{os.geteuid()}; run both as one user or choose another with --shared-dir",
            setting=_SETTING,
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 or mode & 0o700 != 0o700 or not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the shared directory {directory} must be private and writable (mode 0700, it has {mode:04o}); "
            f"run: chmod 700 {directory}",
            setting=_SETTING,
        )


def unusable_directory(directory: Path, error: OSError) -> ConfigError:
    """What to raise when a file in the checked directory cannot be made or opened."""
    return ConfigError(
        f"the shared directory {directory} cannot be used ({error.strerror}); "
        "make room in it or choose another with --shared-dir",
        setting=_SETTING,
    )


def remove_prompts(directory: Path, index: int | None = None) -> None:
    """Delete the prompt files of one front end, or of all."""
    prefix = "" if index is None else f"{index}-"
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory / PROMPTS_NAME):
            if name.startswith(prefix):
                (directory / PROMPTS_NAME / name).unlink(missing_ok=True)


def remove_segment(directory: Path) -> None:
    """Delete the segment, the worker's bell and every prompt: the worker is gone."""
    for name in (SEGMENT_NAME, WORKER_BELL_NAME):
        (directory / name).unlink(missing_ok=True)
    remove_prompts(directory)
    with contextlib.suppress(OSError):
        (directory / PROMPTS_NAME).rmdir()


def remove_unfinished(directory: Path) -> None:
    """Delete segments whose maker died before it published them. Only for the worker's lease holder."""
    for name in os.listdir(directory):
        if name.startswith(UNFINISHED_PREFIX):
            (directory / name).unlink(missing_ok=True)


def remove_orphan_bells(directory: Path, leases: Leases) -> None:
    """Delete the bells of front ends that are dead, each while holding the dead one's place."""
    for name in os.listdir(directory):
        found = _FRONT_END_BELL.fullmatch(name)
        if found is None:
            continue
        byte = FIRST_FRONT_END_BYTE + int(found[1])
        if leases.take(byte):
            (directory / name).unlink(missing_ok=True)
            leases.drop(byte)


def remove_limits(directory: Path) -> None:
    """Forget the first worker's limits: nothing is left that could be resumed."""
    for name in (LIMITS_NAME, f".{LIMITS_NAME}.new"):
        (directory / name).unlink(missing_ok=True)


def leave(directory: Path, leases: Leases) -> None:
    """Give up every place; the last one to leave clears the directory."""
    if leases.take_all_leaving():
        for name in os.listdir(directory):
            if _FRONT_END_BELL.fullmatch(name):
                (directory / name).unlink(missing_ok=True)
        remove_segment(directory)
        remove_unfinished(directory)
        remove_limits(directory)
        leases.remove()
    leases.abandon()
