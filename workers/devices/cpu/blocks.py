"""GGML blocks taken apart: values, scales and minima of the types the engine computes on directly.

Owns nothing. Runs in the worker process, at load. Source: the block layouts of ggml-common.h and the
formulas of ggml-quants.c (ggml-org/llama.cpp). Oracle: `workers.quant.dequantise`.
"""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.model_file import BLOCK_SIZES, GgmlType
from workers.devices.cpu.formats import BLOCK_INPUTS, WeightKind

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]


class Blocks(msgspec.Struct, frozen=True):
    """Rows of quantised weights in blocks of 32 inputs.

    `values` uint8: [rows, blocks, 32], or [rows, blocks, 16] nibble pairs for 4-bit kinds (input i low,
    input 16 + i high). S8 values are two's complement. `scales`, `minima`: float16 [rows, blocks, 1 or 2].
    """

    values: Bytes
    scales: Halves
    minima: Halves | None = None


def _half(raw: Bytes, offset: int) -> Halves:
    return np.ascontiguousarray(raw[..., offset : offset + 2]).view(np.float16)


def _q4_0(raw: Bytes) -> Blocks:
    return Blocks(raw[..., 2:], _half(raw, 0))


def _q4_1(raw: Bytes) -> Blocks:
    return Blocks(raw[..., 4:], _half(raw, 0), _half(raw, 2))


def _q8_0(raw: Bytes) -> Blocks:
    return Blocks(raw[..., 2:], _half(raw, 0))


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """[..., 4] high bits (bit i of 32) and [..., 16] nibble pairs to [..., 32] values."""
    bits = np.unpackbits(high, axis=-1, bitorder="little")
    nibbles = np.concatenate([low & 15, low >> 4], axis=-1)
    values: Bytes = (nibbles | (bits << 4)).view(np.uint8)
    return values


def _q5_0(raw: Bytes) -> Blocks:
    return Blocks(_five_bits(raw[..., 2:6], raw[..., 6:]) - np.uint8(16), _half(raw, 0))


def _q5_1(raw: Bytes) -> Blocks:
    return Blocks(_five_bits(raw[..., 4:8], raw[..., 8:]), _half(raw, 0), _half(raw, 2))


def _by_32(values: Bytes) -> Bytes:
    """[rows, superblocks, 256] to [rows, blocks, 32]."""
    return values.reshape(len(values), -1, BLOCK_INPUTS)


def _scaled(factor: Halves, whole: NDArray[np.int16] | Bytes, per_block: int) -> Halves:
    """Factor [rows, superblocks, 1] times whole [rows, superblocks, n], as float16 [rows, blocks, per_block]."""
    with np.errstate(all="ignore"):  # a hostile file may hold any float16
        product = (factor.astype(np.float32) * whole).astype(np.float16)
    return product.reshape(len(product), -1, per_block)


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[..., 12] bytes to eight scales and eight minima of 6 bits."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return scales, minima


def _k_nibbles(packed: Bytes) -> Bytes:
    """[..., 128] bytes to [..., 8, 32] values: each 32 bytes hold one block low and the next high."""
    groups = packed.reshape(*packed.shape[:-1], 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=-2).reshape(*packed.shape[:-1], 8, 32)


def _q4_k(raw: Bytes) -> Blocks:
    scales, minima = _six_bit_pairs(raw[..., 4:16])
    values = _by_32(_k_nibbles(raw[..., 16:]).reshape(*raw.shape[:-1], 256))
    pairs = (values[..., :16] | (values[..., 16:] << 4)).view(np.uint8)
    return Blocks(pairs, _scaled(_half(raw, 0), scales, 1), _scaled(-_half(raw, 2), minima, 1))


def _q5_k(raw: Bytes) -> Blocks:
    scales, minima = _six_bit_pairs(raw[..., 4:16])
    planes = np.arange(8, dtype=np.uint8)[:, None]
    high = (raw[..., None, 16:48] >> planes & 1) << 4
    values = _by_32((_k_nibbles(raw[..., 48:]) | high).view(np.uint8).reshape(*raw.shape[:-1], 256))
    return Blocks(values, _scaled(_half(raw, 0), scales, 1), _scaled(-_half(raw, 2), minima, 1))


