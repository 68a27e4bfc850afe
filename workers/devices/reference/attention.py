"""Paged causal attention in float32: a running softmax over tiles of fixed size, in order of position.

Owns: KV storage and the scratch memory of attention. Runs in: the worker; one thread. Source: the
running softmax is Milakov and Gimelshein, arXiv 1805.02867; paging is Kwon et al., arXiv 2309.06180.

A row's sum over its keys must not depend on its batch mates. So tiles start at fixed positions,
every product has a shape whose rows agree bit for bit (`fixed_order`), and keys that a row may not
see add exact zeros. Rows of one prompt chunk share their tiles; decode rows of up to
MAX_STACK sequences are stacked, longest first, so that a tile needs no work for those already done.

The cache is float32 where other devices use 16 bits: this device is what they are measured against.
"""

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from workers.devices.interface import PAGE_TOKENS, Limits, StepBatch
from workers.devices.reference.fixed_order import agreeing_sizes
from workers.model.program import Dimensions

TILE_TOKENS: Final = 128
_TILE_PAGES: Final = TILE_TOKENS // PAGE_TOKENS
MAX_STACK: Final = 32


class _Tile(msgspec.Struct):
    """One tile of a group: which pages, and what must not be seen."""

    num_active: int  # sequences of the stack that reach this tile
    pages: NDArray[np.int64]  # [num_active, _TILE_PAGES]
    hidden: NDArray[np.bool_] | None  # [num_active, M, TILE_TOKENS] keys after the row's own position
    unwritten: NDArray[np.bool_] | None  # [num_active, TILE_TOKENS] beyond the sequence's end


class _Group(msgspec.Struct):
    """Query rows that run together: [num_sequences, M] of them for each key-value head.

    `rows` are rows of the step, `heads` the heads of each key-value group that take part; `used` of
    the M query rows are real: for a stack those heads, for a chunk its rows times those heads.
    """

    rows: NDArray[np.int64]
    heads: slice
    num_sequences: int
    num_queries: int  # M, a size from `agreeing_sizes`
    used: int
    tiles: list[_Tile]


