"""Blocks taken apart hold the numbers that the gguf package computes values from."""

from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.ggml_types import BLOCK_SIZES, GgmlType
from tests.workers.kernels.raw_weights import raw_weights
from workers.quant.blocks import Blocks, split_blocks
from workers.quant.dequantise import dequantise

_OFFSETS: Final = {GgmlType.Q4_0: 8, GgmlType.Q5_0: 16, GgmlType.Q3_K: 4, GgmlType.Q6_K: 32}


def _halves(raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float64)


def _values(blocks: Blocks, kind: GgmlType) -> NDArray[np.float64]:
    """Values from the parts, by the formulas of ggml's types that have no table."""
    count = len(blocks.values)
    q = blocks.values.astype(np.float64) - _OFFSETS.get(kind, 0)
    if kind is GgmlType.Q8_0:
        q = blocks.values.view(np.int8).astype(np.float64)
    q = q.reshape(count, -1, 32)
    if blocks.super_scales is None:
        scales = _halves(blocks.scales.reshape(count, -1))
        shift = scales[:, 1, None, None] if scales.shape[1] == 2 else 0
        return (q * scales[:, 0, None, None] + shift).reshape(count, -1)
    whole = _halves(blocks.super_scales)
    if kind in (GgmlType.Q4_K, GgmlType.Q5_K):
        scale, minimum = blocks.scales[..., 0, None] * whole[:, 0, None, None], blocks.scales[..., 1, None]
        return (q * scale - minimum * whole[:, 1, None, None]).reshape(count, -1)
    q = q.reshape(count, 16, 16)
    halves = blocks.scales.reshape(count, 16)
    if kind is GgmlType.Q2_K:
        scales, minima = (halves & 15) * whole[:, :1], (halves >> 4) * whole[:, 1:]
        return (q * scales[..., None] - minima[..., None]).reshape(count, -1)
    return (q * (halves.view(np.int8) * whole[:, :1])[..., None]).reshape(count, -1)


@pytest.mark.parametrize(
    "kind",
    [
        GgmlType.Q4_0,
        GgmlType.Q4_1,
        GgmlType.Q5_0,
        GgmlType.Q5_1,
        GgmlType.Q8_0,
        GgmlType.Q2_K,
        GgmlType.Q3_K,
        GgmlType.Q4_K,
        GgmlType.Q5_K,
        GgmlType.Q6_K,
    ],
    ids=lambda kind: kind.name,
)
def test_the_parts_make_up_the_values(kind: GgmlType) -> None:
    block_values, block_bytes = BLOCK_SIZES[kind]
    raw = raw_weights(kind, 5, block_values)
    blocks = split_blocks(raw.reshape(5, block_bytes), kind)
    wanted = dequantise(raw, kind, (5, block_values))
    assert np.allclose(_values(blocks, kind), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "kind", [GgmlType.IQ4_NL, GgmlType.IQ4_XS, GgmlType.MXFP4], ids=lambda kind: kind.name
)
def test_equal_codes_with_equal_scales_are_equal_values(kind: GgmlType) -> None:
    block_values, block_bytes = BLOCK_SIZES[kind]
    raw = raw_weights(kind, 4, block_values, 3)
    blocks = split_blocks(raw.reshape(4, block_bytes), kind)
    values = dequantise(raw, kind, (4, block_values)).reshape(4, -1, 32)
    codes = blocks.values.reshape(values.shape)
    assert codes.max() == 15
    for row in range(4):
        for block in range(values.shape[1]):
            by_code = {int(c): float(v) for c, v in zip(codes[row, block], values[row, block], strict=True)}
            assert all(
                by_code[int(c)] == v for c, v in zip(codes[row, block], values[row, block], strict=True)
            )
