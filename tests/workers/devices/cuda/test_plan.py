"""How the GPU's memory is split."""

import logging

import pytest

from ds4.config import Settings
from ds4.errors import ConfigError
from workers.devices.cuda.backend import taken_bytes
from workers.devices.cuda.plan import RESERVE_BYTES, MemoryPlan, plan_memory
from workers.model.program import Dimensions

MIB, GIB = 1 << 20, 1 << 30
PAGE = 2 * MIB  # 16 tokens of the sizes below
LLAMA_8B = Dimensions(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    ffn_size=14336,
    vocab_size=128256,
    max_context_tokens=8192,
)


def plan(
    settings: Settings,
    *,
    total: int,
    free: int | None = None,
    weights: int = 5 * GIB,
    buffers: int = GIB,
    copies: int = 0,
) -> MemoryPlan:
    return plan_memory(
        settings,
        LLAMA_8B,
        weight_bytes=weights,
        buffer_bytes=buffers,
        copy_bytes=copies,
        kv_value_bytes=2,
        free_bytes=total - 300 * MIB if free is None else free,
        total_bytes=total,
    )


def test_the_cache_takes_all_that_the_fraction_leaves() -> None:
    made = plan(Settings(gpu_memory_fraction=0.75), total=16 * GIB)
    assert made.budget_bytes == 12 * GIB
    ends = 64 * 2 * MIB  # each layer's keys, and values, end somewhere in a piece of the driver's
    assert made.limits.num_pages * PAGE == made.kv_bytes == 6 * GIB - ends


def test_large_arrays_take_whole_pieces_and_small_ones_share() -> None:
    sizes = (100, MIB - 1, MIB, 2 * MIB, 2 * MIB + 1)
    assert [taken_bytes(size) for size in sizes] == [100, MIB - 1, 2 * MIB, 2 * MIB, 4 * MIB]


def test_everything_fits_what_others_left_free() -> None:
    made = plan(Settings(), total=80 * GIB, free=20 * GIB)
    assert made.budget_bytes == 20 * GIB - RESERVE_BYTES
    assert made.weight_bytes + made.buffer_bytes + made.kv_bytes <= made.budget_bytes


def test_a_small_model_on_a_large_gpu_keeps_a_few_contexts_a_session() -> None:
    made = plan(Settings(batched_sessions=4), total=140 * GIB)
    assert made.limits.num_pages == 4 * 4 * 8192 // 16


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(Settings(), total=6 * GIB)
    assert caught.value.setting == "gpu_memory_fraction"
    for number in ("5120 MiB of weights", "1024 MiB of buffers", "5529 MiB", "6144 MiB", "5844 MiB free"):
        assert number in str(caught.value)


def test_a_context_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="8192 tokens needs 1024 MiB") as caught:
        plan(Settings(ctx=8192, gpu_memory_fraction=0.9), total=7 * GIB)
    assert caught.value.setting == "ctx"


def test_a_large_gpu_keeps_a_copy_of_the_weights_for_prompts() -> None:
    made = plan(Settings(), total=140 * GIB, copies=14 * GIB)
    assert made.copy_bytes == 14 * GIB
    used = made.weight_bytes + made.buffer_bytes + made.copy_bytes + made.kv_bytes
    assert used <= made.budget_bytes
    assert made.kv_bytes > 4 * made.copy_bytes


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        (Settings(), 24 * GIB),  # the copy would take most of the cache
        (Settings(kv_cache_tokens=8192 * 108), 140 * GIB),  # all but 12 GiB were asked for
    ],
)
def test_no_copy_is_kept_at_the_cost_of_the_cache(settings: Settings, total: int) -> None:
    with_copy, without = (plan(settings, total=total, copies=size) for size in (14 * GIB, 0))
    assert with_copy.copy_bytes == 0
    assert with_copy.limits == without.limits


def test_the_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        plan(Settings(gpu_memory_fraction=0.75), total=16 * GIB)
    (record,) = [record for record in caplog.records if record.getMessage() == "GPU memory plan"]
    shown = record.__dict__
    assert (shown["budget_mib"], shown["weights_mib"], shown["kv_cache_mib"]) == (12288, 5120, 6144 - 128)