class PagedAttention:
    """Keys and values of all sequences, [kv heads, pages, PAGE_TOKENS, head] a layer, and their use."""

    def __init__(self, dimensions: Dimensions, limits: Limits) -> None:
        self._heads, self._kv_heads = dimensions.num_heads, dimensions.num_kv_heads
        self._group_heads = self._heads // self._kv_heads
        self._head_size = dimensions.head_size
        shape = (self._kv_heads, limits.num_pages, PAGE_TOKENS, self._head_size)
        self._keys = [np.zeros(shape, np.float32) for _ in range(dimensions.num_layers)]
        self._values = [np.zeros(shape, np.float32) for _ in range(dimensions.num_layers)]
        self._sizes = self._query_sizes()
        stack = min(MAX_STACK, limits.max_seats)
        # Heads of a group that run together: all of them, unless no agreeing size holds so many.
        part = min(self._group_heads, self._sizes[0])
        self._head_parts = [
            slice(first, min(first + part, self._group_heads)) for first in range(0, self._group_heads, part)
        ]
        self._stack_queries = self._fit(part)
        tile = self._kv_heads * stack * TILE_TOKENS * self._head_size
        self._max_stack = stack
        self._tile_keys, self._tile_values = np.empty(tile, np.float32), np.empty(tile, np.float32)
        queries = self._kv_heads * max(self._sizes[0], stack * self._stack_queries)
        self._scores = np.empty(queries * TILE_TOKENS, np.float32)
        self._queries = np.zeros(queries * self._head_size, np.float32)
        self._sums = np.empty(queries * self._head_size, np.float32)
        self._products = np.empty(queries * self._head_size, np.float32)
        self._groups: list[_Group] = []
        self._page_of_row = np.zeros(limits.max_rows, np.int64)
        self._offset_of_row = np.zeros(limits.max_rows, np.int64)
        self._num_rows = 0

    def _query_sizes(self) -> tuple[int, ...]:
        """How many query rows a product may have: sizes that agree for scores and for sums alike."""
        rng = np.random.default_rng(2)
        keys, values = rng.standard_normal((2, TILE_TOKENS, self._head_size), np.float32)

        def multiply(queries: NDArray[np.float32]) -> NDArray[np.float32]:
            stacked = queries[None, None]
            scores = np.matmul(stacked, keys.T)[0, 0]
            weights = np.ascontiguousarray(scores)[None, None]
            return np.concatenate([scores, np.matmul(weights, values)[0, 0]], axis=1)

        return agreeing_sizes(multiply, self._head_size)

    def _fit(self, num_queries: int) -> int:
        """The smallest agreeing size that holds `num_queries`."""
        return next(size for size in reversed(self._sizes) if size >= num_queries)

    # -- once a step -------------------------------------------------------------------------------

    def plan(self, batch: StepBatch) -> None:
        """Lay out the step's groups; every layer then runs the same ones."""
        starts = batch.sequence_starts[: batch.num_sequences + 1].astype(np.int64)
        lengths = np.diff(starts)
        self._num_rows = batch.num_rows
        positions = batch.positions[: batch.num_rows].astype(np.int64)
        tables = batch.page_tables
        sequence_of_row = np.repeat(np.arange(batch.num_sequences), lengths)
        self._page_of_row[: batch.num_rows] = tables[sequence_of_row, positions // PAGE_TOKENS]
        self._offset_of_row[: batch.num_rows] = positions % PAGE_TOKENS

        self._groups = []
        single = np.flatnonzero(lengths == 1)
        single = single[np.argsort(-positions[starts[single]], kind="stable")]
        for heads in self._head_parts:
            for first in range(0, len(single), self._max_stack):
                sequences = single[first : first + self._max_stack]
                rows = starts[sequences]
                seen = np.repeat(positions[rows, None], self._stack_queries, axis=1)
                self._groups.append(self._group(rows, heads, seen, positions[rows], tables[sequences]))
            for sequence in np.flatnonzero(lengths > 1):
                rows = np.arange(starts[sequence], starts[sequence + 1])
                self._plan_chunk(rows, heads, positions, tables[sequence : sequence + 1])

    def _plan_chunk(
        self, rows: NDArray[np.int64], heads: slice, positions: NDArray[np.int64], table: NDArray[np.int32]
    ) -> None:
        """Groups of one sequence's rows: query rows are (row, head), cut to fit the largest agreeing size."""
        num_heads = heads.stop - heads.start
        ends = positions[rows[-1:]]
        step = self._sizes[0] // num_heads
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            used = len(part) * num_heads
            seen = np.full((1, self._fit(used)), positions[part[-1]])
            seen[0, :used] = np.repeat(positions[part], num_heads)
            self._groups.append(self._group(part, heads, seen, ends, table))

    def _group(
        self,
        rows: NDArray[np.int64],
        heads: slice,
        seen: NDArray[np.int64],
        ends: NDArray[np.int64],
        tables: NDArray[np.int32],
    ) -> _Group:
        """`seen` [sequences, M] last visible position of each query row; `ends` [sequences] last written one."""
        num_sequences, num_queries = seen.shape
        tiles = []
        limit = int(seen.max())
        for start in range(0, limit + 1, TILE_TOKENS):
            active = int((seen.max(axis=1) >= start).sum())
            columns = start // PAGE_TOKENS + np.arange(_TILE_PAGES)
            written = columns[None] * PAGE_TOKENS <= ends[:active, None]
            columns = np.minimum(columns, tables.shape[1] - 1)
            # Entries past the last page are undefined: read page 0 instead and hide what it holds.
            pages = np.where(written, tables[:active][:, columns], 0)
            keys = start + np.arange(TILE_TOKENS)
            hidden = keys[None, None] > seen[:active, :, None]
            unwritten = keys[None] > ends[:active, None]
            tiles.append(
                _Tile(
                    num_active=active,
                    pages=pages,
                    hidden=hidden if hidden.any() else None,
                    unwritten=unwritten if unwritten.any() else None,
                )
            )
        used = len(rows) // num_sequences * (heads.stop - heads.start)
        return _Group(
            rows=rows,
            heads=heads,
            num_sequences=num_sequences,
            num_queries=num_queries,
            used=used,
            tiles=tiles,
        )

    # -- once a layer ------------------------------------------------------------------------------

    def append(self, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Store the step's keys and values [rows, kv heads, head] in the pages of `layer`."""
        pages, offsets = self._page_of_row[: self._num_rows], self._offset_of_row[: self._num_rows]
        self._keys[layer][:, pages, offsets] = keys.transpose(1, 0, 2)
        self._values[layer][:, pages, offsets] = values.transpose(1, 0, 2)

    def attend(
        self, layer: int, scale: float, queries: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:
        """Out = attention of queries, both [rows, heads, head] float32; `append` came first."""
        grouped = queries.reshape(-1, self._kv_heads, self._group_heads, self._head_size)
        target = out.reshape(grouped.shape)
        for group in self._groups:
            self._run(layer, np.float32(scale), group, grouped, target)

    def _gather(
        self, storage: NDArray[np.float32], pages: NDArray[np.int64], buffer: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """[kv heads, sequences, TILE_TOKENS, head], contiguous."""
        shape = (self._kv_heads, *pages.shape, PAGE_TOKENS, self._head_size)
        tile = buffer[: np.prod(shape)].reshape(shape)
        np.take(storage, pages, axis=1, out=tile, mode="clip")
        return tile.reshape(self._kv_heads, len(pages), TILE_TOKENS, self._head_size)

    def _run(
        self,
        layer: int,
        scale: np.float32,
        group: _Group,
        queries: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> None:
        used, size = group.used, self._head_size
        padded = (self._kv_heads, group.num_sequences, group.num_queries)
        shape = (self._kv_heads, group.num_sequences, used)
        q = self._queries[: int(np.prod(padded)) * size].reshape(*padded, size)
        # [sequences, rows of each, kv heads, group heads, head] to [kv heads, sequences, queries, head];
        # what lies in the padding queries is never read, so the elementwise work leaves them out.
        picked = queries[group.rows, :, group.heads]
        picked = picked.reshape(group.num_sequences, -1, *picked.shape[1:])
        np.multiply(picked.transpose(2, 0, 1, 3, 4).reshape(*shape, size), scale, out=q[:, :, :used])
        sums = self._sums[: int(np.prod(shape)) * size].reshape(*shape, size)
        sums.fill(0)
        best = np.full(shape, -np.inf, np.float32)
        total = np.zeros(shape, np.float32)
        for tile in group.tiles:
            active = tile.num_active
            keys = self._gather(self._keys[layer], tile.pages, self._tile_keys)
            values = self._gather(self._values[layer], tile.pages, self._tile_values)
            if tile.unwritten is not None:  # another sequence's leftovers: zero times NaN would be NaN
                np.copyto(values, 0, where=tile.unwritten[None, :, :, None])
            inner = (self._kv_heads, active, group.num_queries)
            inner_count = int(np.prod(inner))
            padded_scores = self._scores[: inner_count * TILE_TOKENS].reshape(*inner, TILE_TOKENS)
            np.matmul(q[:, :active], keys.swapaxes(2, 3), out=padded_scores)
            scores = padded_scores[:, :, :used]
            if tile.hidden is not None:
                np.copyto(scores, -np.inf, where=tile.hidden[None, :, :used])
            new_best = np.maximum(best[:, :active], scores.max(axis=-1))
            shrink = np.exp(best[:, :active] - new_best)
            scores -= new_best[..., None]
            np.exp(scores, out=scores)
            best[:, :active] = new_best
            total[:, :active] *= shrink
            total[:, :active] += scores.sum(axis=-1)
            products = self._products[: inner_count * size].reshape(*inner, size)
            np.matmul(padded_scores, values, out=products)
            sums[:, :active] *= shrink[..., None]
            sums[:, :active] += products[:, :, :used]
        sums /= total[..., None]
        done = sums.reshape(self._kv_heads, len(group.rows), -1, size)
        out[group.rows, :, group.heads] = done.transpose(1, 0, 2, 3)
