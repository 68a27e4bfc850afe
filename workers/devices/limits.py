"""The sizes a device is made for: sessions, context and KV pages, from settings and free memory.

Owns: the arithmetic of `Limits`. Runs in: the worker, at start.
"""

import logging
from typing import Final, NoReturn

import msgspec

from ds4.config import Settings
from ds4.errors import ConfigError
from workers.devices.interface import PAGE_TOKENS, Limits
from workers.model.program import Dimensions

log = logging.getLogger(__name__)

# Of main memory left after the weights; the rest is for step buffers, the page cache and other processes.
HOST_KV_SHARE: Final = 0.4
# A context that was not asked for is cut to what memory holds, but below this the model is of no use.
_MIN_CONTEXT_TOKENS: Final = 512
_MIB: Final = 1 << 20


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a device would keep in memory, and how much of what is left then the KV cache may take."""

    weight_bytes: int
    kv_value_bytes: int
    kv_scale_bytes: int = 0  # beside each position's keys, and values, of a head
    buffer_bytes: int = 0
    kv_share: float = HOST_KV_SHARE
    # Pages beyond every session's full context keep prefixes of ended sessions: at most so many times that.
    max_kv_contexts: int = 1


def page_bytes(sizes: Dimensions, kv_value_bytes: int, kv_scale_bytes: int = 0) -> int:
    """One page of keys and values in all layers."""
    vector_bytes = sizes.head_size * kv_value_bytes + kv_scale_bytes
    return PAGE_TOKENS * 2 * sizes.num_layers * sizes.num_kv_heads * vector_bytes


def _too_small(settings: Settings, context: int, pages: int, page_size: int, free: int) -> NoReturn:
    needed = -(-context // PAGE_TOKENS) * page_size
    if settings.kv_cache_tokens:
        raise ConfigError(
            f"one session of {context} tokens does not fit a KV cache of {settings.kv_cache_tokens}; "
            "raise --kv-cache-tokens or lower --ctx",
            setting="kv_cache_tokens",
        )
    raise ConfigError(
        f"one session of {context} tokens needs {needed // _MIB} MiB of KV cache, but only "
        f"{pages * page_size // _MIB} MiB of {free // _MIB} MiB free memory are left for it; lower --ctx",
        setting="ctx",
    )


def step_limits(settings: Settings, sizes: Dimensions) -> Limits:
    """What a step's buffers are sized for at most, before it is known how many pages there will be."""
    seats = max(1, settings.batched_sessions)
    return Limits(
        max_rows=max(settings.max_batch_tokens, seats),
        max_seats=seats,
        max_context_tokens=min(settings.ctx or sizes.max_context_tokens, sizes.max_context_tokens),
        num_pages=0,
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
    page_size = page_bytes(sizes, need.kv_value_bytes, need.kv_scale_bytes)
    left = max(0, free_bytes - need.weight_bytes - need.buffer_bytes)
    if settings.kv_cache_tokens:
        pages = -(-settings.kv_cache_tokens // PAGE_TOKENS)
        if pages * page_size > left:
            raise ConfigError(
                f"a KV cache of {settings.kv_cache_tokens} tokens needs {pages * page_size // _MIB} MiB, but "
                f"{left // _MIB} MiB are free after the weights; lower --kv-cache-tokens",
                setting="kv_cache_tokens",
            )
    else:
        every_context = need.max_kv_contexts * seats * -(-context // PAGE_TOKENS)
        pages = min(every_context, int(left * need.kv_share) // page_size)
    if pages * PAGE_TOKENS < context:
        if settings.ctx or pages * PAGE_TOKENS < min(_MIN_CONTEXT_TOKENS, trained):
            _too_small(settings, context, pages, page_size, free_bytes)
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
            "kv_cache_mib": pages * page_size // _MIB,
            "weights_mib": need.weight_bytes // _MIB,
            "buffers_mib": need.buffer_bytes // _MIB,
            "free_mib": free_bytes // _MIB,
        },
    )
    return limits
