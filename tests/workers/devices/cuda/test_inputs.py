"""What a step's input looks like on the device, and what of the page tables is copied when."""

import numpy as np
import pytest

from workers.devices.cuda.inputs import Block, StepInputs, Updates
from workers.devices.emulator.backend import EmulatorBackend
from workers.devices.emulator.memory import EmulatorArray
from workers.devices.interface import PAGE_TOKENS, PREVIOUS_SAMPLE, Limits, StepBatch

LIMITS = Limits(max_rows=64, max_seats=6, max_context_tokens=160, num_pages=99)
SCRATCH = 6


class Rig:
    """Inputs on the emulator, which copies late: what was rewritten too early would show."""

    def __init__(self, *, has_decode_attention: bool = True) -> None:
        self.backend = EmulatorBackend()
        self.inputs = StepInputs(
            self.backend, LIMITS, chunk_rows=4, has_decode_attention=has_decode_attention
        )
        self.batch = StepBatch(LIMITS)

    def fill(self, sequences: list[tuple[int, int, int]], samples: list[int]) -> None:
        """(seat, first position, number of rows) each; `samples`: which of them draw a token."""
        batch, row = self.batch, 0
        batch.page_tables.fill(-7)
        for index, (seat, first, count) in enumerate(sequences):
            batch.sequence_seats[index] = seat
            batch.sequence_starts[index] = row
            batch.positions[row : row + count] = np.arange(first, first + count)
            batch.token_ids[row : row + count] = 100 * seat + np.arange(count)
            pages = -(-(first + count) // PAGE_TOKENS)
            batch.page_tables[index, :pages] = 10 * seat + np.arange(pages)
            row += count
        batch.sequence_starts[len(sequences)] = row
        batch.num_rows, batch.num_sequences, batch.num_samples = row, len(sequences), len(samples)
        for index, sample in enumerate(samples):
            batch.sample_rows[index] = batch.sequence_starts[sample + 1] - 1
            batch.sample_seats[index] = sequences[sample][0]

    def stage(self, rows: int = 0, samples: int = 0) -> tuple[Block, Updates | None]:
        batch = self.batch
        return self.inputs.stage(batch, rows or batch.num_rows, samples or batch.num_samples)

    def read(self, array: object) -> list[int]:
        assert isinstance(array, EmulatorArray)
        self.backend.synchronise()
        flat: list[int] = array.data.reshape(-1).tolist()
        return flat

    def table(self, seat: int) -> list[int]:
        return self.read(
            self.inputs.page_tables.part(4 * self.inputs.pitch * seat, self.inputs.pitch, np.int32)
        )


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_every_row_knows_its_token_its_position_and_its_seat(rig: Rig) -> None:
    rig.fill([(4, 20, 1), (1, 0, 3), (2, 5, 2)], samples=[0, 2])
    rig.batch.token_ids[0] = PREVIOUS_SAMPLE
    block, _ = rig.stage()
    assert rig.read(block.tokens) == [PREVIOUS_SAMPLE, 100, 101, 102, 200, 201]
    assert rig.read(block.positions) == [20, 0, 1, 2, 5, 6]
    assert rig.read(block.row_seats) == [4, 1, 1, 1, 2, 2]
    assert rig.read(block.sample_rows) == [0, 5]
    assert rig.read(block.sample_seats) == [4, 2]


def test_padding_rows_run_on_the_seat_of_nobody(rig: Rig) -> None:
    rig.fill([(4, 20, 1), (1, 7, 1)], samples=[0, 1])
    block, _ = rig.stage(rows=4, samples=4)
    assert rig.read(block.row_seats) == [4, 1, SCRATCH, SCRATCH]
    assert rig.read(block.sample_seats) == [4, 1, SCRATCH, SCRATCH]
    assert rig.read(block.tokens)[2:] == rig.read(block.positions)[2:] == [0, 0]
    assert rig.table(SCRATCH)[0] == LIMITS.num_pages  # a page past those that sequences get


def test_a_fresh_seat_brings_its_whole_table(rig: Rig) -> None:
    rig.fill([(3, 32, 4)], samples=[0])
    _, updates = rig.stage()
    assert updates is None
    assert rig.table(3)[:3] == [30, 31, 32]


def test_later_steps_bring_only_new_pages(rig: Rig) -> None:
    rig.fill([(3, 0, 16), (5, 0, 10)], samples=[0, 1])
    rig.stage()
    rig.fill([(3, 16, 1), (5, 10, 1)], samples=[0, 1])
    _, updates = rig.stage()
    assert updates is not None
    assert rig.read(updates.entries) == [3, 1, 31]
    rig.fill([(3, 17, 1), (5, 11, 40)], samples=[0, 1])
    _, updates = rig.stage()
    assert updates is not None
    assert (updates.count, rig.read(updates.entries)) == (3, [5, 1, 51, 5, 2, 52, 5, 3, 53])
    rig.fill([(3, 18, 1), (5, 51, 1)], samples=[0, 1])
    assert rig.stage()[1] is None


def test_a_seat_given_to_another_sequence_is_fresh_again(rig: Rig) -> None:
    rig.fill([(3, 0, 40)], samples=[0])
    rig.stage()
    rig.inputs.forget(3)
    rig.fill([(3, 0, 4)], samples=[0])
    rig.batch.page_tables[0, 0] = 77
    assert rig.stage()[1] is None
    assert rig.table(3)[0] == 77


def test_two_steps_may_be_staged_before_the_first_is_copied(rig: Rig) -> None:
    rig.fill([(0, 0, 2)], samples=[0])
    first, _ = rig.stage()
    seen: list[list[int]] = []
    host = rig.backend.pinned(2, np.int32)
    rig.backend.download(first.tokens, host)
    rig.fill([(1, 0, 2)], samples=[0])
    rig.stage()
    rig.backend.synchronise()
    seen.append(host.tolist())
    assert seen == [[0, 1]]


def test_a_step_of_the_most_rows_fits(rig: Rig) -> None:
    rig.fill([(0, 0, 1)], samples=[0])
    rig.stage()
    rig.fill([(0, 1, 64)], samples=[0])
    block, updates = rig.stage()
    assert rig.read(block.tokens) == list(range(64))
    assert updates is not None
    assert updates.count == 4


def test_leading_decode_rows_have_their_own_attention_and_others_are_cut_in_tiles(rig: Rig) -> None:
    rig.fill([(4, 20, 1), (5, 9, 1), (1, 0, 9), (2, 5, 1)], samples=[0, 1])
    block, _ = rig.stage()
    assert block.num_decode == 2
    assert rig.read(block.chunks) == [2, 4, 6, 4, 10, 1, 11, 1]


def test_a_batch_of_decode_rows_has_no_tiles_padding_included(rig: Rig) -> None:
    rig.fill([(4, 20, 1), (5, 9, 1), (1, 0, 1)], samples=[0, 1, 2])
    block, _ = rig.stage(rows=4, samples=4)
    assert (block.num_decode, block.num_chunks) == (4, 0)


def test_without_decode_attention_every_row_is_in_a_tile() -> None:
    rig = Rig(has_decode_attention=False)
    rig.fill([(4, 20, 1), (5, 9, 1)], samples=[0, 1])
    block, _ = rig.stage(rows=4, samples=4)
    assert block.num_decode == 0
    assert rig.read(block.chunks) == [0, 1, 1, 1, 2, 1, 3, 1]
