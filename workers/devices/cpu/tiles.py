"""Matrix products of many rows on tile registers (Intel AMX): the kernels beside `matmul.py`'s.

Owns nothing. Runs in the worker process while the engine's machine code is made.

A tile instruction multiplies the 8-bit values of sixteen rows and sixteen outputs over the 32 inputs of
a block: four to eight times the dot instructions' rate, of which storing the sums and scaling them leave
about half. The sums are whole numbers and the scaling is written as in `matmul.py`, term by term, so a
row has the same bits on either path. Weights are first widened to signed bytes, once for all rows of a step.
"""

from collections.abc import Callable
from typing import Final

from llvmlite import ir

from workers.devices.cpu.emit import ADDRESS, I8, LANES, V16F32, V16I32, V64I8, Emitter, Library, Value
from workers.devices.cpu.formats import (
    BLOCKS_A_TURN,
    QUANTISED,
    RECORD_BYTES,
    RECORD_SCALE,
    RECORD_SUM,
    SUMS_BYTES,
    TILE_OUTPUTS,
    TILE_ROWS,
    WIDE_BYTES,
    WeightKind,
)

TILE_KINDS: Final = (WeightKind.U4, WeightKind.U4_MIN, WeightKind.S8, WeightKind.U8_MIN)
_WIDE_SCALE: Final = 512
_WIDE_MIN: Final = 576
_SUM_BYTES: Final = SUMS_BYTES // BLOCKS_A_TURN

_ROWS, _WEIGHTS, _SUMS = 0, 1, 2  # tile registers
_VOID: Final = ir.VoidType()


def configure_kernel(library: Library) -> Callable[[], None]:
    """Set up this thread's tile registers: a block of rows, of weights, and their sums."""
    shapes = {_ROWS: (TILE_ROWS, 32), _WEIGHTS: (8, 64), _SUMS: (TILE_ROWS, 64)}  # rows, bytes a row

    @library.kernel()
    def configure(e: Emitter) -> None:
        words = bytearray(64)
        words[0] = 1  # palette
        for register, (rows, row_bytes) in shapes.items():
            words[16 + 2 * register] = row_bytes
            words[48 + register] = rows
        table = ir.Constant(V64I8, list(words))
        place = e.builder.alloca(V64I8)
        e.builder.store(table, place)
        e.call("llvm.x86.ldtilecfg", _VOID, e.builder.bitcast(place, I8.as_pointer()))

    return configure


def release_kernel(library: Library) -> Callable[[], None]:
    """Give the tile registers back: the kernel then saves and restores nothing of them."""

    @library.kernel()
    def release(e: Emitter) -> None:
        e.call("llvm.x86.tilerelease", _VOID)

    return release


def widen_kernel(library: Library, kind: WeightKind) -> Callable[..., None]:
    """`(weights, blocks, wide)`: a packed tile as signed bytes and float32 scales."""
    block = QUANTISED[kind]
    assert block.num_scales == 1

    @library.kernel(ADDRESS, ADDRESS, ADDRESS)
    def widen(e: Emitter, weights: Value, num_blocks: Value, wide: Value) -> None:
        with e.loop(num_blocks) as index:
            source = e.address(weights, e.times(index, block.num_bytes))
            place = e.address(wide, e.times(index, WIDE_BYTES))
            for vector in range(block.num_vectors):
                packed = e.load(e.address(source, 64 * vector), V64I8, 32)
                for number, values in _signed(e, kind, packed, vector).items():
                    e.store(values, e.address(place, 64 * number), 64)
            e.store(e.load_halves(e.address(source, block.scale_offset)), e.address(place, _WIDE_SCALE), 64)
            if block.has_min:
                e.store(e.load_halves(e.address(source, block.min_offset)), e.address(place, _WIDE_MIN), 64)

    return widen


