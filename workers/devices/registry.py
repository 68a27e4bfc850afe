"""Which device runs the model, and what it is sized for.

Owns: the choice and the arithmetic of `Limits`. Runs in: the worker, at start. Devices are imported here
and only when chosen, so that a machine without Numba or a GPU driver still has the others.
"""

import importlib
import logging
from typing import Final, NoReturn

import msgspec

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from workers.devices.interface import PAGE_TOKENS, Device, Limits
from workers.devices.memory import available_bytes
from workers.model.program import Dimensions, Program
from workers.model.registry import load_program

log = logging.getLogger(__name__)

# Of the memory left after the weights; the rest is for step buffers, the page cache and other processes.
_KV_SHARE: Final = 0.4
# A context that was not asked for is cut to what memory holds, but below this the model is of no use.
_MIN_CONTEXT_TOKENS: Final = 512
_MIB: Final = 1 << 20


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a device would keep in memory."""

    weight_bytes: int
    kv_value_bytes: int


def _need(name: str, model: ModelFile, program: Program) -> Need:
    if name == "reference":  # float32 throughout
        sizes = program.dimensions
        per_layer = sizes.hidden_size * (
            (2 * sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size + 3 * sizes.ffn_size
        )
        values = sizes.num_layers * per_layer + 2 * sizes.vocab_size * sizes.hidden_size
        return Need(weight_bytes=4 * values, kv_value_bytes=4)
    weight_bytes = sum(tensor.num_bytes for tensor in model.tensors.values())
    return Need(weight_bytes=weight_bytes, kv_value_bytes=2)


def _page_bytes(sizes: Dimensions, kv_value_bytes: int) -> int:
    """One page of keys and values in all layers."""
    return PAGE_TOKENS * 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_size * kv_value_bytes


def _too_small(settings: Settings, context: int, pages: int, page_bytes: int, free: int) -> NoReturn:
    needed = -(-context // PAGE_TOKENS) * page_bytes
    if settings.kv_cache_tokens:
        raise ConfigError(
            f"one session of {context} tokens does not fit a KV cache of {settings.kv_cache_tokens}; "
            "raise --kv-cache-tokens or lower --ctx",
            setting="kv_cache_tokens",
        )
    raise ConfigError(
        f"one session of {context} tokens needs {needed // _MIB} MiB of KV cache, but only "
        f"{pages * page_bytes // _MIB} MiB of {free // _MIB} MiB free memory are left for it; lower --ctx",
        setting="ctx",
    )


def compute_limits(settings: Settings, sizes: Dimensions, need: Need, free_bytes: int) -> Limits:
    """What to size a device for, given `free_bytes` of memory before anything is loaded.

    Raises ConfigError, with the numbers, where not even one session fits.
    """
    trained = sizes.max_context_tokens
    if settings.ctx > trained:
        raise ConfigError(
            f"--ctx is {settings.ctx}, but the model was trained for {trained} tokens; lower it",
            setting="ctx",
        )
    context = settings.ctx or trained
    seats = max(1, settings.batched_sessions)
    page_bytes = _page_bytes(sizes, need.kv_value_bytes)
    left = max(0, free_bytes - need.weight_bytes)
    if settings.kv_cache_tokens:
        pages = -(-settings.kv_cache_tokens // PAGE_TOKENS)
        if pages * page_bytes > left:
            raise ConfigError(
                f"a KV cache of {settings.kv_cache_tokens} tokens needs {pages * page_bytes // _MIB} MiB, but "
                f"{left // _MIB} MiB are free after the weights; lower --kv-cache-tokens",
                setting="kv_cache_tokens",
            )
    else:
        pages = min(seats * -(-context // PAGE_TOKENS), int(left * _KV_SHARE) // page_bytes)
    if pages * PAGE_TOKENS < context:
        if settings.ctx or pages * PAGE_TOKENS < min(_MIN_CONTEXT_TOKENS, trained):
            _too_small(settings, context, pages, page_bytes, free_bytes)
        context = pages * PAGE_TOKENS
        log.warning(
            "the context window is cut to what the KV cache holds",
            extra={"context_tokens": context, "trained_tokens": trained},
        )
    limits = Limits(
        max_rows=max(settings.max_batch_tokens, seats),
        max_seats=seats,
        max_context_tokens=context,
        num_pages=pages,
    )
    log.info(
        "limits",
        extra={
            "sessions": seats,
            "context_tokens": context,
            "kv_cache_tokens": pages * PAGE_TOKENS,
            "kv_cache_mib": pages * page_bytes // _MIB,
            "weights_mib": need.weight_bytes // _MIB,
            "free_mib": free_bytes // _MIB,
        },
    )
    return limits


def _open_reference(program: Program, limits: Limits, threads: int) -> Device:
    from workers.devices.reference.device import ReferenceDevice

    return ReferenceDevice(program, limits, threads)


def _choose(settings: Settings) -> str:
    """The device's name: what was asked for, or the best that can be imported."""
    if settings.device == "cuda":
        raise ConfigError(
            "the cuda device is not available in this version; use --device cpu", setting="device"
        )
    if settings.device == "reference":
        return "reference"
    try:
        importlib.import_module("workers.devices.cpu.device")
    except ImportError as error:
        if settings.device == "cpu":
            raise ConfigError(
                f"the cpu device needs Numba, which cannot be imported ({error}); "
                "install ds4-server[cpu] or use --device reference",
                setting="device",
            ) from None
        log.warning(
            "the cpu device cannot be imported (%s): falling back to the NumPy reference, which is "
            "10 to 20 times slower and takes four bytes a weight; install ds4-server[cpu]",
            error,
        )
        return "reference"
    return "cpu"


def open_device(settings: Settings, model: ModelFile) -> tuple[Device, Limits]:
    """Load `model` onto the device that `settings` name. Raises ConfigError (ModelFileError included)."""
    program = load_program(model)
    name = _choose(settings)
    limits = compute_limits(settings, program.dimensions, _need(name, model, program), available_bytes())
    try:
        if name == "reference":
            return _open_reference(program, limits, settings.threads), limits
        module = importlib.import_module("workers.devices.cpu.device")
        device: Device = module.CpuDevice(program, limits, threads=settings.threads)
    except MemoryError:
        raise ConfigError(
            f"not enough memory for {model.path} on the {name} device with {limits.num_pages} KV pages; "
            "lower --kv-cache-tokens, --ctx or --batched-sessions",
            setting="kv_cache_tokens",
        ) from None
    return device, limits
