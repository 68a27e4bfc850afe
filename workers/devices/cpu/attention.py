"""Attention of a few queries over the pages of one sequence.

Owns nothing. Runs in the worker process while the engine's machine code is made.

A page holds 16 positions: of each layer and KV head the keys as [head_size][16 positions] float16 and the
values as [16 positions][head_size] float16. So 16 scores come from one vector of keys with no sum across
lanes. The cache lies as [run of 64 pages][layer][keys, values][KV head][page]: neighbouring pages of a
sequence are one stream, and memory is touched only as far as pages are in use. Queries that
share a KV head, and up to four consecutive rows of a prompt, share every load. Softmax is computed
online over chunks of CHUNK_PAGES pages (Milakov and Gimelshein 2018); chunks begin at fixed positions
and masked keys add exact zeros, so a row's result has the same bits however rows are grouped. Oracle:
the reference device's attention.
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
    V16I32,
    Emitter,
    Library,
    Value,
    jit,
)
from workers.devices.cpu.groups import CHUNK_KEYS, CHUNK_PAGES, RUN_PAGES, QueryGroup, page_bytes

_LINE_BYTES: Final = 64  # of a cache line
_LOWEST: Final = -3e38  # scores below this are masked


def make_attention(library: Library, group: QueryGroup) -> Callable[..., Any]:
    """`(queries, row_stride, pages, keys, values, run_bytes, position, scratch, scale)`, for jitted code.

    `queries`: the first row's first head, float32, replaced by the output; `pages`: int32 page numbers
    of the sequence; `keys`, `values`: this layer's and KV head's page 0; `position`: of the first row.
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
        num_keys = position + num_rows
        num_pages = (num_keys + LANES - 1) // LANES
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
            add_values(table, min(count * LANES, num_keys - first_key), values, run_bytes, scratch)
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
        self.vectors_a_pass = max(1, min(self.vectors, budget // self.count))

    def addresses(self, e: Emitter, first: Value, row_stride: Value) -> list[Value]:
        """Address of each query: rows first, then heads."""
        heads = self.group.num_heads
        return [
            e.address(first, e.times(row_stride, query // heads), query % heads * 4 * self.group.head_size)
            for query in range(self.count)
        ]


def _state(e: Emitter, group: QueryGroup, scratch: Value, query: int, word: int) -> Value:
    return e.address(scratch, group.state_offset + 64 * query + 4 * word)


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
        for query in range(group.num_queries):
            e.store(ir.Constant(F32, float("-inf")), _state(e, group, scratch, query, 0), 4)
            e.store(ir.Constant(F32, 0.0), _state(e, group, scratch, query, 1), 4)
        count = group.num_queries * group.head_size // LANES
        with e.loop(e.whole(count)) as index:
            e.store(e.floats(0.0), e.address(scratch, group.output_offset, e.times(index, 64)), 4)

    return begin


def _scores(library: Library, queries: _Queries) -> Callable[..., None]:
    """Scaled scores of a chunk into the scratch; keys after a row's own position become -inf."""
    group, unroll = queries.group, 4
    row_arguments = [ADDRESS] * 10

    @library.kernel(*row_arguments, FLOAT)
    def scores(
        e: Emitter, first: Value, row_stride: Value, pages: Value, num_pages: Value, cache: Value,
        values: Value, run_bytes: Value, first_key: Value, position: Value, scratch: Value, scale: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        addresses = queries.addresses(e, first, row_stride)
        spread_scale = e.splat(scale)
        with e.loop(num_pages) as page:
            keys = _page(e, group, pages, page, cache, run_bytes)
            next_keys = _page(e, group, pages, _next(e, page, num_pages), cache, run_bytes)
            its_values = _page(
                e, group, pages, page, values, run_bytes
            )  # read when the chunk's scores are known
            sums = [e.variable(e.floats(0.0)) for _ in range(queries.count)]
            with e.loop(e.whole(group.head_size // unroll)) as index:
                for line in range(32 * unroll // _LINE_BYTES):
                    for ahead in (next_keys, its_values):
                        e.prefetch(e.address(ahead, e.times(index, 32 * unroll), _LINE_BYTES * line))
                for turn in range(unroll):
                    dimension = e.address(e.times(index, unroll), turn)
                    of_dimension = e.load_halves(e.address(keys, e.times(dimension, 32)))
                    for variable, address in zip(sums, addresses, strict=True):
                        query = e.spread_float(e.address(address, e.times(dimension, 4)))
                        e.add_product(variable, of_dimension, query)
            page_start = b.trunc(e.address(first_key, e.times(page, LANES)), I32)
            key = b.add(ir.Constant(V16I32, list(range(LANES))), e.splat(page_start))
            for query, variable in enumerate(sums):
                last = e.splat(b.trunc(e.address(position, query // group.num_heads), I32))
                seen = b.icmp_signed("<=", key, last)
                score = b.select(seen, b.fmul(e.get(variable), spread_scale), e.floats(float("-inf")))
                at = e.address(scratch, 4 * CHUNK_KEYS * query, e.times(page, 64))
                e.store(score, at, 4)

    return scores


def _softmax(library: Library, group: QueryGroup) -> Callable[..., None]:
    """Scores become e^(score - maximum so far); updates each query's maximum, sum and correction."""

    @library.kernel(ADDRESS, ADDRESS)
    def softmax(e: Emitter, scratch: Value, num_pages: Value) -> None:
        b = e.builder
        for query in range(group.num_queries):
            row = e.address(scratch, 4 * CHUNK_KEYS * query)
            old_maximum = e.load(_state(e, group, scratch, query, 0), F32, 4)
            lanes = e.variable(e.splat(old_maximum))
            with e.loop(num_pages) as page:
                e.set(lanes, e.maximum(e.load_floats(e.address(row, e.times(page, 64))), e.get(lanes)))
            maximum = e.largest(e.get(lanes))
            spread = e.splat(maximum)
            sums = e.variable(e.floats(0.0))
            with e.loop(num_pages) as page:
                at = e.address(row, e.times(page, 64))
                score = e.load_floats(at)
                seen = b.fcmp_ordered(">", score, e.floats(_LOWEST))
                weight = b.select(seen, e.exp(b.fsub(score, spread)), e.floats(0.0))
                e.set(sums, b.fadd(e.get(sums), weight))
                e.store(weight, at, 4)
            change = e.exp(e.splat(b.fsub(old_maximum, maximum)))
            correction = b.extract_element(change, ir.Constant(I32, 0))
            old_sum = e.load(_state(e, group, scratch, query, 1), F32, 4)
            new_sum = b.fadd(b.fmul(old_sum, correction), e.total(e.get(sums)))
            e.store(maximum, _state(e, group, scratch, query, 0), 4)
            e.store(new_sum, _state(e, group, scratch, query, 1), 4)
            e.store(correction, _state(e, group, scratch, query, 2), 4)

    return softmax


def _values(library: Library, queries: _Queries) -> Callable[..., None]:
    """Output = output * correction + weights @ values of a chunk's first `num_keys` keys.

    Keys that do not exist yet are not read: what lies there may be another sequence's NaN.
    """
    group = queries.group

    @library.kernel(*([ADDRESS] * 5))
    def values(
        e: Emitter, pages: Value, num_keys: Value, cache: Value, run_bytes: Value, scratch: Value
    ) -> None:
        b = e.builder
        num_pages = b.lshr(e.address(num_keys, LANES - 1), e.whole(4))
        for first in range(0, queries.vectors, queries.vectors_a_pass):
            columns = range(first, min(queries.vectors, first + queries.vectors_a_pass))
            places = [
                [e.address(scratch, group.output_offset + 4 * group.head_size * query + 64 * column)
                 for column in columns]
                for query in range(queries.count)
            ]  # fmt: skip
            sums = [[e.variable(e.floats(0.0)) for _ in columns] for _ in range(queries.count)]
            for query in range(queries.count):
                correction = e.spread_float(_state(e, group, scratch, query, 2))
                for variable, place in zip(sums[query], places[query], strict=True):
                    e.set(variable, b.fmul(e.load_floats(place), correction))
            with e.loop(num_pages) as page:
                of_page = _page(e, group, pages, page, cache, run_bytes)
                left = b.sub(num_keys, e.times(page, LANES))
                some = b.icmp_signed("<", left, e.whole(LANES))
                with e.loop(b.select(some, left, e.whole(LANES))) as key:
                    at = e.address(of_page, e.times(key, 2 * group.head_size))
                    loaded = [e.load_halves(e.address(at, 32 * column)) for column in columns]
                    weight_at = e.address(scratch, e.times(page, 64), e.times(key, 4))
                    for query in range(queries.count):
                        weight = e.spread_float(e.address(weight_at, 4 * CHUNK_KEYS * query))
                        for variable, value in zip(sums[query], loaded, strict=True):
                            e.add_product(variable, value, weight)
            for of_query, to in zip(sums, places, strict=True):
                for variable, place in zip(of_query, to, strict=True):
                    e.store(e.get(variable), place, 4)

    return values


def _finish(library: Library, queries: _Queries) -> Callable[..., None]:
    """Divide by the sums and write the outputs over the queries."""
    group = queries.group

    @library.kernel(ADDRESS, ADDRESS, ADDRESS)
    def finish(e: Emitter, first: Value, row_stride: Value, scratch: Value) -> None:
        for query, address in enumerate(queries.addresses(e, first, row_stride)):
            total = e.load(_state(e, group, scratch, query, 1), F32, 4)
            inverse = e.splat(e.builder.fdiv(ir.Constant(F32, 1.0), total))
            with e.loop(e.whole(queries.vectors)) as index:
                at = e.times(index, 64)
                source = e.address(scratch, group.output_offset + 4 * group.head_size * query, at)
                e.store(e.builder.fmul(e.load_floats(source), inverse), e.address(address, at), 4)

    return finish