def _signed(e: Emitter, kind: WeightKind, packed: Value, vector: int) -> dict[int, Value]:
    """The vectors of signed bytes that one packed vector holds, by their number."""
    b = e.builder

    def bytes_of(value: int) -> Value:
        return ir.Constant(V64I8, [value] * 64)

    if kind is WeightKind.S8:
        return {vector: b.xor(packed, bytes_of(-128))}
    if kind is WeightKind.U8_MIN:
        return {vector: packed}
    halves = {vector: b.and_(packed, bytes_of(15)), vector + 4: b.lshr(packed, bytes_of(4))}
    if kind is WeightKind.U4:
        return {number: b.sub(values, bytes_of(8)) for number, values in halves.items()}
    return halves


def tile_kernel(library: Library, kind: WeightKind) -> Callable[..., None]:
    """Sixteen rows x sixteen outputs.

    `(wide weights, blocks, rows, bytes from block to block, out, out stride, base, base stride, sums)`.
    """
    has_min = QUANTISED[kind].has_min

    @library.kernel(*([ADDRESS] * 9))
    def tile(
        e: Emitter, wide: Value, num_blocks: Value, rows: Value, row_stride: Value, out: Value,
        out_stride: Value, base: Value, base_stride: Value, sums: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        totals = [e.variable(e.floats(0.0)) for _ in range(TILE_ROWS)]
        with e.loop(b.udiv(e.address(num_blocks, BLOCKS_A_TURN - 1), e.whole(BLOCKS_A_TURN))) as turn:
            first = e.times(turn, BLOCKS_A_TURN)
            left = b.sub(num_blocks, first)
            count = b.select(b.icmp_signed("<", left, e.whole(BLOCKS_A_TURN)), left, e.whole(BLOCKS_A_TURN))
            with e.loop(count) as index:
                block = e.address(first, index)
                _multiply(
                    e,
                    e.address(rows, e.times(block, row_stride)),
                    e.address(wide, e.times(block, WIDE_BYTES)),
                    e.address(sums, e.times(index, _SUM_BYTES)),
                )
            with e.loop(count) as index:
                block = e.address(first, index)
                records = e.address(rows, e.times(block, row_stride))
                weights = e.address(wide, e.times(block, WIDE_BYTES))
                scale = e.load_floats(e.address(weights, _WIDE_SCALE))
                low = e.load_floats(e.address(weights, _WIDE_MIN)) if has_min else None
                for row, total in enumerate(totals):
                    record = e.address(records, RECORD_BYTES * row)
                    combined = b.fmul(scale, e.spread_float(e.address(record, RECORD_SCALE)))
                    whole = e.load(e.address(sums, e.times(index, _SUM_BYTES), 64 * row), V16I32, 64)
                    e.add_product(total, b.sitofp(whole, V16F32), combined)
                    if low is not None:
                        e.add_product(total, low, e.spread_float(e.address(record, RECORD_SUM)))
        for row, total in enumerate(totals):
            old = e.load_floats(e.address(base, e.times(base_stride, row)))
            e.store(b.fadd(e.get(total), old), e.address(out, e.times(out_stride, row)), 4)

    return tile


def _multiply(e: Emitter, records: Value, weights: Value, sums: Value) -> None:
    """The whole-number sums of one block, [16 rows][16 outputs] int32."""
    rows, columns, result = (ir.Constant(I8, register) for register in (_ROWS, _WEIGHTS, _SUMS))

    def pointer(address: Value) -> Value:
        return e.builder.inttoptr(address, I8.as_pointer())

    e.call("llvm.x86.tileloadd64", _VOID, rows, pointer(records), e.whole(RECORD_BYTES))
    e.call("llvm.x86.tileloadd64", _VOID, columns, pointer(weights), e.whole(64))
    e.call("llvm.x86.tilezero", _VOID, result)
    e.call("llvm.x86.tdpbssd", _VOID, result, rows, columns)
    e.call("llvm.x86.tilestored64", _VOID, result, pointer(sums), e.whole(64))


assert TILE_OUTPUTS == LANES == TILE_ROWS, "a tile of sums is square"
