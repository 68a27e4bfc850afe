"""Where the GPU's memory goes: weights and buffers first, KV pages from what is left of our share.

Owns: the arithmetic, and its one log line. Runs in: the worker, at start, before anything is allocated.
"""

import logging
from typing import Final

import msgspec

from ds4.config import Settings
from ds4.errors import ConfigError
from workers.devices.cuda.backend import PIECE_BYTES
from workers.devices.interface import PAGE_TOKENS, Limits
from workers.devices.limits import Need, compute_limits, page_bytes
from workers.model.program import Dimensions

log = logging.getLogger(__name__)

# What the driver takes on the side: loaded code, local memory, graphs.
RESERVE_BYTES: Final = 256 << 20
# Pages for prefixes of ended sessions, in multiples of every session's full context.
_MAX_KV_CONTEXTS: Final = 4
# Copies of the weights speed up large prompt chunks. They get at most this part of what weights and buffers leave.
_COPY_SHARE: Final = 0.25
_MIB: Final = 1 << 20


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The split, in bytes. Nothing is allocated past `budget_bytes`."""

    total_bytes: int
    free_bytes: int
    budget_bytes: int
    weight_bytes: int
    buffer_bytes: int
    copy_bytes: int  # of the weights, for large prompt chunks; 0: none are kept
    kv_bytes: int
    limits: Limits


def plan_memory(
    settings: Settings,
    sizes: Dimensions,
    *,
    weight_bytes: int,
    buffer_bytes: int,
    copy_bytes: int,
    kv_value_bytes: int,
    free_bytes: int,
    total_bytes: int,
) -> MemoryPlan:
    """Split the GPU's memory. Raises ConfigError, with the numbers, where the model does not fit.

    `buffer_bytes` are for the largest step that the settings allow. `copy_bytes` are taken where there is plenty:
    never from a KV cache that was asked for.
    """
    budget = min(int(settings.gpu_memory_fraction * total_bytes), free_bytes - RESERVE_BYTES)
    if weight_bytes + buffer_bytes > budget:
        raise ConfigError(
            f"the model does not fit: {weight_bytes // _MIB} MiB of weights and {buffer_bytes // _MIB} MiB of "
            f"buffers, but {max(0, budget) // _MIB} MiB may be taken of the GPU's {total_bytes // _MIB} MiB "
            f"({free_bytes // _MIB} MiB free, --gpu-memory-fraction {settings.gpu_memory_fraction:g}); use a "
            "smaller quantisation, lower --max-batch-tokens, or use --device cpu",
            setting="gpu_memory_fraction",
        )
    left = budget - weight_bytes - buffer_bytes
    asked = -(-settings.kv_cache_tokens // PAGE_TOKENS) * page_bytes(sizes, kv_value_bytes)
    if copy_bytes > min(_COPY_SHARE * left, left - asked):
        copy_bytes = 0
    unused = (
        2 * sizes.num_layers * PIECE_BYTES
    )  # at the ends of each layer's keys and values, and nobody's page
    need = Need(
        weight_bytes=weight_bytes,
        buffer_bytes=buffer_bytes + copy_bytes + unused,
        kv_value_bytes=kv_value_bytes,
        kv_share=1.0,
        max_kv_contexts=_MAX_KV_CONTEXTS,
    )
    limits = compute_limits(settings, sizes, need, budget)
    plan = MemoryPlan(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        budget_bytes=budget,
        weight_bytes=weight_bytes,
        buffer_bytes=buffer_bytes,
        copy_bytes=copy_bytes,
        kv_bytes=limits.num_pages * page_bytes(sizes, kv_value_bytes),
        limits=limits,
    )
    log.info(
        "GPU memory plan",
        extra={
            "total_mib": total_bytes // _MIB,
            "free_mib": free_bytes // _MIB,
            "budget_mib": budget // _MIB,
            "weights_mib": weight_bytes // _MIB,
            "buffers_mib": buffer_bytes // _MIB,
            "bfloat16_copy_mib": copy_bytes // _MIB,
            "kv_cache_mib": plan.kv_bytes // _MIB,
            "kv_cache_tokens": limits.num_pages * PAGE_TOKENS,
        },
    )
    return plan
