"""The first worker's limits, kept for its successors: a resumed stream must fit where it fitted.

Owns: the file `limits` of the shared directory. Runs in: the worker, at start. Without --ctx and
--kv-cache-tokens a device is sized by the memory that is free at that moment, which for a successor is
another; some devices also compute other last bits for other sizes. The file goes with the last one to
leave, and counts only for a model of the same shape under the same settings.
"""

import hashlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from ds4.ring.directory import LIMITS_NAME
from workers.devices.interface import PAGE_TOKENS, Device, Limits

log = logging.getLogger(__name__)

Open = Callable[[Settings, ModelFile], tuple[Device, Limits]]

# What the sizes depend on, besides the model and the free memory.
_SETTINGS: Final = (
    "batch_invariant",
    "batched_sessions",
    "ctx",
    "device",
    "gpu_memory_fraction",
    "kv_cache_tokens",
    "max_batch_tokens",
)
# What is at fault where memory is short.
_MEMORY_SETTINGS: Final = frozenset({"ctx", "gpu_memory_fraction", "kv_cache_tokens"})
_MAX_FILE_BYTES: Final = 4096


class KeptLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds. `key` stands for the model and the settings."""

    key: str
    max_context_tokens: Annotated[int, msgspec.Meta(ge=1)]
    num_pages: Annotated[int, msgspec.Meta(ge=1)]


def open_with_kept_limits(
    open_device: Open, settings: Settings, model: ModelFile, directory: Path
) -> tuple[Device, Limits]:
    """As `open_device`, with the limits of the workers before where they can be had, and never less context.

    Raises ConfigError, with the numbers, also where it would have to be less.
    """
    kept = _read(directory / LIMITS_NAME)
    if kept is None or kept.key != _key(settings, model):
        return open_device(settings, model)
    # As it was, else what fits by the usual rule, else one whole context; what was asked for is not changed.
    sizes = (kept.num_pages * PAGE_TOKENS, 0, kept.max_context_tokens)
    for kv_cache_tokens in (settings.kv_cache_tokens,) if settings.kv_cache_tokens else sizes:
        wanted = msgspec.structs.replace(
            settings, ctx=kept.max_context_tokens, kv_cache_tokens=kv_cache_tokens
        )
        try:
            return open_device(wanted, model)
        except ConfigError as error:
            if error.setting not in _MEMORY_SETTINGS:
                raise
            log.warning("there is less memory than for the worker before: %s", error)
            refusal = error
    raise ConfigError(
        f"{refusal} (running requests rely on the context of {kept.max_context_tokens} tokens that the worker "
        "before had; give back memory, or stop the whole server for a smaller one)",
        setting=refusal.setting,
    )


def keep_limits(settings: Settings, model: ModelFile, directory: Path, limits: Limits) -> None:
    """Note the limits of the worker that now serves, unless they are those of a worker before it."""
    path, key = directory / LIMITS_NAME, _key(settings, model)
    before = _read(path)
    if before is None or before.key != key:
        _write(
            path,
            KeptLimits(key=key, max_context_tokens=limits.max_context_tokens, num_pages=limits.num_pages),
        )


def _key(settings: Settings, model: ModelFile) -> str:
    parts: list[Any] = [model.tokenizer_hash, model.max_context_tokens, list(model.tensors.values())]
    parts += [getattr(settings, name) for name in _SETTINGS]
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def _read(path: Path) -> KeptLimits | None:
    """What the file says; None without one, and where it is not one of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        try:
            return msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=KeptLimits)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            log.warning("ignored a damaged file of limits", extra={"path": str(path)})
            return None


def _write(path: Path, kept: KeptLimits) -> None:
    """Replace the file at once; without room for it the worker still serves."""
    unfinished = path.with_name(f".{path.name}.new")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(unfinished, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(kept))
        unfinished.replace(path)
    except OSError as error:
        log.warning("the limits cannot be kept for a successor", extra={"error": error.strerror})
