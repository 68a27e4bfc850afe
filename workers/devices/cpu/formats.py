"""How weights and activations lie in memory while the engine runs.

Owns nothing: constants that the packer (NumPy) and the kernels (LLVM) share. Runs in the worker.

Weights are cut into tiles of 16 outputs, a tile into blocks of 32 inputs. A quantised block holds,
for four inputs at a time, one 64-byte vector with the four values of output 0, then of output 1 and
so on (the operand of a dot-product instruction), then its scales and minima as [16] float16.
With 4 bits a vector holds inputs 4j..4j+3 in its low and inputs 16+4j..16+4j+3 in its high nibbles.
Float weights lie as [inputs][16 outputs].

Activations are 8-bit in blocks of 32 inputs; the record of one row and block is 48 bytes, and
records lie as [block][row] so that a kernel reaches all rows from one pointer.
"""

from enum import IntEnum
from typing import Final

import msgspec

TILE_OUTPUTS: Final = 16
BLOCK_INPUTS: Final = 32
OUTPUT_UNIT: Final = 32  # outputs are padded to, and shared out between threads, in units of two tiles
MAX_GATHERED: Final = 512  # logits of a row that are sorted to draw one
LOGITS_BLOCK: Final = 64  # of logits whose largest is noted: whole vectors, whole units of outputs
SPARE_ROWS: Final = 16  # kernels may read and write this many rows past the last one

_SETS: Final = 64  # of a first-level cache
RECORD_BYTES: Final = 48
RECORD_SCALE: Final = 32  # float32
RECORD_SUM: Final = 36  # float32: scale * sum of the 32 values
RECORD_OFFSET: Final = 40  # int32: -8 * sum of the 32 values, for weights stored with an offset of 8
RECORD_HIGH_SUM: Final = 44  # float32: scale * sum of the last 16 values

TILE_ROWS: Final = 16  # that one product on tile registers takes
# A block widened for them: eight vectors as above, then the scales and minima of 16 outputs as float32.
WIDE_BYTES: Final = 640
BLOCKS_A_TURN: Final = 4  # whose sums are stored before the first is scaled: that hides latency
SUMS_BYTES: Final = BLOCKS_A_TURN * TILE_ROWS * 64


class WeightKind(IntEnum):
    """Runtime formats; many GGML types map to few of them (`packing.py`)."""

    U4 = 0  # weight = scale * (q - 8)
    U4_MIN = 1  # weight = scale * q + min
    S8 = 2  # weight = scale * q, q signed; stored as q + 128 where the dot product wants unsigned weights
    U8_MIN = 3  # weight = scale * q + min, q < 128
    U8_HALVES = 4  # the same with a scale and a min for each 16 inputs, q < 128
    F16 = 5
    BF16 = 6
    F32 = 7


class QuantisedBlock(msgspec.Struct, frozen=True):
    """The layout of one 16 x 32 block of a quantised kind."""

    bits: int
    num_scales: int
    has_min: bool

    @property
    def num_vectors(self) -> int:
        """64-byte vectors of values."""
        return self.bits

    @property
    def scale_offset(self) -> int:
        """Where the scales begin, in bytes; one row of 16 float16 for each."""
        return 64 * self.num_vectors

    @property
    def min_offset(self) -> int:
        """Where the minima begin, in bytes."""
        return self.scale_offset + 32 * self.num_scales

    @property
    def num_bytes(self) -> int:
        """Size of a block."""
        return self.min_offset + (32 * self.num_scales if self.has_min else 0)


QUANTISED: Final = {
    WeightKind.U4: QuantisedBlock(4, 1, False),
    WeightKind.U4_MIN: QuantisedBlock(4, 1, True),
    WeightKind.S8: QuantisedBlock(8, 1, False),
    WeightKind.U8_MIN: QuantisedBlock(8, 1, True),
    WeightKind.U8_HALVES: QuantisedBlock(8, 2, True),
}
FLOAT_BYTES: Final = {WeightKind.F16: 2, WeightKind.BF16: 2, WeightKind.F32: 4}


def block_bytes(kind: WeightKind) -> int:
    """Bytes of one 16 x 32 block of `kind`."""
    if kind in QUANTISED:
        return QUANTISED[kind].num_bytes
    return FLOAT_BYTES[kind] * TILE_OUTPUTS * BLOCK_INPUTS


def padded_outputs(num_outputs: int) -> int:
    """Outputs rounded up to whole units."""
    return -(-num_outputs // OUTPUT_UNIT) * OUTPUT_UNIT


def packed_bytes(kind: WeightKind, num_outputs: int, num_inputs: int) -> int:
    """Bytes of a whole packed matrix."""
    num_blocks = num_inputs // BLOCK_INPUTS
    return padded_outputs(num_outputs) // TILE_OUTPUTS * num_blocks * block_bytes(kind)


def record_stride(num_rows: int) -> int:
    """Bytes from one block's records to the next block's.

    So many cache lines that the blocks of a few rows do not fall into the same cache sets: an odd number,
    and of many rows 13 more than a multiple of 64, which lays the blocks of 16 rows side by side.
    """
    lines = (num_rows * RECORD_BYTES + 127) // 128 * 2 + 1
    if lines > _SETS:
        lines += (13 - lines) % _SETS
    return 64 * lines


def tile_bytes(num_blocks: int) -> int:
    """Memory that a thread needs for products over `num_blocks` blocks: two widened tiles, and sums."""
    return SUMS_BYTES + 2 * num_blocks * WIDE_BYTES


def draw_bytes(vocab_stride: int) -> int:
    """Scratch memory for drawing: keys, logits and weights of the gathered, then weights of the whole row."""
    return 16 * MAX_GATHERED + 4 * vocab_stride
