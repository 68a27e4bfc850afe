"""Choosing a row's token in machine code, from the logits that its thread has just looked through.

Owns nothing. Runs in the worker process while the engine's machine code is made. Oracle:
`workers.sampling.filters` on `candidates.best`; the same order of candidates, sums in float64. What is rare
(top_k above the candidates at hand, hundreds of equal logits) is left to it: UNDECIDED.

First the best few dozen: the maxima of the blocks bound them, they are sorted, and most draws end there.
Else the cumulative distribution is inverted without sorting the row: the mass above a bound is one pass
over the blocks that reach it, bisection finds two bounds with few logits between them, those are sorted.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir

from workers.devices.cpu.elementwise import Elementwise
from workers.devices.cpu.emit import (
    ADDRESS,
    DOUBLE,
    F64,
    FLOAT,
    I16,
    I64,
    LANES,
    Emitter,
    Library,
    Value,
    jit,
)
from workers.devices.cpu.formats import LOGITS_BLOCK, MAX_GATHERED
from workers.devices.cpu.memory import Memory
from workers.sampling.filters import UNDECIDED
from workers.sampling.seats import NO_TOP_K
from workers.sampling.summary import draw_offset
from workers.sampling.uniform import GOLDEN, MIX_A, MIX_B

_FEW: Final = 256  # logits between two bounds that end a bisection
_MIN_BLOCKS: Final = 48  # that shall hold one of the best logits; half as many more may
_MAX_PASSES: Final = 40
_GAPS: Final = (57, 23, 10, 4, 1)  # Ciura, Best Increments for the Average Case of Shellsort, 2001

_V16F64: Final = ir.VectorType(F64, LANES)


def make_draw(library: Library, memory: Memory, rows: Elementwise) -> Callable[..., Any]:
    """`(row, num_values, maxima, best, record, scratch)`: fill in the record's mass and token.

    `row` ends with a whole block, filled up with -inf; `best` is finite; `record` is a summary.DRAW. Nothing
    is filled in where the logits are to be changed first.
    """
    load, store, load_i32 = memory.load_i64, memory.store_i64, memory.load_i32
    load_f32, store_f32, load_f64 = memory.load_f32, memory.store_f32, memory.load_f64
    store_f64 = memory.store_f64
    softmax_mass = rows.softmax_mass
    block_size, few, max_gathered, undecided = LOGITS_BLOCK, _FEW, MAX_GATHERED, UNDECIDED
    min_blocks, max_passes, gaps = _MIN_BLOCKS, _MAX_PASSES, _GAPS
    # In a thread's scratch, after the keys: see formats.draw_bytes.
    values_at, near_at, weights_at = 8 * max_gathered, 12 * max_gathered, 16 * max_gathered
    no_top_k, infinity = NO_TOP_K, float("inf")
    f32: Any = np.float32  # bounds are compared in float32
    at_temperature, at_min_p, at_top_k, at_top_p, at_mass, at_token = (
        draw_offset(name) for name in ("temperature", "min_p", "top_k", "top_p", "mass", "token")
    )
    at_stream, at_position, at_adjust_below = (
        draw_offset(name) for name in ("stream", "position", "adjust_below")
    )

    @library.inline(ADDRESS, ADDRESS, returns=DOUBLE)
    def uniform(e: Emitter, stream: Value, position: Value) -> Value:
        """The number in [0, 1) that sampling.uniform documents."""
        b = e.builder
        z = b.add(stream, b.mul(b.add(position, e.whole(1)), e.whole(GOLDEN)))
        for shift, factor in ((30, MIX_A), (27, MIX_B)):
            z = b.mul(b.xor(z, b.lshr(z, e.whole(shift))), e.whole(factor))
        z = b.xor(z, b.lshr(z, e.whole(31)))
        return b.fmul(b.uitofp(b.lshr(z, e.whole(11)), F64), ir.Constant(F64, 2.0**-53))

    @library.kernel(ADDRESS, ADDRESS, FLOAT, FLOAT, FLOAT, ADDRESS)
    def weigh(
        e: Emitter,
        values: Value,
        num_vectors: Value,
        best: Value,
        temperature: Value,
        floor: Value,
        out: Value,
    ) -> None:
        """e^((x - best) / temperature) of each, 0 where that is below the floor."""
        b = e.builder
        spread_best, spread_temperature, spread_floor = e.splat(best), e.splat(temperature), e.splat(floor)
        with e.loop(num_vectors) as index:
            at = e.times(index, 4 * LANES)
            below = b.fsub(e.load_floats(e.address(values, at)), spread_best)
            weights = e.exp(b.fdiv(below, spread_temperature))
            kept = b.fcmp_ordered(">=", weights, spread_floor)
            e.store(b.select(kept, weights, e.floats(0.0)), e.address(out, at), 4)

    @library.kernel(ADDRESS, ADDRESS, ADDRESS, FLOAT, ADDRESS, ADDRESS, returns=ADDRESS)
    def mass_reaching(
        e: Emitter, row: Value, maxima: Value, num_blocks: Value, bound: Value, weights: Value, place: Value
    ) -> Value:
        """Sum in float64 of the weights of all logits that reach the bound, to `place`; their number."""
        b = e.builder
        spread_bound = e.splat(bound)
        mass = e.variable(ir.Constant(_V16F64, [0.0] * LANES))
        count = e.variable(e.floats(0.0))  # exact below 2^24 a lane
        with e.loop(num_blocks) as index:
            largest = e.load(e.address(maxima, e.times(index, 4)), bound.type, 4)
            with b.if_then(b.fcmp_ordered(">=", largest, bound)):
                start = e.times(index, 4 * LOGITS_BLOCK)
                for vector in range(LOGITS_BLOCK // LANES):
                    at = e.address(start, 4 * LANES * vector)
                    taken = b.fcmp_ordered(">=", e.load_floats(e.address(row, at)), spread_bound)
                    weight = b.select(taken, e.load_floats(e.address(weights, at)), e.floats(0.0))
                    e.set(mass, b.fadd(e.get(mass), b.fpext(weight, _V16F64)))
                    e.set(count, b.fadd(e.get(count), b.select(taken, e.floats(1.0), e.floats(0.0))))
        e.store(e.total(e.get(mass)), place, 8)
        return b.fptosi(e.total(e.get(count)), I64)

    @library.inline(ADDRESS, FLOAT, FLOAT, returns=ADDRESS)
    def lanes_between(e: Emitter, block: Value, low: Value, high: Value) -> Value:
        """A bit for each logit of a block: low <= x < high."""
        b = e.builder
        bits = e.whole(0)
        for vector in range(LOGITS_BLOCK // LANES):
            values = e.load_floats(e.address(block, 4 * LANES * vector))
            inside = b.and_(
                b.fcmp_ordered(">=", values, e.splat(low)), b.fcmp_ordered("<", values, e.splat(high))
            )
            part = b.zext(b.bitcast(inside, I16), I64)
            bits = b.or_(bits, b.shl(part, e.whole(LANES * vector)))
        return bits

    @library.inline(ADDRESS, returns=ADDRESS)
    def lowest_bit(e: Emitter, bits: Value) -> Value:
        return e.call("llvm.cttz.i64", I64, bits, ir.Constant(ir.IntType(1), 1))

    @library.inline(ADDRESS, returns=ADDRESS)
    def without_lowest(e: Emitter, bits: Value) -> Value:
        return e.builder.and_(bits, e.builder.sub(bits, e.whole(1)))

    @jit
    def sort(keys: int, count: int) -> None:
        for gap in gaps:
            for index in range(gap, count):
                key, to = load(keys + 8 * index), index
                while to >= gap and load(keys + 8 * (to - gap)) > key:
                    store(keys + 8 * to, load(keys + 8 * (to - gap)))
                    to -= gap
                store(keys + 8 * to, key)

    @jit
    def gather(row: int, maxima: int, num_blocks: int, low: float, high: float, keys: int) -> int:
        """Sorted keys of the logits in [low, high); how many, UNDECIDED if too many."""
        count = 0
        for block in range(num_blocks):
            if load_f32(maxima + 4 * block) < low:
                continue
            bits = lanes_between(row + 4 * block_size * block, low, high)
            while bits != 0:
                if count == max_gathered:
                    return undecided
                number = block * block_size + lowest_bit(bits)
                bits = without_lowest(bits)
                # As in candidates.sort_keys, but signed: descending value, then id. -0 equals 0.
                word = load_i32(row + 4 * number)
                if word == -(1 << 31):
                    word = 0
                descending = word ^ 0x7FFFFFFF if word < 0 else word
                store(keys + 8 * count, ((~descending) << 32) | number)
                count += 1
        sort(keys, count)
        return count

    @jit
    def bound_of_best(maxima: int, num_blocks: int, best: float) -> float:
        """What the maxima of some dozen blocks reach."""
        wanted = min(min_blocks, (num_blocks + 1) // 2)
        distance, low, high, reached = 1.0, best, best, 0
        while reached < wanted:
            distance *= 2
            high, low = low, f32(best - distance)
            reached = 0
            for block in range(num_blocks):
                reached += load_f32(maxima + 4 * block) >= low
        for _ in range(max_passes):
            if reached <= wanted + wanted // 2:
                break
            middle = f32((low + high) / 2)
            count = 0
            for block in range(num_blocks):
                count += load_f32(maxima + 4 * block) >= middle
            if count >= wanted:
                low, reached = middle, count
            else:
                high = middle
        return low

    @jit
    def from_best(
        row: int, num_values: int, maxima: int, num_blocks: int, best: float, record: int, scratch: int
    ) -> int:
        """The token, where the best few dozen logits tell. See filters.draw."""
        bound = bound_of_best(maxima, num_blocks, best)
        count = gather(row, maxima, num_blocks, bound, infinity, scratch)
        if count < 0:
            return undecided
        values, weights = scratch + values_at, scratch + near_at
        for index in range(count):
            number = load(scratch + 8 * index) & 0xFFFFFFFF
            store_f32(values + 4 * index, load_f32(row + 4 * number))
        min_p, top_k, mass = load_f32(record + at_min_p), load(record + at_top_k), load_f64(record + at_mass)
        weigh(values, (count + 15) // 16, best, load_f32(record + at_temperature), min_p, weights)
        ends_here = top_k <= count or count == num_values or load_f32(weights + 4 * (count - 1)) < min_p
        ends_here = ends_here or load_f32(weights + 4 * (count - 1)) == 0
        count = min(count, top_k)
        left = mass
        if mass < 0:
            if not ends_here:
                return undecided
            left = 0.0
            for index in range(count):
                left += load_f32(weights + 4 * index)
        top_p = load_f64(record + at_top_p)
        if top_p < 1:
            sought, left, total = top_p * left, -1.0, 0.0
            for index in range(count):
                total += load_f32(weights + 4 * index)
                if total >= sought:
                    left = total
                    break
            if left < 0:
                return undecided
        sought, total = uniform(load(record + at_stream), load(record + at_position)) * left, 0.0
        for index in range(count):
            total += load_f32(weights + 4 * index)
            if total > sought:
                token: int = load(scratch + 8 * index) & 0xFFFFFFFF
                return token
        return undecided

    @jit
    def invert(
        row: int, maxima: int, num_blocks: int, best: float, record: int, scratch: int, sought: float,
        inclusive: bool,
    ) -> tuple[int, float]:  # fmt: skip
        """The first candidate whose cumulative mass exceeds (or reaches) what is sought, and that mass."""
        weights, place = scratch + weights_at, scratch + near_at
        distance, low, high, base, above, count, mass = 2.0, best, infinity, 0.0, 0, 0, 0.0
        for _ in range(max_passes):
            low = f32(best - distance)
            count = mass_reaching(row, maxima, num_blocks, low, weights, place)
            mass = load_f64(place)
            if mass > sought or (inclusive and mass == sought):
                break
            high, base, above = low, mass, count
            distance *= 1.5
        for _ in range(max_passes):
            if count - above <= few:
                break
            middle = f32((low + min(high, best)) / 2)
            reaching = mass_reaching(row, maxima, num_blocks, middle, weights, place)
            mass = load_f64(place)
            if mass > sought or (inclusive and mass == sought):
                low, count = middle, reaching
            else:
                high, base, above = middle, mass, reaching
        num_gathered = gather(row, maxima, num_blocks, low, high, scratch)
        for index in range(num_gathered):
            number = load(scratch + 8 * index) & 0xFFFFFFFF
            base += load_f32(weights + 4 * number)
            if base > sought or (inclusive and base == sought):
                return number, base
        return undecided, base

    @jit
    def from_all(row: int, maxima: int, num_blocks: int, best: float, record: int, scratch: int) -> int:
        """The token among all logits that min_p leaves."""
        weights, place = scratch + weights_at, scratch + near_at
        weigh(
            row, num_blocks * (block_size // 16), best, load_f32(record + at_temperature),
            load_f32(record + at_min_p), weights,
        )  # fmt: skip
        left, top_p = load_f64(record + at_mass), load_f64(record + at_top_p)
        if left < 0:
            mass_reaching(row, maxima, num_blocks, -infinity, weights, place)
            left = load_f64(place)
        if top_p < 1:
            cut, left = invert(row, maxima, num_blocks, best, record, scratch, top_p * left, True)
            if cut < 0:
                return undecided
        sought = uniform(load(record + at_stream), load(record + at_position)) * left
        return invert(row, maxima, num_blocks, best, record, scratch, sought, False)[0]

    @jit
    def first_best(row: int, maxima: int, best: float) -> int:
        """The lowest id of the largest logit."""
        block = 0
        while load_f32(maxima + 4 * block) < best:
            block += 1
        within: int = lowest_bit(lanes_between(row + 4 * block_size * block, best, infinity))
        return block * block_size + within

    @jit
    def draw(row: int, num_values: int, maxima: int, best: float, record: int, scratch: int) -> None:
        if load(record + at_position) < load(record + at_adjust_below):
            return
        if load(record + at_top_k) == 1:
            store(record + at_token, first_best(row, maxima, best))
            return
        num_blocks = (num_values + block_size - 1) // block_size
        is_whole = load(record + at_top_k) == no_top_k
        if is_whole and load_f32(record + at_min_p) == 0:
            softmax_mass(row, num_values, best, load_f32(record + at_temperature), record + at_mass)
        else:
            store_f64(record + at_mass, -1.0)
        token = from_best(row, num_values, maxima, num_blocks, best, record, scratch)
        if token < 0 and is_whole:
            token = from_all(row, maxima, num_blocks, best, record, scratch)
        store(record + at_token, token)

    return draw
