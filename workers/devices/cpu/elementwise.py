"""Work on single rows: embedding, RMS norm, quantisation to 8 bits, SiLU, rotation, storing keys and values.

Owns nothing. Runs in the worker process while the engine's machine code is made. Oracle: the reference
device's operations. Record layout: `formats.py`; page layout: `attention.py`.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from workers.devices.cpu.emit import (
    ADDRESS,
    F32,
    FLOAT,
    I16,
    I32,
    LANES,
    LOG2_E,
    V16I8,
    V16I16,
    V16I32,
    V64I8,
    Emitter,
    Library,
    Value,
    jit,
)
from workers.devices.cpu.formats import (
    LOGITS_BLOCK,
    QUANTISED,
    RECORD_BYTES,
    RECORD_HIGH_SUM,
    RECORD_OFFSET,
    RECORD_SCALE,
    RECORD_SUM,
    TILE_OUTPUTS,
    WeightKind,
    block_bytes,
)
from workers.devices.cpu.memory import Memory

_MOST_POWER: Final = 60.0  # e^-gate counts as no more than two to it: two such factors do not overflow
_ROWS_A_TURN: Final = (
    32  # a power of two; whose products stay in the first-level cache until they are rounded
)


def _quantise(
    e: Emitter, count: Value, record_of: Callable[[Value], Value], values_of: Callable[[Value], list[Value]]
) -> None:
    """Write blocks of 32 float32 as activation records: scale = max |x| / 127, q = round(x / scale).

    The scales of all come first: two short chains of instructions overlap better than a long one.
    """
    b = e.builder
    with e.loop(count) as index:
        record = record_of(index)
        largest = e.largest_magnitude(*values_of(index))
        zero = ir.Constant(F32, 0.0)
        inverse = b.fdiv(ir.Constant(F32, 127.0), largest)
        e.store(b.fmul(largest, ir.Constant(F32, 1 / 127)), e.address(record, RECORD_SCALE), 4)
        known = b.select(b.fcmp_ordered(">", largest, zero), inverse, zero)
        e.store(known, e.address(record, RECORD_SUM), 4)
    with e.loop(count) as index:
        record = record_of(index)
        inverse = e.spread_float(e.address(record, RECORD_SUM))
        rounded = [e.round(b.fmul(part, inverse))[1] for part in values_of(index)]
        quants = e.join([b.trunc(part, V16I8) for part in rounded])
        e.store(quants, record, 4)
        total, high_sum = _totals(e, quants)
        scale = e.load(e.address(record, RECORD_SCALE), F32, 4)
        e.store(b.fmul(scale, b.sitofp(total, F32)), e.address(record, RECORD_SUM), 4)
        e.store(b.mul(total, ir.Constant(I32, -8)), e.address(record, RECORD_OFFSET), 4)
        e.store(b.fmul(scale, b.sitofp(high_sum, F32)), e.address(record, RECORD_HIGH_SUM), 4)


def _two_vectors(e: Emitter, address: Value) -> list[Value]:
    return [e.load_floats(e.address(address, at)) for at in (0, 64)]


def _totals(e: Emitter, quants: Value) -> tuple[Value, Value]:
    """Sums of [32] signed bytes and of their last sixteen: by fours first, then of both halves at once."""
    b = e.builder
    bytes_and_zeros = b.shuffle_vector(
        quants, ir.Constant(quants.type, None), ir.Constant(ir.VectorType(I32, 64), list(range(64)))
    )
    ones = ir.Constant(V64I8, [1] * 64)
    sums = e.lanes(e.dot(e.integers(0), ones, bytes_and_zeros, signed_weights=False), range(8))
    for distance in (2, 1):
        sums = b.add(sums, e.lanes(sums, [lane ^ distance for lane in range(8)]))
    low, high = (b.extract_element(sums, ir.Constant(I32, lane)) for lane in (0, 4))
    return b.add(low, high), high


def _silu_products(e: Emitter, gates: Value, ups: Value) -> list[Value]:
    """Gate / (1 + e^-gate) * up of 32 values by address, with one division for two."""
    b = e.builder
    products, below = [], []
    for gate, up in zip(_two_vectors(e, gates), _two_vectors(e, ups), strict=True):
        power = e.minimum(e.floats(_MOST_POWER), b.fmul(gate, e.floats(-LOG2_E)))
        below.append(b.fadd(e.floats(1.0), e.exp2(power)))
        products.append(b.fmul(gate, up))
    inverse = b.fdiv(e.floats(1.0), b.fmul(*below))
    return [
        b.fmul(b.fmul(product, other), inverse) for product, other in zip(products, below[::-1], strict=True)
    ]


def _rotated(e: Emitter, head: Value, table: Value, head_size: int) -> list[Value]:
    """Adjacent pairs turned: x * cos + swapped(x) * (-sin, sin, ...), as the table holds them."""
    turned = []
    for vector in range(head_size // LANES):
        pairs = e.load_floats(e.address(head, 64 * vector))
        swapped = e.lanes(pairs, [lane ^ 1 for lane in range(LANES)])
        cos = e.load_floats(e.address(table, 64 * vector))
        sin = e.load_floats(e.address(table, 64 * vector + 4 * head_size))
        turned.append(e.fma(swapped, sin, e.builder.fmul(pairs, cos)))
    return turned


def _quantise_head(e: Emitter, parts: list[Value]) -> tuple[list[Value], Value]:
    """[16] int16 each, and their float32 scale: Euclidean length / 32767.

    So no product of two heads overflows 32 bits (Cauchy-Schwarz). What is not a number shows in the scale.
    """
    b = e.builder
    squares = e.floats(0.0)
    for part in parts:
        squares = e.fma(part, part, squares)
    total = e.total(squares)
    length = e.call("llvm.sqrt.f32", F32, b.fadd(total, b.fsub(total, total)))
    most, zero = ir.Constant(F32, 32767.0), ir.Constant(F32, 0.0)
    inverse = b.select(b.fcmp_ordered(">", length, zero), b.fdiv(most, length), zero)
    spread = e.splat(inverse)
    quants = [b.trunc(e.round(b.fmul(part, spread))[1], V16I16) for part in parts]
    return quants, b.fdiv(length, most)


class Elementwise:
    """Row kernels emitted for one target and head size. Immutable."""

    def __init__(self, library: Library, memory: Memory, head_size: int) -> None:
        load_f32, store_f32, load_u8 = memory.load_f32, memory.store_f32, memory.load_u8
        vectors_a_head = head_size // LANES

        @library.kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS)
        def quantise(e: Emitter, source: Value, num_blocks: Value, records: Value, stride: Value) -> None:
            """One row's blocks; `stride`: from record to record."""

            def record_of(index: Value) -> Value:
                return e.address(records, e.times(index, stride))

            _quantise(
                e,
                num_blocks,
                record_of,
                lambda index: _two_vectors(e, e.address(source, e.times(index, 128))),
            )

        @library.kernel(ADDRESS, ADDRESS, FLOAT, returns=FLOAT)
        def norm_factor(e: Emitter, source: Value, num_blocks: Value, eps: Value) -> Value:
            """1 / sqrt(mean(x^2) + eps); NaN where the row has overflowed, so that it cannot pass for zeros."""
            b = e.builder
            squares = e.variable(e.floats(0.0))
            with e.loop(e.times(num_blocks, 2)) as index:
                values = e.load_floats(e.address(source, e.times(index, 64)))
                e.add_product(squares, values, values)
            total = e.total(e.get(squares))
            count = b.sitofp(e.times(num_blocks, 32), F32)
            mean = b.fadd(b.fdiv(total, count), eps)
            factor = b.fdiv(ir.Constant(F32, 1.0), e.call("llvm.sqrt.f32", F32, mean))
            return b.fadd(factor, b.fsub(total, total))

        @library.kernel(ADDRESS, ADDRESS, FLOAT, ADDRESS, ADDRESS, ADDRESS)
        def norm_quantise(
            e: Emitter, source: Value, weight: Value, factor: Value,
            num_blocks: Value, records: Value, stride: Value,
        ) -> None:  # fmt: skip
            spread = e.splat(factor)

            def record_of(index: Value) -> Value:
                return e.address(records, e.times(index, stride))

            def scaled(index: Value) -> list[Value]:
                values, weights = (
                    _two_vectors(e, e.address(at, e.times(index, 128))) for at in (source, weight)
                )
                return [
                    e.builder.fmul(e.builder.fmul(value, spread), by)
                    for value, by in zip(values, weights, strict=True)
                ]

            _quantise(e, num_blocks, record_of, scaled)

        @library.kernel(ADDRESS, ADDRESS, FLOAT, ADDRESS, ADDRESS)
        def norm_store(
            e: Emitter, source: Value, weight: Value, factor: Value, num_blocks: Value, out: Value
        ) -> None:
            spread = e.splat(factor)
            with e.loop(e.times(num_blocks, 2)) as index:
                at = e.times(index, 64)
                scaled = e.builder.fmul(e.load_floats(e.address(source, at)), spread)
                value = e.builder.fmul(scaled, e.load_floats(e.address(weight, at)))
                e.store(value, e.address(out, at), 4)

        @library.kernel(ADDRESS, ADDRESS, ADDRESS)
        def silu_quantise(e: Emitter, pairs: Value, num_rows: Value, records: Value) -> None:
            """Rows of 32 gates and their 32 ups to one block of records; the products replace the gates."""
            b = e.builder

            def gates_of(row: Value) -> Value:
                return e.address(pairs, e.times(row, 256))

            whole_turns = b.lshr(
                e.address(num_rows, _ROWS_A_TURN - 1), e.whole(_ROWS_A_TURN.bit_length() - 1)
            )
            with e.loop(whole_turns) as turn:
                first = e.times(turn, _ROWS_A_TURN)
                left = b.sub(num_rows, first)
                some = b.icmp_signed("<", left, e.whole(_ROWS_A_TURN))
                count = b.select(some, left, e.whole(_ROWS_A_TURN))
                with e.loop(count) as index:
                    gates = gates_of(e.address(first, index))
                    for at, part in zip(
                        (0, 64), _silu_products(e, gates, e.address(gates, 128)), strict=True
                    ):
                        e.store(part, e.address(gates, at), 4)
                _quantise(
                    e,
                    count,
                    lambda index: e.address(records, e.times(e.address(first, index), RECORD_BYTES)),
                    lambda index: _two_vectors(e, gates_of(e.address(first, index))),
                )

        @library.kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS)
        def silu_store(e: Emitter, pairs: Value, num_rows: Value, out: Value, stride: Value) -> None:
            """The same to float32 rows; `stride`: from row to row."""
            with e.loop(num_rows) as row:
                gates, to = e.address(pairs, e.times(row, 256)), e.address(out, e.times(row, stride))
                for at, part in zip((0, 64), _silu_products(e, gates, e.address(gates, 128)), strict=True):
                    e.store(part, e.address(to, at), 4)

        @library.kernel(ADDRESS, ADDRESS)
        def rotate_query(e: Emitter, head: Value, table: Value) -> None:
            """Rotate, and write as [head_size] int16 and their scale over the floats' first part."""
            parts, scale = _quantise_head(e, _rotated(e, head, table, head_size))
            for vector, part in enumerate(parts):
                e.store(part, e.address(head, 32 * vector), 2)
            e.store(scale, e.address(head, 2 * head_size), 4)

        @library.kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS)
        def store_key(e: Emitter, head: Value, table: Value, place: Value, scale_place: Value) -> None:
            """Rotate and write pairs of dimensions, 64 bytes from one to the next."""
            parts, scale = _quantise_head(e, _rotated(e, head, table, head_size))
            for vector, part in enumerate(parts):
                pairs = e.builder.bitcast(part, ir.VectorType(I32, LANES // 2))
                for lane in range(LANES // 2):
                    pair = e.builder.extract_element(pairs, ir.Constant(I32, lane))
                    e.store(pair, e.address(place, 64 * (LANES // 2 * vector + lane)), 4)
            e.store(scale, scale_place, 4)

        @library.kernel(ADDRESS, ADDRESS, ADDRESS)
        def store_value(e: Emitter, head: Value, place: Value, scale_place: Value) -> None:
            """Write the dimensions 4 bytes apart: between them lie those of the other key of a pair."""
            parts, scale = _quantise_head(
                e, [e.load_floats(e.address(head, 64 * vector)) for vector in range(vectors_a_head)]
            )
            for vector, part in enumerate(parts):
                for lane in range(LANES):
                    element = e.builder.extract_element(part, ir.Constant(I32, lane))
                    e.store(element, e.address(place, 4 * (LANES * vector + lane)), 2)
            e.store(scale, scale_place, 4)

        @library.inline(ADDRESS, returns=FLOAT)
        def load_half(e: Emitter, address: Value) -> Value:
            bits = e.load(address, I16, 2)
            wide = e.half_to_float(e.splat(bits))
            return e.builder.extract_element(wide, ir.Constant(I32, 0))

        @library.inline(ADDRESS, returns=FLOAT)
        def load_bfloat(e: Emitter, address: Value) -> Value:
            bits = e.builder.zext(e.load(address, I16, 2), I32)
            return e.builder.bitcast(e.builder.shl(bits, ir.Constant(I32, 16)), F32)

        @library.kernel(ADDRESS, ADDRESS, ADDRESS, returns=FLOAT)
        def largest_of_blocks(e: Emitter, row: Value, num_values: Value, maxima: Value) -> Value:
            """The largest of each block of logits into `maxima`, and of all; NaN where one is NaN.

            The last block is filled up with -inf. Layout: `workers.sampling.summary`.
            """
            b = e.builder
            lowest, not_a_number = e.floats(float("-inf")), e.floats(float("nan"))
            nothing = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [0] * LANES)
            best, any_nan = e.variable(lowest), e.variable(nothing)
            num_blocks = b.lshr(
                e.address(num_values, LOGITS_BLOCK - 1), e.whole(LOGITS_BLOCK.bit_length() - 1)
            )
            with e.loop(num_blocks) as index:
                at = e.address(row, e.times(index, 4 * LOGITS_BLOCK))
                left = b.trunc(b.sub(num_values, e.times(index, LOGITS_BLOCK)), I32)
                of_block, unordered = lowest, nothing
                for vector in range(LOGITS_BLOCK // LANES):
                    address = e.address(at, 4 * LANES * vector)
                    number = ir.Constant(V16I32, [LANES * vector + lane for lane in range(LANES)])
                    exists = b.icmp_signed("<", number, e.splat(left))
                    values = b.select(exists, e.load_floats(address), lowest)
                    with b.if_then(b.icmp_signed("<", left, ir.Constant(I32, LOGITS_BLOCK)), likely=False):
                        e.store(values, address, 4)
                    of_block = e.maximum(values, of_block)
                    unordered = b.or_(unordered, b.fcmp_unordered("uno", values, values))
                e.set(best, e.maximum(of_block, e.get(best)))
                e.set(any_nan, b.or_(e.get(any_nan), unordered))
                marked = e.total(b.select(unordered, not_a_number, e.floats(0.0)))  # NaN or 0
                e.store(b.fadd(e.largest(of_block), marked), e.address(maxima, e.times(index, 4)), 4)
            marked = e.total(b.select(e.get(any_nan), not_a_number, e.floats(0.0)))
            return b.fadd(e.largest(e.get(best)), marked)

        @library.kernel(ADDRESS, ADDRESS, FLOAT, FLOAT, ADDRESS)
        def softmax_mass(
            e: Emitter, row: Value, num_values: Value, best: Value, temperature: Value, place: Value
        ) -> None:
            """Sum of e^((x - best) / temperature) as float64; the sums of single blocks are float32."""
            b = e.builder
            spread_best, spread_temperature = e.splat(best), e.splat(temperature)
            mass = e.variable(ir.Constant(ir.DoubleType(), 0.0))
            num_blocks = b.lshr(
                e.address(num_values, LOGITS_BLOCK - 1), e.whole(LOGITS_BLOCK.bit_length() - 1)
            )
            with e.loop(num_blocks) as index:
                at = e.address(row, e.times(index, 4 * LOGITS_BLOCK))
                weights = []
                for vector in range(LOGITS_BLOCK // LANES):
                    below = b.fsub(e.load_floats(e.address(at, 4 * LANES * vector)), spread_best)
                    weights.append(e.exp(b.fdiv(below, spread_temperature)))
                of_block = b.fadd(b.fadd(weights[0], weights[1]), b.fadd(weights[2], weights[3]))
                e.set(mass, b.fadd(e.get(mass), b.fpext(e.total(of_block), ir.DoubleType())))
            e.store(e.get(mass), place, 8)

        self.largest_of_blocks, self.softmax_mass = largest_of_blocks, softmax_mass
        self.quantise = quantise
        self.norm_factor, self.norm_quantise, self.norm_store = norm_factor, norm_quantise, norm_store
        self.silu_quantise, self.silu_store = silu_quantise, silu_store
        self.rotate_query, self.store_key, self.store_value = rotate_query, store_key, store_value
        self._loads = load_u8, load_f32, store_f32, load_half, load_bfloat
        self._target = library.target

    def make_embed(self, kind: WeightKind) -> Callable[..., Any]:
        """`(table, num_blocks, token, scale, out)`: one output of a packed matrix as a float32 row."""
        load_u8, load_f32, store_f32, load_half, load_bfloat = self._loads
        bytes_a_block = block_bytes(kind)
        if kind not in QUANTISED:
            size = 4 if kind is WeightKind.F32 else 2
            load = {WeightKind.F16: load_half, WeightKind.BF16: load_bfloat, WeightKind.F32: load_f32}[kind]

            @jit
            def embed_floats(table: int, num_blocks: int, token: int, scale: float, out: int) -> None:
                tile = table + token // TILE_OUTPUTS * num_blocks * bytes_a_block
                for index in range(32 * num_blocks):
                    value = load(tile + size * (TILE_OUTPUTS * index + token % TILE_OUTPUTS))
                    store_f32(out + 4 * index, value * scale)

            return embed_floats

        block = QUANTISED[kind]
        scale_offset, min_offset = block.scale_offset, block.min_offset
        is_nibble, has_min, has_halves = block.bits == 4, block.has_min, block.num_scales == 2
        is_signed = kind is WeightKind.S8
        is_offset = is_signed and self._target.has_unsigned_dot
        offset = 8 if kind is WeightKind.U4 else 128 if is_offset else 0

        @jit
        def embed(table: int, num_blocks: int, token: int, scale: float, out: int) -> None:
            lane = token % TILE_OUTPUTS
            tile = table + token // TILE_OUTPUTS * num_blocks * bytes_a_block
            for index in range(num_blocks):
                at = tile + index * bytes_a_block
                for column in range(32):
                    half = column // 16 if has_halves else 0
                    if is_nibble:
                        byte = load_u8(at + 64 * (column % 16 // 4) + 4 * lane + column % 4)
                        quant = (byte >> 4) if column >= 16 else (byte & 15)
                    else:
                        quant = load_u8(at + 64 * (column // 4) + 4 * lane + column % 4)
                        if is_signed and not is_offset and quant >= 128:
                            quant -= 256
                    value = load_half(at + scale_offset + 32 * half + 2 * lane) * (quant - offset)
                    if has_min:
                        value += load_half(at + min_offset + 32 * half + 2 * lane)
                    store_f32(out + 4 * (32 * index + column), value * scale)

        return embed
