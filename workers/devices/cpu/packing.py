"""Weights from the mapped model file into the engine's formats, once, at load.

Owns: the arena that holds all packed weights (one allocation, so that it can lie in huge pages). Runs
in the worker process. The file is read a few thousand rows at a time; nothing else is kept of it.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from workers.devices.cpu.blocks import Blocks, has_reader, quantise_rows, read_blocks, runtime_kind
from workers.devices.cpu.formats import (
    BLOCK_INPUTS,
    FLOAT_BYTES,
    QUANTISED,
    TILE_OUTPUTS,
    WeightKind,
    block_bytes,
    packed_bytes,
    padded_outputs,
)
from workers.model.program import Program, Tensor
from workers.quant.dequantise import dequantise

_CHUNK_BYTES: Final = 4 << 20  # of the file, taken apart at a time


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows to pack as one matrix: a tensor's, in another order where `order` is set, or two tensors'
    in turn, 32 of each (`other`).
    """

    tensor: Tensor
    other: Tensor | None = None
    order: NDArray[np.int64] | None = None

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return self.tensor.shape[0] * (1 if self.other is None else 2)

    @property
    def num_inputs(self) -> int:
        """Length of a row."""
        return self.tensor.shape[1]

    def take(self, first: int, last: int) -> NDArray[np.uint8]:
        """Raw rows [last - first, bytes a row]; with `other`, both ends are multiples of 64."""
        raw = self.tensor.data.reshape(self.tensor.shape[0], -1)
        if self.other is not None:
            second = self.other.data.reshape(self.other.shape[0], -1)
            parts = [part[first // 2 : last // 2].reshape(-1, 32, part.shape[1]) for part in (raw, second)]
            return np.stack(parts, axis=1).reshape(-1, raw.shape[1])
        return raw[first:last] if self.order is None else raw[self.order[first:last]]


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """A packed matrix: where it lies in the arena and what it is."""

    kind: WeightKind
    offset: int
    num_blocks: int
    num_outputs: int  # padded


class Packer:
    """Plans the arena, then fills it. One owner, the device's constructor."""

    def __init__(self, *, has_unsigned_dot: bool) -> None:
        self._has_unsigned_dot = has_unsigned_dot
        self._jobs: list[tuple[Matrix, Rows]] = []
        self._size = 0

    def add(self, segments: Sequence[Rows]) -> Matrix:
        """Plan a matrix of segments of the same kind and inputs; each is padded to whole units."""
        kind, inputs = runtime_kind(segments[0].tensor.ggml_type), segments[0].num_inputs
        start, num_outputs = self._size, 0
        for rows in segments:
            assert (runtime_kind(rows.tensor.ggml_type), rows.num_inputs) == (kind, inputs)
            matrix = Matrix(
                kind=kind,
                offset=self._size,
                num_blocks=inputs // BLOCK_INPUTS,
                num_outputs=padded_outputs(rows.num_rows),
            )
            self._jobs.append((matrix, rows))
            self._size += packed_bytes(kind, rows.num_rows, inputs)
            num_outputs += matrix.num_outputs
        self._size = -(-self._size // 64) * 64
        return Matrix(kind=kind, offset=start, num_blocks=inputs // BLOCK_INPUTS, num_outputs=num_outputs)

    def pack(self) -> NDArray[np.uint8]:
        """The filled arena, uint8, at a multiple of 64 bytes."""
        whole = np.zeros(self._size + 64, np.uint8)
        skip = -whole.ctypes.data % 64
        arena = whole[skip : skip + self._size]
        for matrix, rows in self._jobs:
            pack_rows(arena, matrix, rows, has_unsigned_dot=self._has_unsigned_dot)
        self._jobs.clear()  # lets go of the mapped file
        return arena


def weight_bytes(program: Program) -> int:
    """Memory that a program's packed weights take; the file may have them in fewer bits."""
    found: dict[str, int] = {}
    for tensor in program.tensors():
        if len(tensor.shape) == 1:
            found[tensor.name] = tensor.data.size
        else:
            found[tensor.name] = packed_bytes(runtime_kind(tensor.ggml_type), *tensor.shape)
    return sum(found.values())


def pack_rows(arena: NDArray[np.uint8], matrix: Matrix, rows: Rows, *, has_unsigned_dot: bool) -> None:
    """Write `rows` into their place in the arena (zeros before)."""
    bytes_a_tile = matrix.num_blocks * block_bytes(matrix.kind)
    num_tiles = matrix.num_outputs // TILE_OUTPUTS
    place = arena[matrix.offset : matrix.offset + num_tiles * bytes_a_tile].reshape(num_tiles, -1)
    raw_bytes = rows.tensor.data.size // rows.tensor.shape[0]
    step = max(64, _CHUNK_BYTES // raw_bytes // 64 * 64)
    for first in range(0, rows.num_rows, step):
        last = min(rows.num_rows, first + step)
        raw = rows.take(first, last)
        if len(raw) % TILE_OUTPUTS:
            raw = np.pad(raw, ((0, -len(raw) % TILE_OUTPUTS), (0, 0)))
        tiles = place[first // TILE_OUTPUTS : first // TILE_OUTPUTS + len(raw) // TILE_OUTPUTS]
        if matrix.kind in FLOAT_BYTES:
            _write_floats(tiles, raw, FLOAT_BYTES[matrix.kind])
        else:
            blocks = _blocks(rows.tensor.ggml_type, raw, rows.num_inputs)
            _write_blocks(tiles, blocks, matrix.kind, has_unsigned_dot=has_unsigned_dot)


def _blocks(ggml_type: int, raw: NDArray[np.uint8], num_inputs: int) -> Blocks:
    if has_reader(ggml_type):
        return read_blocks(ggml_type, raw)
    return quantise_rows(dequantise(raw, ggml_type, (len(raw), num_inputs)))


def _write_floats(tiles: NDArray[np.uint8], raw: NDArray[np.uint8], size: int) -> None:
    """Rows to [tile][inputs][16 outputs]."""
    word = np.uint16 if size == 2 else np.uint32
    values = np.ascontiguousarray(raw).view(word)
    by_tile = values.reshape(len(tiles), TILE_OUTPUTS, -1)
    tiles.view(word).reshape(len(tiles), -1, TILE_OUTPUTS)[:] = by_tile.transpose(0, 2, 1)


def _write_blocks(
    tiles: NDArray[np.uint8], blocks: Blocks, kind: WeightKind, *, has_unsigned_dot: bool
) -> None:
    """Blocks to [tile][block][vector][16 outputs][4 inputs], then scales and minima [16 outputs]."""
    layout = QUANTISED[kind]
    values = np.ascontiguousarray(blocks.values)
    if kind is WeightKind.S8 and has_unsigned_dot:
        values = values ^ np.uint8(128)
    num_blocks = values.shape[1]
    out = tiles.reshape(len(tiles), num_blocks, layout.num_bytes)
    fours = values.view(np.uint32).reshape(len(tiles), TILE_OUTPUTS, num_blocks, layout.num_vectors)
    vectors = out[:, :, : layout.scale_offset].view(np.uint32)
    vectors.reshape(len(tiles), num_blocks, layout.num_vectors, TILE_OUTPUTS)[:] = fours.transpose(0, 2, 3, 1)
    parts = [(layout.scale_offset, blocks.scales)]
    if blocks.minima is not None:
        parts.append((layout.min_offset, blocks.minima))
    for offset, halves in parts:
        by_tile = halves.reshape(len(tiles), TILE_OUTPUTS, num_blocks, layout.num_scales)
        words = out[:, :, offset : offset + 32 * layout.num_scales].view(np.float16)
        words.reshape(len(tiles), num_blocks, layout.num_scales, TILE_OUTPUTS)[:] = by_tile.transpose(
            0, 2, 3, 1
        )
