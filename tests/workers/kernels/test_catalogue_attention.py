"""Paged attention: decode rows and prompt chunks against the reference, and against each other."""

from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.workers.kernels import reference
from tests.workers.kernels.rig import Rig, emulator, needs_compiler
from workers.devices.cuda.backend import Argument, DeviceArray
from workers.kernels import catalogue

pytestmark = needs_compiler

SPLIT: Final = 64
PITCH: Final = 8
# Probabilities are rounded to float16 (2^-11) and the outputs of unit-sized values are about 1.
TOLERANCE: Final = 2e-3


class Scene:
    """Sequences in scattered pages; everything that nobody wrote is NaN."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, size: int, *, order: int = 0, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lengths, self.heads, self.kv_heads, self.size = lengths, heads, kv_heads, size
        num_pages = len(lengths) * PITCH
        self.tables = rng.permutation(num_pages).reshape(-1, PITCH).astype(np.int32)
        keys, values = (np.full((num_pages, kv_heads, 16, size), np.nan, np.float16) for _ in range(2))
        self.keys = [rng.standard_normal((n, kv_heads, size)).astype(np.float16) for n in lengths]
        self.values = [rng.standard_normal((n, kv_heads, size)).astype(np.float16) for n in lengths]
        for table, length, own_keys, own_values in zip(
            self.tables, lengths, self.keys, self.values, strict=True
        ):
            at = np.arange(length)
            keys[table[at // 16], :, at % 16] = own_keys
            values[table[at // 16], :, at % 16] = own_values
        self.rig = Rig(emulator(order))
        self._pages = [self.rig.put(keys), self.rig.put(values)]

    def queries(self, rows: list[tuple[int, int]], seed: int = 1) -> NDArray[np.float16]:
        """Random ones, the same for the same (sequence, position)."""
        shape = (self.heads, self.size)
        drawn = [np.random.default_rng((seed, *row)).standard_normal(shape) for row in rows]
        queries: NDArray[np.float16] = (np.array(drawn) * 1.4 / np.sqrt(self.size)).astype(np.float16)
        return queries

    def _inputs(self, rows: list[tuple[int, int]]) -> list[Argument]:
        seats, positions = np.array(rows, np.int32).T
        put = self.rig.put
        return [
            put(self.queries(rows)),
            *self._pages,
            put(positions),
            put(seats),
            put(self.tables),
            PITCH,
            self.heads,
        ]

    def _out(self, rows: list[tuple[int, int]]) -> DeviceArray:
        return self.rig.empty((len(rows), self.heads, self.size))

    def decode(self, rows: list[tuple[int, int]], num_blocks: int = 1, split: int = SPLIT) -> NDArray[Any]:
        """Each (sequence, position) as a row of its own."""
        out, inputs = self._out(rows), self._inputs(rows)
        splits = max(position for _, position in rows) // split + 1
        partials = self.rig.empty((len(rows), self.heads, splits, self.size + 2))
        shape = catalogue.attend_row(self.size, split, num_blocks, self.kv_heads, len(rows))
        self.rig.run(shape, [partials, splits, *inputs])
        shape = catalogue.combine(self.size, split, self.heads, len(rows))
        self.rig.run(shape, [out, partials, splits, inputs[3], None, None, 0])
        self._partials: list[Argument] = [partials, splits, inputs[3]]
        return self.rig.get(out)

    def combined(self, num_rows: int, halves: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The rows of the last `decode` as the next product takes them: values and records."""
        width = self.heads * self.size
        values = self.rig.empty((num_rows, width), np.float16 if halves else np.int8)
        records = (
            self.rig.empty(num_rows) if halves else self.rig.empty((num_rows, width // 32), reference.RECORD)
        )
        shape = catalogue.combine(self.size, SPLIT, self.heads, num_rows)
        self.rig.run(shape, [None, *self._partials, values, records, halves])
        kinds = (np.float16, np.float32) if halves else (np.int8, reference.RECORD)
        return self.rig.get(values, kinds[0]), self.rig.get(records, kinds[1])

    def chunks(self, rows: list[tuple[int, int]], most: int | None = None) -> NDArray[Any]:
        """Runs of rows of one sequence together, at most `most` of them."""
        out, inputs = self._out(rows), self._inputs(rows)
        most = most or catalogue.chunk_rows(self.heads, self.kv_heads)
        tiles: list[list[int]] = []
        for index, (sequence, _) in enumerate(rows):
            if tiles and tiles[-1][1] < most and rows[index - 1][0] == sequence:
                tiles[-1][1] += 1
            else:
                tiles.append([index, 1])
        shape = catalogue.attend_chunk(self.size, SPLIT, self.kv_heads, len(tiles))
        self.rig.run(shape, [out, self.rig.put(np.array(tiles, np.int32)), *inputs])
        return self.rig.get(out)

    def wanted(self, rows: list[tuple[int, int]]) -> NDArray[Any]:
        """By the reference."""
        queries = self.queries(rows)
        return np.array(
            [
                reference.attention(query, self.keys[sequence], self.values[sequence], position + 1)
                for query, (sequence, position) in zip(queries, rows, strict=True)
            ]
        )


SHAPES: Final = [(4, 2, 16), (9, 3, 64), (8, 1, 128), (2, 2, 80)]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_decode_rows_and_chunks_are_right_and_agree_bit_for_bit(heads: int, kv_heads: int, size: int) -> None:
    scene = Scene([100, 1, 33], heads, kv_heads, size)
    rows = [(s, p) for s, n in enumerate(scene.lengths) for p in range(n) if p % 7 == 0 or p > n - 3]
    decoded = scene.decode(rows)
    assert np.abs(decoded - scene.wanted(rows)).max() < TOLERANCE
    whole = [(s, p) for s, n in enumerate(scene.lengths) for p in range(n)]
    chunked = scene.chunks(whole)
    picked = [whole.index(row) for row in rows]
    assert np.array_equal(chunked[picked], decoded)


@pytest.mark.parametrize(("heads", "size"), [(4, 32), (2, 128)])
def test_splits_are_joined_as_the_next_product_takes_them(heads: int, size: int) -> None:
    scene = Scene([100, 40], heads, 2, size)
    rows = [(0, 99), (1, 3), (1, 39)]
    floats = scene.decode(rows).reshape(len(rows), -1)
    values, records = scene.combined(len(rows), catalogue.INT8)
    wanted_values, wanted_records = reference.pack_activations(*reference.quantise(floats))
    assert np.array_equal(values, wanted_values)
    assert np.array_equal(records, wanted_records)
    values, scales = scene.combined(len(rows), catalogue.HALVES)
    assert np.array_equal(values, reference.pack_halves(floats.astype(np.float16)))
    assert scales.tolist() == [1.0] * len(rows)


def test_a_prompt_may_be_cut_anywhere() -> None:
    scene = Scene([90], 4, 2, 32)
    rows = [(0, p) for p in range(40, 90)]
    whole = scene.chunks(rows)
    assert np.array_equal(scene.chunks(rows, most=7), whole)
    assert np.array_equal(scene.chunks(rows[30:]), whole[30:])


def test_splits_are_shared_out_in_any_way() -> None:
    scene = Scene([120, 17], 4, 2, 32)
    rows = [(0, 119), (1, 16)]
    results = [scene.decode(rows, num_blocks, split=32) for num_blocks in (1, 3, 9)]
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
    assert np.abs(results[0] - scene.wanted(rows)).max() < TOLERANCE


def test_the_order_of_threads_changes_nothing() -> None:
    rows = [(0, p) for p in range(88, 120)]
    results = []
    for order in (0, 1, 4, 5):
        scene = Scene([120], 4, 2, 32, order=order)
        results += [scene.decode(rows[:8]), scene.chunks(rows)]
    for other in results[2::2]:
        assert np.array_equal(other, results[0])
    for other in results[3::2]:
        assert np.array_equal(other, results[1])


def test_keys_far_apart_in_score_do_not_overflow() -> None:
    scene = Scene([48], 2, 1, 16)
    scene.queries = lambda rows, seed=1: np.full((len(rows), 2, 16), 60, np.float16)  # type: ignore[method-assign]
    rows = [(0, 47), (0, 3)]
    assert np.abs(scene.decode(rows) - scene.wanted(rows)).max() < TOLERANCE
