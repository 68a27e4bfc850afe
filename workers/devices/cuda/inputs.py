"""A step's input on its way to the device: one block of integers a step, page tables kept by seat.

Owns: pinned staging memory (of two steps, since two may be queued), the input block and the page tables
on the device. Runs in: the worker's thread, inside `submit`.

A graph freezes addresses, so steps of one size find their input at the same place. The block is one copy:

    tokens, positions, row_seats   [rows]      the embedding resolves PREVIOUS_SAMPLE among the tokens
    sample_rows, sample_seats      [samples]
    chunks                         [.., 2]     (first row, rows): tiles of attention, see below
    page updates                   [.., 3]     (seat, column, page), applied by one small kernel

Page tables stay on the device, by seat, because a long context's table is far larger than what changes in
it: a decode row brings a page every PAGE_TOKENS steps. That relies on the seam's promise that a
sequence's pages stay where they are while it holds its seat. One seat more than there are is
nobody's: padding rows of a graph run on it, at position 0 of the one page that is nobody's either.
"""

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from workers.devices.cuda.backend import Backend, DeviceArray
from workers.devices.interface import PAGE_TOKENS, Limits, StepBatch

_ALIGN: Final = 4  # integers in 16 bytes: where a part of device memory may start
NUM_STAGES: Final = 2


