"""Raw GGML blocks taken apart: whole values and whole scales, one format at a time.

Owns: `split_blocks`, the inverse of ggml's bit packing. Runs in: the worker, at load. Source: the block
structures of ggml-common.h and their decoding in the gguf package (`gguf.quants`), which the tests
compare with. Nothing is computed: no scale is multiplied, no value is converted.
"""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.ggml_types import GgmlType

Bytes = NDArray[np.uint8]
U8: Final = np.uint8  # a Python int would widen the type that mypy sees


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """`values` [blocks, inputs of a block]: the stored number of each weight, one byte (IQ2_XXS: 8 inputs a
    16-bit code: entry, then 8 sign bits). `scales` [blocks, blocks of 32 in it, bytes]: float16 scale and
    min, or byte multipliers. `super_scales` [blocks, bytes]: the float16 scale (and min) of 256 inputs.
    """

    values: Bytes
    scales: Bytes
    super_scales: Bytes | None = None


def split_blocks(raw: Bytes, kind: GgmlType) -> Blocks:
    """Take apart `raw` [blocks, bytes of a block], all of one format."""
    return _SPLITTERS[kind](raw)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, m] to [n, 2m]: all low nibbles, then all high ones."""
    return np.concatenate([packed & U8(15), packed >> U8(4)], axis=1)


def _bit_plane(packed: Bytes) -> Bytes:
    """[n, m] to [n, 8m]: bit i of a little-endian string of bits."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _halves(raw: Bytes) -> Bytes:
    return raw.reshape(len(raw), 1, -1)


def _q4_0(raw: Bytes) -> Blocks:
    return Blocks(values=_nibbles(raw[:, 2:]), scales=_halves(raw[:, :2]))


def _q4_1(raw: Bytes) -> Blocks:
    return Blocks(values=_nibbles(raw[:, 4:]), scales=_halves(raw[:, :4]))


def _q5_0(raw: Bytes) -> Blocks:
    return Blocks(values=_nibbles(raw[:, 6:]) | _bit_plane(raw[:, 2:6]) << U8(4), scales=_halves(raw[:, :2]))


def _q5_1(raw: Bytes) -> Blocks:
    return Blocks(values=_nibbles(raw[:, 8:]) | _bit_plane(raw[:, 4:8]) << U8(4), scales=_halves(raw[:, :4]))


def _q8_0(raw: Bytes) -> Blocks:
    return Blocks(values=raw[:, 2:], scales=_halves(raw[:, :2]))


def _mxfp4(raw: Bytes) -> Blocks:
    return Blocks(values=_nibbles(raw[:, 1:]), scales=_halves(raw[:, :1]))


def _k4_scales(packed: Bytes) -> Bytes:
    """The 12 bytes of 6-bit scales and minima of Q4_K and Q5_K: [n, 12] to [n, 8, (scale, min)]."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & U8(63), (rest & U8(15)) | (low >> U8(6)) << U8(4)], axis=1)
    minima = np.concatenate([high & U8(63), (rest >> U8(4)) | (high >> U8(6)) << U8(4)], axis=1)
    return np.stack([scales, minima], axis=2)


def _k_nibbles(packed: Bytes) -> Bytes:
    """[n, 128] to [n, 256]: of each 32 bytes first the low nibbles, then the high ones."""
    parts = packed.reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & U8(15)
    return parts.reshape(len(packed), 256)


def _q4_k(raw: Bytes) -> Blocks:
    return Blocks(values=_k_nibbles(raw[:, 16:]), scales=_k4_scales(raw[:, 4:16]), super_scales=raw[:, :4])


def _q5_k(raw: Bytes) -> Blocks:
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (raw[:, None, 16:48] >> shifts & U8(1)).reshape(len(raw), 256)
    return Blocks(
        values=_k_nibbles(raw[:, 48:]) | high << U8(4),
        scales=_k4_scales(raw[:, 4:16]),
        super_scales=raw[:, :4],
    )


def _two_bit_fields(packed: Bytes) -> Bytes:
    """[n, 64] to [n, 256]: of each 32 bytes the four fields, one after the other."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts & U8(3)).reshape(len(packed), 256)


