"""The sizes a device gets."""

import logging

import pytest

from ds4.config import Settings
from ds4.errors import ConfigError
from workers.devices.limits import Need, compute_limits
from workers.model.program import Dimensions

GIB = 1 << 30
NEED = Need(weight_bytes=GIB, kv_value_bytes=2)
# A token takes 2 * 16 layers * 8 heads * 64 values * 2 bytes = 32 KiB, a page 512 KiB.
SIZES = Dimensions(
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    ffn_size=8192,
    vocab_size=32000,
    max_context_tokens=4096,
)


def test_every_session_gets_its_whole_context_where_memory_allows() -> None:
    limits = compute_limits(Settings(batched_sessions=8), SIZES, NEED, 64 * GIB)
    assert limits.max_seats == 8
    assert limits.max_context_tokens == 4096
    assert limits.num_pages == 8 * 4096 // 16
    assert limits.max_rows == Settings().max_batch_tokens


def test_the_cache_takes_no_more_than_its_share_of_free_memory() -> None:
    limits = compute_limits(Settings(batched_sessions=64), SIZES, NEED, 6 * GIB)
    assert limits.num_pages * 512 * 1024 == 2 * GIB  # two fifths of the five left beside the weights


def test_batching_off_is_one_seat() -> None:
    limits = compute_limits(Settings(batched_sessions=0), SIZES, NEED, 64 * GIB)
    assert (limits.max_seats, limits.num_pages) == (1, 256)


def test_a_step_has_a_row_for_every_seat() -> None:
    limits = compute_limits(Settings(batched_sessions=100, max_batch_tokens=16), SIZES, NEED, 64 * GIB)
    assert limits.max_rows == 100


def test_a_context_nobody_asked_for_shrinks_to_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        limits = compute_limits(Settings(), SIZES, NEED, GIB + (160 << 20))
    assert limits.num_pages == 128  # 64 MiB
    assert limits.max_context_tokens == 2048
    assert "context window is cut" in caplog.text


def test_a_context_that_was_asked_for_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"4096 tokens needs 128 MiB .* 64 MiB of 1184 MiB") as caught:
        compute_limits(Settings(ctx=4096), SIZES, NEED, GIB + (160 << 20))
    assert caught.value.setting == "ctx"


def test_a_machine_without_room_for_a_useful_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower --ctx"):
        compute_limits(Settings(), SIZES, NEED, GIB + (20 << 20))
    with pytest.raises(ConfigError, match="lower --ctx"):
        compute_limits(Settings(), SIZES, NEED, GIB // 2)


def test_a_context_beyond_the_training_is_refused() -> None:
    with pytest.raises(ConfigError, match="trained for 4096"):
        compute_limits(Settings(ctx=5000), SIZES, NEED, 64 * GIB)


def test_the_cache_size_that_was_asked_for_is_used_or_refused() -> None:
    limits = compute_limits(Settings(kv_cache_tokens=10_000), SIZES, NEED, 64 * GIB)
    assert limits.num_pages == 625
    with pytest.raises(ConfigError, match=r"1000000 tokens needs .* are free") as caught:
        compute_limits(Settings(kv_cache_tokens=1_000_000), SIZES, NEED, 6 * GIB)
    assert caught.value.setting == "kv_cache_tokens"
    with pytest.raises(ConfigError, match="does not fit a KV cache of 1000"):
        compute_limits(Settings(kv_cache_tokens=1000, ctx=2000), SIZES, NEED, 64 * GIB)


def test_buffers_are_taken_off_and_all_the_rest_may_be_cache() -> None:
    need = Need(weight_bytes=GIB, kv_value_bytes=2, buffer_bytes=GIB, kv_share=1.0, max_kv_contexts=4)
    limits = compute_limits(Settings(batched_sessions=64), SIZES, need, 6 * GIB)
    assert limits.num_pages * 512 * 1024 == 4 * GIB
    limits = compute_limits(Settings(batched_sessions=2), SIZES, need, 64 * GIB)
    assert limits.num_pages == 4 * 2 * 256