def _padded(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A step's input on the device. Padding included, so counts are those that kernels run over."""

    num_rows: int
    num_samples: int
    tokens: DeviceArray
    positions: DeviceArray
    row_seats: DeviceArray
    sample_rows: DeviceArray
    sample_seats: DeviceArray
    num_decode: int  # leading rows that are a sequence each; all others are in chunks
    num_chunks: int
    chunks: DeviceArray
    is_dense: bool = False  # so many rows that products go through the GPU's own library


class Updates(msgspec.Struct, frozen=True, kw_only=True):
    """New page table entries of a step: `entries` [count, 3] int32 on the device."""

    count: int
    entries: DeviceArray


def table_pitch(limits: Limits) -> int:
    """Entries from one seat's page table to the next's."""
    return _padded(limits.max_pages_per_sequence)


def block_size(limits: Limits) -> int:
    """Integers of the largest step: a step's rows begin at most as many pages as they are."""
    rows, samples = _padded(limits.max_rows), _padded(limits.max_seats)
    return 3 * rows + 2 * samples + _padded(2 * limits.max_rows) + _padded(3 * limits.max_rows)


def input_bytes(limits: Limits) -> int:
    """Device memory of a step's input and of the page tables."""
    return 4 * (block_size(limits) + (limits.max_seats + 1) * table_pitch(limits))


class StepInputs:
    """Writes steps into staging memory and queues their copies. Owned by one device."""

    def __init__(
        self, backend: Backend, limits: Limits, *, chunk_rows: int, has_decode_attention: bool
    ) -> None:
        """`chunk_rows`: of one tile of attention; without decode attention single rows are tiles too."""
        self._backend = backend
        self._chunk_rows = chunk_rows
        self._has_decode_attention = has_decode_attention
        self.scratch_seat: Final = limits.max_seats
        self.pitch: Final = table_pitch(limits)
        size = block_size(limits)
        self._block = backend.allocate(size, np.int32)
        self._stages: list[NDArray[np.int32]] = [backend.pinned(size, np.int32) for _ in range(NUM_STAGES)]
        for stage in self._stages:
            stage.fill(0)
        self._next_stage = 0
        self.page_tables = backend.allocate((limits.max_seats + 1, self.pitch), np.int32)
        self._known_pages = np.zeros(limits.max_seats, np.int64)  # columns of each seat's table on the device
        # Stale entries are never read, but every entry names a page that exists.
        backend.upload(
            np.full((limits.max_seats + 1, self.pitch), limits.num_pages, np.int32), self.page_tables
        )

    def forget(self, seat: int) -> None:
        """Another sequence sits down: nothing of its table is known."""
        self._known_pages[seat] = 0

    def _block_of(self, num_rows: int, num_samples: int, num_decode: int, num_chunks: int) -> Block:
        """Where a step of these sizes finds its input: always at the same place."""
        rows, samples = 4 * _padded(num_rows), 4 * _padded(num_samples)
        after_rows, after_samples = 3 * rows, 3 * rows + 2 * samples
        return Block(
            num_rows=num_rows,
            num_samples=num_samples,
            tokens=self._block.part(0, num_rows, np.int32),
            positions=self._block.part(rows, num_rows, np.int32),
            row_seats=self._block.part(2 * rows, num_rows, np.int32),
            sample_rows=self._block.part(after_rows, num_samples, np.int32),
            sample_seats=self._block.part(after_rows + samples, num_samples, np.int32),
            num_decode=num_decode,
            num_chunks=num_chunks,
            chunks=self._block.part(after_samples, (num_chunks, 2), np.int32),
        )

    def example(self, num_rows: int, num_samples: int) -> Block:
        """A step of decode rows and tiles, to ask which kernels it uses; it has no content."""
        return self._block_of(num_rows, num_samples, min(num_rows, num_samples), 1)

    def stage(self, batch: StepBatch, num_rows: int, num_samples: int) -> tuple[Block, Updates | None]:
        """Queue the copy of `batch`, padded with rows of nobody's to `num_rows` and `num_samples`."""
        stage = self._stages[self._next_stage]
        self._next_stage = (self._next_stage + 1) % NUM_STAGES
        count, num_sequences, samples = batch.num_rows, batch.num_sequences, batch.num_samples
        row_part, sample_part = _padded(num_rows), _padded(num_samples)
        positions = batch.positions[:count]
        starts = batch.sequence_starts[: num_sequences + 1]
        seats = batch.sequence_seats[:num_sequences]

        def put(start: int, values: NDArray[np.int32], size: int, padding: int) -> None:
            stage[start : start + len(values)] = values
            stage[start + len(values) : start + size] = padding

        put(0, batch.token_ids[:count], row_part, 0)
        put(row_part, positions, row_part, 0)
        row_seats = seats if count == num_sequences else np.repeat(seats, np.diff(starts))
        put(2 * row_part, row_seats, row_part, self.scratch_seat)
        put(3 * row_part, batch.sample_rows[:samples], sample_part, 0)
        put(3 * row_part + sample_part, batch.sample_seats[:samples], sample_part, self.scratch_seat)
        end = 3 * row_part + 2 * sample_part
        num_decode, chunks = self._attention_work(starts, num_rows)
        put(end, chunks.reshape(-1), _padded(chunks.size), 0)
        end += _padded(chunks.size)
        entries = self._new_pages(batch, seats, positions[starts[1:] - 1] // PAGE_TOKENS + 1)
        stage[end : end + entries.size] = entries.reshape(-1)
        self._backend.upload(stage[: end + entries.size], self._block)
        block = self._block_of(num_rows, num_samples, num_decode, len(chunks))
        if not len(entries):
            return block, None
        updates = Updates(count=len(entries), entries=self._block.part(4 * end, entries.shape, np.int32))
        return block, updates

    def _attention_work(self, starts: NDArray[np.int32], num_rows: int) -> tuple[int, NDArray[np.int32]]:
        """How many leading rows are a sequence each, and tiles [.., 2] of all rows after them."""
        count = int(starts[-1])
        lengths = np.diff(starts)
        if num_rows > count:  # padding: rows of their own
            lengths = np.concatenate([lengths, np.ones(num_rows - count, np.int32)])
            starts = np.concatenate([starts, np.arange(count + 1, num_rows + 1, dtype=np.int32)])
        num_decode = 0
        if self._has_decode_attention:
            longer = np.flatnonzero(lengths != 1)
            num_decode = int(longer[0]) if len(longer) else len(lengths)
        first_rows, ends = starts[num_decode:-1], starts[num_decode + 1 :]
        tiles = -(-(ends - first_rows) // self._chunk_rows)
        index = np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        firsts = np.repeat(first_rows, tiles) + index * self._chunk_rows
        sizes = np.minimum(np.repeat(ends, tiles) - firsts, self._chunk_rows)
        return num_decode, np.stack([firsts, sizes], axis=1).astype(np.int32)

    def _new_pages(
        self, batch: StepBatch, seats: NDArray[np.int32], needed: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Entries [.., 3] that the device's tables lack. Tables of fresh seats are copied whole, here."""
        pieces: list[NDArray[np.int32]] = []
        for index in np.flatnonzero(needed > self._known_pages[seats]).tolist():
            seat, known, end = int(seats[index]), int(self._known_pages[seats[index]]), int(needed[index])
            self._known_pages[seat] = end
            pages = batch.page_tables[index, known:end]
            if known == 0:  # pageable memory: it is copied before this returns
                row = self.page_tables.part(4 * self.pitch * seat, self.pitch, np.int32)
                self._backend.upload(np.ascontiguousarray(pages), row)
                continue
            piece = np.empty((end - known, 3), np.int32)
            piece[:, 0], piece[:, 1], piece[:, 2] = seat, np.arange(known, end), pages
            pieces.append(piece)
        return np.concatenate(pieces) if pieces else np.zeros((0, 3), np.int32)
