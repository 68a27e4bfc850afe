"""Attention of a few queries over the pages of one sequence.

Owns nothing. Runs in the worker process while the engine's machine code is made.

A page holds 16 positions: of each layer and KV head the keys as [head_size / 2][16 positions][2] and the
values as [8 pairs of positions][head_size][2] int16, each followed by the positions' scales, [16] float32.
Scaled by their length, keys and queries are no less exact than in float16 (of a common element 12 bits at
heads of 64, 11 at 256), and one instruction multiplies two: sums within a page are whole numbers, float32
across pages.
So 16 scores come from vectors of keys with no sum across lanes. The cache lies as
[run of 64 pages][layer][keys, values][KV head][page]: neighbouring pages of a sequence are one stream,
and memory is touched only as far as pages are in use. Queries that share a KV head, and up to four
consecutive rows of a prompt, share every load. Softmax is computed online over chunks of CHUNK_PAGES
pages (Milakov and Gimelshein 2018); chunks begin at fixed positions and masked keys add exact zeros, so a
row's result has the same bits however rows are grouped. Oracle: the reference device's attention.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from workers.devices.cpu.emit import (
    ADDRESS,
    F32,
    FLOAT,
    I32,
    I64,
    LANES,
    LOG2_E,
    V16F32,
    V16I16,
    V16I32,
    V32I16,
    Emitter,
    Library,
    Value,
    jit,
)
from workers.devices.cpu.groups import (
    CHUNK_PAGES,
    RUN_PAGES,
    SCORES_BYTES,
    QueryGroup,
    page_bytes,
    page_scales_offset,
)

_LOWEST: Final = -3e38  # scores below this are masked
_POWER_AT: Final = 2 * LANES  # of a page's weights
_LEAST_EXPONENT: Final = 27  # biased: a page whose largest weight is below 2^-100 counts as no heavier


def make_attention(library: Library, group: QueryGroup) -> Callable[..., Any]:
    """`(queries, row_stride, pages, keys, values, run_bytes, position, scratch, scale)`, for jitted code.

    `queries`: the first row's first head, [head_size] int16 and a scale, replaced by the output, float32;
    `pages`: int32 page numbers of the sequence; `keys`, `values`: this layer's and KV head's page 0;
    `position`: of the first row.
    """
    queries = _Queries(library, group)
    scores, softmax, add_values = (
        _scores(library, queries),
        _softmax(library, group),
        _values(library, queries),
    )
    begin, finish = _begin(library, group), _finish(library, queries)
    num_rows = group.num_rows

    @jit
    def attend(
        query: int, row_stride: int, pages: int, keys: int, values: int, run_bytes: int, position: int,
        scratch: int, scale: float,
    ) -> None:  # fmt: skip
        num_pages = (position + num_rows + LANES - 1) // LANES
        begin(scratch)
        page = 0
        while page < num_pages:
            count = min(CHUNK_PAGES, num_pages - page)
            first_key = page * LANES
            table = pages + 4 * page
            scores(
                query, row_stride, table, count, keys, values, run_bytes, first_key, position, scratch, scale
            )
            softmax(scratch, count)
            add_values(table, count, values, run_bytes, scratch)
            page += count
        finish(query, row_stride, scratch)

    return attend


class _Queries:
    """Where each query of a group lies."""

    def __init__(self, library: Library, group: QueryGroup) -> None:
        self.group = group
        self.count = group.num_queries
        budget = 24 if library.target.has_wide_registers else 8
        self.vectors = group.head_size // LANES
        fitting = max(1, budget // self.count)
        self.vectors_a_pass = max(n for n in range(1, fitting + 1) if self.vectors % n == 0)

    def addresses(self, e: Emitter, first: Value, row_stride: Value) -> list[Value]:
        """Address of each query: rows first, then heads."""
        heads = self.group.num_heads
        return [
            e.address(first, e.times(row_stride, query // heads), query % heads * 4 * self.group.head_size)
            for query in range(self.count)
        ]


def _state(e: Emitter, group: QueryGroup, scratch: Value, query: Value) -> tuple[Value, Value]:
    """Where the running maximum and sum of a query lie."""
    maximum = e.address(scratch, group.state_offset, e.times(query, 64))
    return maximum, e.address(maximum, 4)


def _page(e: Emitter, group: QueryGroup, pages: Value, index: Value, cache: Value, run_bytes: Value) -> Value:
    """Address of a sequence's page by its index in the table."""
    number = e.builder.sext(e.load(e.address(pages, e.times(index, 4)), I32, 4), I64)
    run = e.builder.lshr(number, e.whole(RUN_PAGES.bit_length() - 1))
    place = e.builder.and_(number, e.whole(RUN_PAGES - 1))
    return e.address(cache, e.times(run, run_bytes), e.times(place, page_bytes(group.head_size)))


def _next(e: Emitter, index: Value, count: Value) -> Value:
    """The next index, or the same one at the end: entries past it are undefined."""
    following = e.address(index, 1)
    return e.builder.select(e.builder.icmp_signed("<", following, count), following, index)


