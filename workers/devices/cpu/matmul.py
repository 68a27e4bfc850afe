"""Matrix products of quantised or float weights: register-tiled kernels and the loops over them.

Owns nothing. Runs in the worker process while the engine's machine code is made. Formats: `formats.py`.

A kernel computes R rows x T tiles of 16 outputs. Within a block of 32 inputs it sums in 32-bit
integers, which is exact; across blocks in float32, in the order of the blocks, whatever R and T. So a
row's result has the same bits in every batch. Oracle: `x @ dequantised(W).T` of the quantised x.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from workers.devices.cpu.emit import (
    ADDRESS,
    I32,
    LANES,
    V16I32,
    V64I8,
    Emitter,
    Library,
    Value,
    jit,
)
from workers.devices.cpu.formats import (
    FLOAT_BYTES,
    OUTPUT_UNIT,
    QUANTISED,
    RECORD_BYTES,
    RECORD_HIGH_SUM,
    RECORD_OFFSET,
    RECORD_SCALE,
    RECORD_SUM,
    SUMS_BYTES,
    TILE_OUTPUTS,
    TILE_ROWS,
    WIDE_BYTES,
    QuantisedBlock,
    WeightKind,
    block_bytes,
)
from workers.devices.cpu.tiles import TILE_KINDS, tile_kernel, widen_kernel

_KERNEL_ARGUMENTS: Final = 9
_FLOAT_INPUTS_A_TURN: Final = 8

# (weights, bytes a tile, blocks, rows, stride of rows or blocks, out, out stride, base, base stride)
Kernel = Callable[..., None]


class _Operands:
    """The arguments of a kernel, as values."""

    def __init__(self, values: tuple[Value, ...]) -> None:
        self.weights, self.tile_bytes, self.num_blocks = values[:3]
        self.rows, self.row_stride = values[3:5]
        self.out, self.out_stride, self.base, self.base_stride = values[5:]


def _write(e: Emitter, operands: _Operands, sums: list[list[Value]]) -> None:
    """out[row, outputs] = base[row, outputs] + sum; `sums` is [tile][row] of variables."""
    for row in range(len(sums[0])):
        out = e.address(operands.out, e.times(operands.out_stride, row))
        base = e.address(operands.base, e.times(operands.base_stride, row))
        for tile, of_tile in enumerate(sums):
            offset = 4 * TILE_OUTPUTS * tile
            old = e.load_floats(e.address(base, offset))
            e.store(e.builder.fadd(e.get(of_tile[row]), old), e.address(out, offset), 4)


def _fetch_ahead(e: Emitter, addresses: list[Value], distance: Value, num_bytes: int) -> None:
    """Ask for the same place of the tiles that come next.

    Into the second-level cache: few rows are bound by how many lines a core may wait for at once, and
    the first level admits fewer. Past the last tile it asks in vain, which costs nothing.
    """
    for address in addresses:
        for line in range(-(-num_bytes // 64)):
            e.prefetch(e.address(address, distance, 64 * line), level=2)


def quantised_kernel(library: Library, kind: WeightKind, num_tiles: int, num_rows: int) -> Kernel:
    """Rows are activation records, [block][row]; `row stride` is the bytes from block to block."""
    block = QUANTISED[kind]

    @library.kernel(*([ADDRESS] * _KERNEL_ARGUMENTS))
    def kernel(e: Emitter, *values: Value) -> None:
        operands = _Operands(values)
        sums = [[e.variable(e.floats(0.0)) for _ in range(num_rows)] for _ in range(num_tiles)]
        tiles = [e.address(operands.weights, e.times(operands.tile_bytes, t)) for t in range(num_tiles)]
        with e.loop(operands.num_blocks) as index:
            offset = e.times(index, block.num_bytes)
            here = [e.address(tile, offset) for tile in tiles]
            first = e.address(operands.rows, e.times(index, operands.row_stride))
            records = [e.address(first, RECORD_BYTES * row) for row in range(num_rows)]
            _fetch_ahead(e, here, e.times(operands.tile_bytes, num_tiles), block.num_bytes)
            _add_block(e, kind, block, here, records, sums)
        _write(e, operands, sums)

    return kernel


def _add_block(
    e: Emitter,
    kind: WeightKind,
    block: QuantisedBlock,
    tiles: list[Value],
    records: list[Value],
    sums: list[list[Value]],
) -> None:
    signed = kind is WeightKind.S8
    # One integer sum for each scale; weights stored with an offset start from what it contributes.
    whole: list[list[list[Value]]] = []
    for _ in tiles:
        of_tile = []
        for record in records:
            initial = e.integers(0)
            if kind is WeightKind.U4 or (signed and e.target.has_unsigned_dot):
                initial = e.splat(e.load(e.address(record, RECORD_OFFSET), I32, 4))
                if signed:  # the offset of 128 is 16 times that of 4-bit weights
                    initial = e.builder.shl(initial, e.integers(4))
            of_tile.append([initial] + [e.integers(0)] * (block.num_scales - 1))
        whole.append(of_tile)

    low_nibble = ir.Constant(V64I8, [15] * 64)
    nibble_shift = ir.Constant(V64I8, [4] * 64)
    for vector in range(block.num_vectors):
        for tile, address in enumerate(tiles):
            packed = e.load(e.address(address, 64 * vector), V64I8, 32)
            parts = [(packed, 4 * vector)]
            if block.bits == 4:
                high = e.builder.lshr(packed, nibble_shift)
                parts = [(e.builder.and_(packed, low_nibble), 4 * vector), (high, 16 + 4 * vector)]
            for weights, first_input in parts:
                half = first_input // 16 if block.num_scales == 2 else 0
                for row, record in enumerate(records):
                    four = e.splat(e.load(e.address(record, first_input), I32, 4))
                    values = e.builder.bitcast(four, V64I8)
                    of_row = whole[tile][row]
                    of_row[half] = e.dot(of_row[half], weights, values, signed_weights=signed)

    for tile, address in enumerate(tiles):
        for half in range(block.num_scales):
            scale = e.load_halves(e.address(address, block.scale_offset + 32 * half))
            low = e.load_halves(e.address(address, block.min_offset + 32 * half)) if block.has_min else None
            for row, record in enumerate(records):
                combined = e.builder.fmul(scale, e.spread_float(e.address(record, RECORD_SCALE)))
                number = e.builder.sitofp(whole[tile][row][half], combined.type)
                e.add_product(sums[tile][row], number, combined)
                if low is not None:
                    e.add_product(sums[tile][row], low, e.splat(_sum_of_inputs(e, record, block, half)))


def _sum_of_inputs(e: Emitter, record: Value, block: QuantisedBlock, half: int) -> Value:
    """The sum of the activations that one minimum multiplies."""
    float_type = ir.FloatType()
    if block.num_scales == 1:
        return e.load(e.address(record, RECORD_SUM), float_type, 4)
    high = e.load(e.address(record, RECORD_HIGH_SUM), float_type, 4)
    if half == 1:
        return high
    return e.builder.fsub(e.load(e.address(record, RECORD_SUM), float_type, 4), high)


def float_kernel(library: Library, kind: WeightKind, num_tiles: int, num_rows: int) -> Kernel:
    """Rows are float32 [row][inputs]; `row stride` is the bytes from row to row."""
    size = FLOAT_BYTES[kind]

    @library.kernel(*([ADDRESS] * _KERNEL_ARGUMENTS))
    def kernel(e: Emitter, *values: Value) -> None:
        operands = _Operands(values)
        sums = [[e.variable(e.floats(0.0)) for _ in range(num_rows)] for _ in range(num_tiles)]
        tiles = [e.address(operands.weights, e.times(operands.tile_bytes, t)) for t in range(num_tiles)]
        rows = [e.address(operands.rows, e.times(operands.row_stride, r)) for r in range(num_rows)]
        turns = e.times(operands.num_blocks, 32 // _FLOAT_INPUTS_A_TURN)
        with e.loop(turns) as index:
            weight_offset = e.times(index, size * LANES * _FLOAT_INPUTS_A_TURN)
            value_offset = e.times(index, 4 * _FLOAT_INPUTS_A_TURN)
            here = [e.address(tile, weight_offset) for tile in tiles]
            distance = e.times(operands.tile_bytes, num_tiles)
            _fetch_ahead(e, here, distance, size * LANES * _FLOAT_INPUTS_A_TURN)
            for turn in range(_FLOAT_INPUTS_A_TURN):
                for tile, address in enumerate(here):
                    weights = _load_weights(e, kind, e.address(address, size * LANES * turn))
                    for row, row_address in enumerate(rows):
                        value = e.spread_float(e.address(row_address, value_offset, 4 * turn))
                        e.add_product(sums[tile][row], weights, value)
        _write(e, operands, sums)

    return kernel


def _load_weights(e: Emitter, kind: WeightKind, address: Value) -> Value:
    """Sixteen float weights as float32."""
    if kind is WeightKind.F16:
        return e.load_halves(address)
    if kind is WeightKind.BF16:
        wide = e.builder.zext(e.load(address, ir.VectorType(ir.IntType(16), LANES), 2), V16I32)
        return e.builder.bitcast(e.builder.shl(wide, e.integers(16)), ir.VectorType(ir.FloatType(), LANES))
    return e.load_floats(address)


def make_matmul(library: Library, kind: WeightKind) -> Callable[..., Any]:
    """The product for one weight kind, for jitted code.

    `(weights, num_blocks, first, last, rows, row_stride, num_rows, out, out_stride, base, base_stride, base_step,
    scratch)`:
    outputs first .. last - 1 (multiples of 32) of out[row] = base[row] + rows[row] @ weights.T. Strides
    are in bytes. The base of an output lies `base_step` times its index into the row: 4, or 0 to add the
    same few zeros everywhere; a base stride of 0 adds one vector (a bias) to every row. Up to SPARE_ROWS
    rows past the last are read and written. `scratch`: memory of this thread for tile products.
    """
    is_float = kind in FLOAT_BYTES
    make = float_kernel if is_float else quantised_kernel
    wide = library.target.has_wide_registers
    many, some, few = (12, 8, 4) if wide else (4, 2, 1)
    two_tile_kernel = make(library, kind, 2, 1)
    two_by_two_kernel = make(library, kind, 2, 2) if wide else two_tile_kernel
    two_by_four_kernel = make(library, kind, 2, 4) if wide else two_tile_kernel
    many_kernel, some_kernel, few_kernel = (make(library, kind, 1, rows) for rows in (many, some, few))
    bytes_a_block = block_bytes(kind)
    record_bytes = RECORD_BYTES

    @jit
    def rows_of_tile(
        tile: int, tile_bytes: int, num_blocks: int, rows: int, row_stride: int, num_rows: int,
        out: int, out_stride: int, base: int, base_stride: int,
    ) -> None:  # fmt: skip
        row = 0
        while row < num_rows:
            left = num_rows - row
            at = rows + row * (row_stride if is_float else record_bytes)
            to, old = out + row * out_stride, base + row * base_stride
            if left > some and (left <= many or left > 2 * some):  # sixteen rows go better as eight and eight
                many_kernel(tile, tile_bytes, num_blocks, at, row_stride, to, out_stride, old, base_stride)
                row += many
            elif left > few:
                some_kernel(tile, tile_bytes, num_blocks, at, row_stride, to, out_stride, old, base_stride)
                row += some
            else:
                few_kernel(tile, tile_bytes, num_blocks, at, row_stride, to, out_stride, old, base_stride)
                row += few

    @jit
    def matmul(
        weights: int, num_blocks: int, first: int, last: int, rows: int, row_stride: int, num_rows: int,
        out: int, out_stride: int, base: int, base_stride: int, base_step: int, scratch: int,
    ) -> None:  # fmt: skip
        tile_bytes = num_blocks * bytes_a_block
        output = first
        while output < last:
            tile = weights + output // TILE_OUTPUTS * tile_bytes
            to, old = out + 4 * output, base + base_step * output
            if num_rows == 1:
                two_tile_kernel(
                    tile, tile_bytes, num_blocks, rows, row_stride, to, out_stride, old, base_stride
                )
            elif wide and num_rows == 2:
                two_by_two_kernel(
                    tile, tile_bytes, num_blocks, rows, row_stride, to, out_stride, old, base_stride
                )
            elif wide and num_rows <= 4:
                two_by_four_kernel(
                    tile, tile_bytes, num_blocks, rows, row_stride, to, out_stride, old, base_stride
                )
            else:
                for half in range(2):
                    shift = TILE_OUTPUTS * half
                    rows_of_tile(
                        tile + half * tile_bytes, tile_bytes, num_blocks, rows, row_stride, num_rows,
                        to + 4 * shift, out_stride, old + base_step * shift, base_stride,
                    )  # fmt: skip
            output += OUTPUT_UNIT

    if library.target.has_tiles and kind in TILE_KINDS:
        return _with_tiles(library, kind, matmul)
    return matmul


def _with_tiles(library: Library, kind: WeightKind, few_rows: Callable[..., Any]) -> Callable[..., Any]:
    """The product with whole groups of sixteen rows on tile registers; `few_rows` takes the rest."""
    widen, multiply = widen_kernel(library, kind), tile_kernel(library, kind)
    bytes_a_block, record_bytes = block_bytes(kind), RECORD_BYTES

    @jit
    def matmul(
        weights: int, num_blocks: int, first: int, last: int, rows: int, row_stride: int, num_rows: int,
        out: int, out_stride: int, base: int, base_stride: int, base_step: int, scratch: int,
    ) -> None:  # fmt: skip
        in_tiles = num_rows // TILE_ROWS * TILE_ROWS
        if num_rows - in_tiles > TILE_ROWS // 2 and in_tiles > 0:
            in_tiles += TILE_ROWS  # the last group reaches into the spare rows
        if in_tiles > 0:
            wide, wide_bytes = scratch + SUMS_BYTES, num_blocks * WIDE_BYTES
            output = first
            while output < last:
                tile = weights + output // TILE_OUTPUTS * num_blocks * bytes_a_block
                for half in range(2):
                    widen(tile + half * num_blocks * bytes_a_block, num_blocks, wide + half * wide_bytes)
                for row in range(0, in_tiles, TILE_ROWS):
                    for half in range(2):
                        column = output + TILE_OUTPUTS * half
                        multiply(
                            wide + half * wide_bytes, num_blocks, rows + row * record_bytes, row_stride,
                            out + row * out_stride + 4 * column, out_stride,
                            base + row * base_stride + base_step * column, base_stride, scratch,
                        )  # fmt: skip
                output += OUTPUT_UNIT
        if in_tiles < num_rows:
            few_rows(
                weights, num_blocks, first, last, rows + in_tiles * record_bytes, row_stride,
                num_rows - in_tiles, out + in_tiles * out_stride, out_stride,
                base + in_tiles * base_stride, base_stride, base_step, scratch,
            )  # fmt: skip

    return matmul