def _q2_k(raw: Bytes) -> Blocks:
    return Blocks(
        values=_two_bit_fields(raw[:, 16:80]),
        scales=raw[:, :16].reshape(-1, 8, 2),  # low nibble scale, high nibble min
        super_scales=raw[:, 80:],
    )


def _q3_k(raw: Bytes) -> Blocks:
    mask, packed, scales, scale = raw[:, :32], raw[:, 32:96], raw[:, 96:108], raw[:, 108:]
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (mask[:, None] >> shifts & U8(1)).reshape(len(raw), 256)
    low4 = np.concatenate([scales[:, :8] & U8(15), scales[:, :8] >> U8(4)], axis=1)
    top_shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    top2 = (scales[:, None, 8:] >> top_shifts & U8(3)).reshape(len(raw), 16)
    six = (low4 | top2 << U8(4)).astype(np.int8) - np.int8(32)
    return Blocks(
        values=_two_bit_fields(packed) | high << U8(2),
        scales=six.view(np.uint8).reshape(-1, 8, 2),
        super_scales=scale,
    )


def _q6_k(raw: Bytes) -> Blocks:
    low, high, scales, scale = raw[:, :128], raw[:, 128:192], raw[:, 192:208], raw[:, 208:]
    # Of each 64 low bytes: low nibbles of the first and second 32, then the high ones.
    low4 = low.reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & U8(15)
    return Blocks(
        values=low4.reshape(len(raw), 256) | _two_bit_fields(high) << U8(4),
        scales=scales.reshape(-1, 8, 2),
        super_scales=scale,
    )


def _iq4_xs(raw: Bytes) -> Blocks:
    high = raw[:, 2:4].copy().view(np.uint16)
    low = raw[:, 4:8]
    low4 = np.stack([low & U8(15), low >> U8(4)], axis=2).reshape(len(raw), 8)
    high2 = (high >> np.arange(0, 16, 2, dtype=np.uint16) & U8(3)).astype(np.uint8)
    six = (low4 | high2 << U8(4)).astype(np.int8) - np.int8(32)
    packed = raw[:, 8:].reshape(-1, 8, 16)
    return Blocks(
        values=np.concatenate([packed & U8(15), packed >> U8(4)], axis=2).reshape(len(raw), 256),
        scales=six.view(np.uint8).reshape(-1, 8, 1),
        super_scales=raw[:, :2],
    )


def _iq2_xxs(raw: Bytes) -> Blocks:
    # Of each 32 inputs: four 8-bit entries, then 28 bits of signs (7 for 8 inputs, the eighth makes
    # their number even) and a 4-bit scale s, which stands for (2s + 1) / 8.
    words = raw[:, 2:].copy().view(np.uint32).reshape(len(raw), 8, 2)
    entries = words[:, :, :1].copy().view(np.uint8).reshape(len(raw), 8, 4)
    seven = words[:, :, 1:] >> np.array([0, 7, 14, 21], np.uint32) & 127
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    parity = (parity ^ parity >> 1) & 1
    signs = (seven | parity << 7).astype(np.uint8)
    multipliers = (2 * (words[:, :, 1] >> 28) + 1).astype(np.uint8)
    return Blocks(
        values=np.stack([entries, signs], axis=3).reshape(len(raw), 64),
        scales=multipliers.reshape(-1, 8, 1),
        super_scales=raw[:, :2],
    )


_SPLITTERS: Final[dict[GgmlType, Callable[[Bytes], Blocks]]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
    GgmlType.IQ2_XXS: _iq2_xxs,
    GgmlType.IQ4_NL: _q4_0,
    GgmlType.IQ4_XS: _iq4_xs,
    GgmlType.MXFP4: _mxfp4,
}