def _begin(library: Library, group: QueryGroup) -> Callable[..., None]:
    @library.kernel(ADDRESS)
    def begin(e: Emitter, scratch: Value) -> None:
        with e.loop(e.whole(group.num_queries)) as query:
            maximum_at, sum_at = _state(e, group, scratch, query)
            e.store(ir.Constant(F32, float("-inf")), maximum_at, 4)
            e.store(ir.Constant(F32, 0.0), sum_at, 4)
        count = group.num_queries * group.head_size // LANES
        with e.loop(e.whole(count)) as index:
            e.store(e.floats(0.0), e.address(scratch, group.output_offset, e.times(index, 64)), 4)

    return begin


def _scores(library: Library, queries: _Queries) -> Callable[..., None]:
    """Scores of a chunk in powers of two into the scratch, -inf for keys after a row's own position.

    The scales of the chunk's values come along.
    """
    group, unroll = queries.group, 4
    scales_at = page_scales_offset(group.head_size)
    row_arguments = [ADDRESS] * 10

    @library.kernel(*row_arguments, FLOAT)
    def scores(
        e: Emitter, first: Value, row_stride: Value, pages: Value, num_pages: Value, cache: Value,
        values: Value, run_bytes: Value, first_key: Value, position: Value, scratch: Value, scale: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        addresses = queries.addresses(e, first, row_stride)
        to_powers = b.fmul(scale, ir.Constant(F32, LOG2_E))
        with e.loop(num_pages) as page:
            keys = _page(e, group, pages, page, cache, run_bytes)
            next_keys = _page(e, group, pages, _next(e, page, num_pages), cache, run_bytes)
            its_values = _page(e, group, pages, page, values, run_bytes)  # read when the scores are known
            sums = [e.variable(e.integers(0)) for _ in range(queries.count)]
            with e.loop(e.whole(group.head_size // 2 // unroll)) as index:
                for line in range(unroll):
                    for ahead in (next_keys, its_values):
                        e.prefetch(e.address(ahead, e.times(index, 64 * unroll), 64 * line))
                for turn in range(unroll):
                    pair = e.address(e.times(index, unroll), turn)
                    of_pair = e.load(e.address(keys, e.times(pair, 64)), V32I16, 4)
                    for variable, address in zip(sums, addresses, strict=True):
                        query = e.splat(e.load(e.address(address, e.times(pair, 4)), I32, 4))
                        product = e.dot_pairs(e.get(variable), of_pair, b.bitcast(query, V32I16))
                        e.set(variable, product)
            page_start = b.trunc(e.address(first_key, e.times(page, LANES)), I32)
            key = b.add(ir.Constant(V16I32, list(range(LANES))), e.splat(page_start))
            key_scales = e.load_floats(e.address(keys, scales_at))
            value_scales = e.load_floats(e.address(its_values, scales_at))
            e.store(value_scales, e.address(scratch, group.value_scales_offset, e.times(page, 64)), 4)
            for query, (variable, address) in enumerate(zip(sums, addresses, strict=True)):
                its_scale = e.load(e.address(address, 2 * group.head_size), F32, 4)
                scales = b.fmul(key_scales, e.splat(b.fmul(its_scale, to_powers)))
                last = e.splat(b.trunc(e.address(position, query // group.num_heads), I32))
                seen = b.icmp_signed("<=", key, last)
                score = b.fmul(b.sitofp(e.get(variable), V16F32), scales)
                at = e.address(scratch, SCORES_BYTES * query, e.times(page, 64))
                e.store(b.select(seen, score, e.floats(float("-inf"))), at, 4)

    return scores


def _softmax(library: Library, group: QueryGroup) -> Callable[..., None]:
    """Scores become weights; updates each query's maximum and sum and corrects what it has added up.

    A weight is 2^(score - maximum so far) times the scale of its value. Of each page they are rounded to
    12 bits and a power of two: [16] int16, then that power. So sums over a page stay within 32 bits.
    """

    @library.kernel(ADDRESS, ADDRESS)
    def softmax(e: Emitter, scratch: Value, num_pages: Value) -> None:
        b = e.builder
        all_value_scales = e.address(scratch, group.value_scales_offset)
        with e.loop(e.whole(group.num_queries)) as query:
            row = e.address(scratch, e.times(query, SCORES_BYTES))
            maximum_at, sum_at = _state(e, group, scratch, query)
            old_maximum = e.load(maximum_at, F32, 4)
            lanes = e.variable(e.splat(old_maximum))
            with e.loop(num_pages) as page:
                e.set(lanes, e.maximum(e.load_floats(e.address(row, e.times(page, 64))), e.get(lanes)))
            maximum = e.largest(e.get(lanes))
            spread = e.splat(maximum)
            sums = e.variable(e.floats(0.0))
            with e.loop(num_pages) as page:
                at = e.address(row, e.times(page, 64))
                score = e.load_floats(at)
                seen = b.fcmp_unordered(">", score, e.floats(_LOWEST))  # a NaN is
                weight = b.select(seen, e.exp2(b.fsub(score, spread)), e.floats(0.0))
                value_scales = e.load_floats(e.address(all_value_scales, e.times(page, 64)))
                scaled = b.select(seen, b.fmul(weight, value_scales), e.floats(0.0))
                # Values that are not numbers are zeros with such a scale: the sum passes it on.
                e.set(sums, b.fadd(b.fadd(e.get(sums), weight), b.fsub(scaled, scaled)))
                power, inverse = _power_of_two(e, scaled)
                whole = e.round(b.fmul(scaled, e.splat(inverse)))[1]
                e.store(b.trunc(whole, V16I16), at, 2)
                e.store(power, e.address(at, _POWER_AT), 4)
            change = e.exp2(e.splat(b.fsub(old_maximum, maximum)))
            correction = b.extract_element(change, ir.Constant(I32, 0))
            new_sum = b.fadd(b.fmul(e.load(sum_at, F32, 4), correction), e.total(e.get(sums)))
            e.store(maximum, maximum_at, 4)
            e.store(new_sum, sum_at, 4)
            output = e.address(scratch, group.output_offset, e.times(query, 4 * group.head_size))
            for vector in range(group.head_size // LANES):
                place = e.address(output, 64 * vector)
                e.store(b.fmul(e.load_floats(place), change), place, 4)

    return softmax


def _power_of_two(e: Emitter, weights: Value) -> tuple[Value, Value]:
    """The power by which the largest of [16] weights, none negative, is at most 4096; and its inverse."""
    b = e.builder

    def exponent(value: int) -> Value:
        return ir.Constant(I32, value << 23)

    largest = e.call("llvm.vector.reduce.smax.v16i32", I32, b.bitcast(weights, V16I32))
    enough = b.icmp_signed(">", largest, exponent(_LEAST_EXPONENT))
    of_largest = b.and_(b.select(enough, largest, exponent(_LEAST_EXPONENT)), exponent(255))
    power, inverse = b.sub(of_largest, exponent(11)), b.sub(exponent(2 * 127 + 11), of_largest)
    return b.bitcast(power, F32), b.bitcast(inverse, F32)


def _values(library: Library, queries: _Queries) -> Callable[..., None]:
    """Output += weights @ values of a chunk's pages.

    Keys that do not exist yet weigh zero, and whatever lies in their place is a whole number.
    """
    group = queries.group
    columns = range(queries.vectors_a_pass)

    @library.kernel(*([ADDRESS] * 5))
    def values(
        e: Emitter, pages: Value, num_pages: Value, cache: Value, run_bytes: Value, scratch: Value
    ) -> None:
        b = e.builder
        with e.loop(num_pages) as page, e.loop(e.whole(queries.vectors // len(columns))) as turn:
            of_page = _page(e, group, pages, page, cache, run_bytes)
            of_turn = e.times(turn, 64 * len(columns))
            here = e.address(of_page, of_turn)
            weights = e.address(scratch, e.times(page, 64))
            output = e.address(scratch, group.output_offset, of_turn)
            sums = [[e.integers(0) for _ in columns] for _ in range(queries.count)]
            for pair in range(LANES // 2):
                loaded = [
                    e.load(e.address(here, 4 * group.head_size * pair + 64 * column), V32I16, 4)
                    for column in columns
                ]
                for query, of_query in enumerate(sums):
                    weight = e.splat(e.load(e.address(weights, SCORES_BYTES * query + 4 * pair), I32, 4))
                    for column, value in enumerate(loaded):
                        of_query[column] = e.dot_pairs(of_query[column], value, b.bitcast(weight, V32I16))
            for query, of_query in enumerate(sums):
                power = e.spread_float(e.address(weights, SCORES_BYTES * query + _POWER_AT))
                for column, whole in enumerate(of_query):
                    place = e.address(output, 4 * group.head_size * query + 64 * column)
                    e.store(e.fma(b.sitofp(whole, V16F32), power, e.load_floats(place)), place, 4)

    return values


def _finish(library: Library, queries: _Queries) -> Callable[..., None]:
    """Divide by the sums and write the outputs over the queries."""
    group = queries.group

    @library.kernel(ADDRESS, ADDRESS, ADDRESS)
    def finish(e: Emitter, first: Value, row_stride: Value, scratch: Value) -> None:
        for query, address in enumerate(queries.addresses(e, first, row_stride)):
            total = e.load(_state(e, group, scratch, e.whole(query))[1], F32, 4)
            inverse = e.splat(e.builder.fdiv(ir.Constant(F32, 1.0), total))
            with e.loop(e.whole(queries.vectors)) as index:
                at = e.times(index, 64)
                source = e.address(scratch, group.output_offset + 4 * group.head_size * query, at)
                e.store(e.builder.fmul(e.load_floats(source), inverse), e.address(address, at), 4)

    return finish
