"""GGUF blocks to the order in which the CUDA kernels read weights.

Owns: the packed layout, together with `workers/kernels/formats.cuh`, which describes it and reads it.
Runs in: the worker, at load. Source: block formats as in ggml-common.h; the order is this project's.

Quantised matrices are cut into tiles of TILE_OUTPUTS outputs and units of UNIT_INPUTS inputs, padded with
zero weights. In index order an output is (tile, o, g) with o in 0..1 and g in 0..7, an input is
(unit, b, h, t, j): 32-input block b, half h, lane t in 0..3, byte j in 0..3. No bit of a block is lost, but
the scales of the K types are stored in whole bytes (Q4_K: 4.625 bits a weight instead of 4.5).
Float matrices stay [outputs, inputs], row-major.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.ggml_types import BLOCK_SIZES, GgmlType
from workers.quant.blocks import U8, Blocks, split_blocks
from workers.quant.dequantise import row_bytes

TILE_OUTPUTS: Final = 16
UNIT_INPUTS: Final = 64
_SUPER_UNITS: Final = 4  # units in 256 inputs
_SUPER_INPUTS: Final = 256
_TILES_AT_ONCE: Final = 64  # bounds the memory of the unpacked values

FLOAT_TYPES: Final = frozenset({GgmlType.F32, GgmlType.F16, GgmlType.BF16})
QUANTISED_TYPES: Final = frozenset(
    {
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
        GgmlType.IQ2_XXS,
        GgmlType.IQ4_NL,
        GgmlType.IQ4_XS,
        GgmlType.MXFP4,
    }
)
PACKABLE_TYPES: Final = FLOAT_TYPES | QUANTISED_TYPES
_TABLE_TYPES: Final = frozenset({GgmlType.IQ4_NL, GgmlType.IQ4_XS, GgmlType.MXFP4})
_BITS: Final = {
    GgmlType.Q8_0: 8,
    GgmlType.Q6_K: 6,
    GgmlType.Q5_0: 5,
    GgmlType.Q5_1: 5,
    GgmlType.Q5_K: 5,
    GgmlType.Q3_K: 3,
    GgmlType.Q2_K: 2,
}

Bytes = NDArray[np.uint8]


class PackedMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """A weight as the kernels read it: `data` uint8, what `formats.cuh` describes, in host memory."""

    ggml_type: GgmlType
    num_outputs: int
    num_inputs: int
    data: NDArray[np.uint8]

    @property
    def num_tiles(self) -> int:
        """Tiles of TILE_OUTPUTS outputs, the last padded."""
        return -(-self.num_outputs // TILE_OUTPUTS)

    @property
    def num_units(self) -> int:
        """Units of UNIT_INPUTS inputs, the last padded."""
        return padded_inputs(self.num_inputs) // UNIT_INPUTS


def padded_inputs(num_inputs: int) -> int:
    """Inputs rounded up to whole units: the row length of quantised activations."""
    return -(-num_inputs // UNIT_INPUTS) * UNIT_INPUTS


def repack(parts: Sequence[tuple[Bytes, tuple[int, ...]]], ggml_type: int) -> PackedMatrix:
    """One matrix whose outputs are those of all `parts`, (raw blocks, [outputs, inputs]) of one type."""
    kind = GgmlType(ggml_type)
    num_inputs = parts[0][1][1]
    rows = [data.reshape(shape[0], row_bytes(kind, num_inputs)) for data, shape in parts]
    blocks = rows[0] if len(rows) == 1 else np.concatenate(rows)
    return _packed(blocks, kind, num_inputs)


def repack_gate_up(gate: Bytes, up: Bytes, shape: tuple[int, ...], ggml_type: int) -> PackedMatrix:
    """Gate and up, both [ffn, inputs], as one matrix of twice as many outputs (ffn padded to 8).

    Tile i holds outputs 8i..8i+7 of gate, then the same of up, so that one lane has both of a pair.
    """
    kind = GgmlType(ggml_type)
    num_bytes = row_bytes(kind, shape[1])
    groups = -(-shape[0] // 8)
    both = np.zeros((groups, 2, 8, num_bytes), np.uint8)
    for index, data in enumerate((gate, up)):
        padded = np.zeros((groups * 8, num_bytes), np.uint8)
        padded[: shape[0]] = data.reshape(shape[0], num_bytes)
        both[:, index] = padded.reshape(groups, 8, num_bytes)
    return _packed(both.reshape(groups * 16, num_bytes), kind, shape[1])


def _packed(rows: Bytes, kind: GgmlType, num_inputs: int) -> PackedMatrix:
    num_outputs = len(rows)
    if kind in FLOAT_TYPES:
        data = np.ascontiguousarray(rows).reshape(-1)
    else:
        data = _pack_quantised(rows, kind, num_inputs)
    return PackedMatrix(ggml_type=kind, num_outputs=num_outputs, num_inputs=num_inputs, data=data)


def _pack_quantised(rows: Bytes, kind: GgmlType, num_inputs: int) -> Bytes:
    """All planes, one after the other. rows [outputs, bytes of a row]."""
    block_values, block_bytes = BLOCK_SIZES[kind]
    blocks_a_row = max(block_values, padded_inputs(num_inputs)) // block_values
    num_units = blocks_a_row * block_values // UNIT_INPUTS
    num_tiles = -(-len(rows) // TILE_OUTPUTS)
    pieces: list[list[Bytes]] = []
    for first in range(0, num_tiles, _TILES_AT_ONCE):
        part = rows[first * TILE_OUTPUTS : (first + _TILES_AT_ONCE) * TILE_OUTPUTS]
        tiles = -(-len(part) // TILE_OUTPUTS)
        if part.shape != (tiles * TILE_OUTPUTS, blocks_a_row * block_bytes):
            padded = np.zeros((tiles * TILE_OUTPUTS, blocks_a_row * block_bytes), np.uint8)
            padded[: len(part), : part.shape[1]] = part
            part = padded
        blocks = split_blocks(part.reshape(-1, block_bytes), kind)
        pieces.append([plane.reshape(-1) for plane in _planes(blocks, kind, tiles, num_units)])
    return np.concatenate([np.concatenate(plane) for plane in zip(*pieces, strict=True)])


def _planes(blocks: Blocks, kind: GgmlType, tiles: int, units: int) -> list[Bytes]:
    """The planes of some tiles, in the order of `formats.cuh`."""
    planes = [*_value_planes(blocks.values, kind, tiles, units)]
    scales = blocks.scales  # [rows, blocks of 32, bytes]
    planes.append(
        scales.reshape(tiles, 2, 8, units, 2, -1).transpose(0, 3, 2, 1, 4, 5)  # tile, unit, g, o, block
    )
    if blocks.super_scales is not None:
        supers = blocks.super_scales.reshape(tiles, 2, 8, units // _SUPER_UNITS, -1)
        planes.append(supers.transpose(0, 3, 2, 1, 4))  # tile, super-block, g, o
    return [np.ascontiguousarray(plane) for plane in planes]


def _value_planes(values: Bytes, kind: GgmlType, tiles: int, units: int) -> list[Bytes]:
    if kind is GgmlType.IQ2_XXS:  # codes, [rows, units * 8] uint16 as bytes
        codes = values.reshape(tiles, 16, units, 16)
        return [codes.transpose(0, 2, 1, 3)]
    # tile, unit, g, t, b, o, h, j
    q = values.reshape(tiles, 2, 8, units, 2, 2, 4, 4).transpose(0, 3, 2, 6, 4, 1, 5, 7)
    bits = _BITS.get(kind, 4)
    if bits == 8:
        return [q.transpose(0, 1, 4, 2, 3, 6, 5, 7)]  # tile, unit, b, g, t, h, o, j
    if kind in _TABLE_TYPES:
        return [q[..., 0::2] | q[..., 1::2] << U8(4)]  # h, pairs of j
    if bits <= 3:
        low = _fields(q & U8(3), 2)
        return [low] if bits == 2 else [low, _single_bits(q >> U8(2))]
    low = q & U8(15)
    planes = [low[..., 0, :] | low[..., 1, :] << U8(4)]
    if bits == 5:
        planes.append(_single_bits(q >> U8(4)))
    elif bits == 6:
        planes.append(_fields(q >> U8(4), 2))
    return planes


def _fields(q: Bytes, bits: int) -> Bytes:
    """Four fields (o, h) in each byte j of a block: [tile, unit, g, t, b, j]."""
    flat = [q[..., o, h, :] << U8(bits * (2 * o + h)) for o in range(2) for h in range(2)]
    combined: Bytes = flat[0] | flat[1] | flat[2] | flat[3]
    return combined


def _single_bits(q: Bytes) -> Bytes:
    """Eight bits (b, o, h) in each byte j of a unit: [tile, unit, g, t, j]."""
    combined = np.zeros((*q.shape[:4], q.shape[-1]), np.uint8)
    for b in range(2):
        for o in range(2):
            for h in range(2):
                combined |= q[..., b, o, h, :] << U8(4 * b + 2 * o + h)
    return combined


def iq2_xxs_codebook() -> NDArray[np.uint8]:
    """The 256 entries of 8 magnitudes that IQ2_XXS codes name, as bytes."""
    import gguf

    table = gguf.quants.IQ2_XXS
    table.init_grid()
    return np.ascontiguousarray(table.grid.reshape(256, 8).astype(np.uint8))