def _two_bit_planes(packed: Bytes) -> Bytes:
    """[..., 64] bytes to [..., 256] values: 32 bytes hold four runs of 32, lowest bits first."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    halves = packed.reshape(*packed.shape[:-1], 2, 1, 32)
    return (halves >> shifts & 3).view(np.uint8).reshape(*packed.shape[:-1], 256)


def _q6_k(raw: Bytes) -> Blocks:
    low = raw[..., :128].reshape(*raw.shape[:-1], 2, 1, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*raw.shape[:-1], 256)
    values = nibbles | (_two_bit_planes(raw[..., 128:192]) << 4)
    whole = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).astype(np.int16)
    factor = _half(raw, 208)
    return Blocks(_by_32(values), _scaled(factor, whole, 2), _scaled(factor, whole * np.int16(-32), 2))


def _q3_k(raw: Bytes) -> Blocks:
    planes = np.arange(8, dtype=np.uint8)[:, None]
    high = (raw[..., None, :32] >> planes & 1).reshape(*raw.shape[:-1], 256) << 2
    values = (_two_bit_planes(raw[..., 32:96]) | high).view(np.uint8)
    low, rest = raw[..., 96:104], raw[..., None, 104:108]
    nibbles = np.concatenate([low & 15, low >> 4], axis=-1)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = (rest >> shifts & 3).reshape(*raw.shape[:-1], 16)
    whole = (nibbles | (upper << 4)).astype(np.int16) - np.int16(32)
    factor = _half(raw, 108)
    return Blocks(_by_32(values), _scaled(factor, whole, 2), _scaled(factor, whole * np.int16(-4), 2))


def _q2_k(raw: Bytes) -> Blocks:
    values = _by_32(_two_bit_planes(raw[..., 16:80]))
    packed = raw[..., :16]
    scales = _scaled(_half(raw, 80), packed & 15, 2)
    return Blocks(values, scales, _scaled(-_half(raw, 82), packed >> 4, 2))


_READERS: Final[dict[int, tuple[WeightKind, Callable[[Bytes], Blocks]]]] = {
    GgmlType.Q4_0: (WeightKind.U4, _q4_0),
    GgmlType.Q4_1: (WeightKind.U4_MIN, _q4_1),
    GgmlType.Q5_0: (WeightKind.S8, _q5_0),
    GgmlType.Q5_1: (WeightKind.U8_MIN, _q5_1),
    GgmlType.Q8_0: (WeightKind.S8, _q8_0),
    GgmlType.Q2_K: (WeightKind.U8_HALVES, _q2_k),
    GgmlType.Q3_K: (WeightKind.U8_HALVES, _q3_k),
    GgmlType.Q4_K: (WeightKind.U4_MIN, _q4_k),
    GgmlType.Q5_K: (WeightKind.U8_MIN, _q5_k),
    GgmlType.Q6_K: (WeightKind.U8_HALVES, _q6_k),
}
_FLOATS: Final = {
    GgmlType.F16: WeightKind.F16,
    GgmlType.BF16: WeightKind.BF16,
    GgmlType.F32: WeightKind.F32,
}


def runtime_kind(ggml_type: int) -> WeightKind:
    """The format that weights of `ggml_type` are kept in; those without a reader become 8-bit."""
    if ggml_type in _READERS:
        return _READERS[ggml_type][0]
    return _FLOATS.get(GgmlType(ggml_type), WeightKind.S8)


def has_reader(ggml_type: int) -> bool:
    """True where `read_blocks` takes the type; others go through dequantisation."""
    return ggml_type in _READERS


def read_blocks(ggml_type: int, raw: Bytes) -> Blocks:
    """`raw` uint8 [rows, bytes a row] of whole blocks."""
    num_bytes = BLOCK_SIZES[GgmlType(ggml_type)][1]
    return _READERS[ggml_type][1](raw.reshape(len(raw), -1, num_bytes))


def quantise_rows(rows: NDArray[np.float32]) -> Blocks:
    """float32 [rows, inputs] to 8 bits: scale = largest magnitude of a block / 127."""
    blocks = rows.reshape(len(rows), -1, BLOCK_INPUTS)
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    inverse = np.divide(1, scales, dtype=np.float32, where=scales > 0, out=np.zeros(scales.shape, np.float32))
    with np.errstate(all="ignore"):
        values = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8)
    return Blocks(values.view(np.uint8), scales)
