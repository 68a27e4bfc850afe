"""Products whose rows come out the same bits: the choice of call sizes, and how a step is cut."""

import numpy as np
import pytest
from numpy.typing import NDArray

from workers.devices.reference.fixed_order import (
    MAX_BLOCK_ROWS,
    FixedOrderMatmul,
    agreeing_sizes,
    cover,
)

Array = NDArray[np.float32]


def forward(weight: Array, x: Array) -> Array:
    """A product with the order of sums that a large call has here."""
    result: Array = (x[:, None, :] * weight[None]).sum(axis=2, dtype=np.float32)
    return result


def backward(weight: Array, x: Array) -> Array:
    """The same product, summed in another order: equal in value, other bits."""
    return forward(np.ascontiguousarray(weight[:, ::-1]), np.ascontiguousarray(x[:, ::-1]))


WEIGHT = np.random.default_rng(5).standard_normal((3, 100), np.float32)


def test_a_size_that_sums_in_another_order_is_not_mixed_in() -> None:
    sizes = agreeing_sizes(lambda x: (backward if len(x) < 8 else forward)(WEIGHT, x), 100)
    assert sizes == (256, 128, 64, 32, 16, 8)


def test_a_size_whose_rows_depend_on_their_place_is_not_used() -> None:
    def multiply(x: Array) -> Array:
        if len(x) <= 16:
            return forward(WEIGHT, x)
        return np.concatenate([forward(WEIGHT, x[:-1]), backward(WEIGHT, x[-1:])])

    assert agreeing_sizes(multiply, 100) == (16, 8, 4, 2, 1)


def test_where_nothing_agrees_rows_go_one_by_one() -> None:
    def multiply(x: Array) -> Array:
        scale = np.linspace(1, 2, len(x), dtype=np.float32)[:, None]
        return forward(WEIGHT, x) * scale

    assert agreeing_sizes(multiply, 100) == (1,)


@pytest.mark.parametrize("sizes", [(256, 128, 64, 32, 16, 8, 4, 2), (64, 32), (8, 4), (8,), (1,)])
def test_a_cover_holds_every_row_once_and_passes_the_end_by_less_than_a_call(sizes: tuple[int, ...]) -> None:
    for num_rows in range(600):
        calls = cover(num_rows, sizes)
        end = 0
        for start, size in calls:
            assert start == end < num_rows
            assert size in sizes
            end = start + size
        assert num_rows <= end < num_rows + sizes[0]


def test_large_batches_use_large_calls() -> None:
    assert cover(512, (256, 128, 8)) == [(0, 256), (256, 256)]
    assert cover(5, (256, 8, 2)) == [(0, 8)]
    assert cover(257, (256, 8, 2)) == [(0, 256), (256, 2)]


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (281, 64), (64, 1536), (1000, 40)])
@pytest.mark.parametrize("order", ["inputs first", "outputs first"])
def test_a_row_has_the_same_bits_alone_and_in_every_batch(outputs: int, inputs: int, order: str) -> None:
    rng = np.random.default_rng(6)
    weight = rng.standard_normal((outputs, inputs), np.float32)
    product = FixedOrderMatmul(weight.T if order == "outputs first" else weight.T.copy(), 512, {})
    x = np.zeros((512 + MAX_BLOCK_ROWS, inputs), np.float32)
    out = np.zeros((512 + MAX_BLOCK_ROWS, outputs), np.float32)
    rows = rng.standard_normal((400, inputs), np.float32)

    def multiply(some: Array) -> Array:
        x[: len(some)] = some
        x[len(some) :] = np.nan  # rows past the end must not matter
        with np.errstate(all="ignore"):
            product(x, len(some), out)
        return out[: len(some)].copy()

    together = multiply(rows)
    np.testing.assert_allclose(together, rows @ weight.T, rtol=1e-4, atol=1e-3)
    for start, count in ((0, 1), (399, 1), (7, 2), (100, 31), (3, 33), (200, 64), (17, 300)):
        np.testing.assert_array_equal(multiply(rows[start : start + count]), together[start : start + count])


def test_damaged_weights_are_no_reason_to_fail() -> None:
    weight = WEIGHT.copy()
    weight[1, 5] = np.nan
    assert agreeing_sizes(lambda x: forward(weight, x), 100) == agreeing_sizes(
        lambda x: forward(WEIGHT, x), 100
    )
