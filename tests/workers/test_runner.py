"""From plan to step buffer: rows, positions, page tables, samples, seat parameters."""

from collections import deque

import numpy as np
import pytest

from tests.support.sequences import make_sequence
from workers.devices.interface import (
    PREVIOUS_SAMPLE,
    DeviceFaultError,
    Limits,
    SeatParams,
    StepBatch,
    StepResult,
)
from workers.runner import Runner
from workers.scheduler.batch import Batch, Span
from workers.sequence import Sequence

LIMITS = Limits(max_rows=32, max_seats=4, max_context_tokens=128, num_pages=64)


class Recorder:
    """A device that keeps what it is given."""

    name = "recorder"

    def __init__(self, pipeline_depth: int = 1) -> None:
        self.pipeline_depth = pipeline_depth
        self.seats: dict[int, SeatParams] = {}
        self.steps: deque[StepBatch] = deque()
        self.elapsed_s = 0.25

    def seat(self, seat: int, params: SeatParams) -> None:
        self.seats[seat] = params

    def submit(self, batch: StepBatch) -> None:
        self.steps.append(batch)

    def collect(self) -> StepResult:
        result = StepResult(LIMITS.max_seats)
        result.elapsed_s = self.elapsed_s
        return result

    def close(self) -> None:
        pass


def seated(seat: int, prompt: list[int], pages: list[int], num_cached: int = 0, **fields: object) -> Sequence:
    sequence = make_sequence(prompt, **fields)  # type: ignore[arg-type]
    sequence.take_seat(seat, pages, num_cached)
    return sequence


def span(sequence: Sequence, num_rows: int) -> Span:
    start = sequence.num_scheduled
    return Span(sequence, start, num_rows, sequence.schedule(num_rows))


def batch(*spans: Span, num_decode: int = 0, seated: tuple[Sequence, ...] = ()) -> Batch:
    num_rows = sum(one.num_rows for one in spans)
    return Batch(spans=spans, num_rows=num_rows, num_decode=num_decode, seated=seated)


def test_chunks_and_decode_rows_lie_where_the_device_expects_them() -> None:
    device = Recorder()
    runner = Runner(device, LIMITS)
    decoding = seated(2, [7, 8], [5])
    runner.submit(batch(span(decoding, 2), seated=(decoding,)))
    whole = seated(0, [1, 2, 3], [9])
    chunk = seated(3, list(range(40)), [20, 21, 22], num_cached=16)
    runner.submit(
        batch(span(decoding, 1), span(whole, 3), span(chunk, 10), num_decode=1, seated=(whole, chunk))
    )
    step = device.steps[1]
    assert step.num_rows == 14
    assert step.token_ids[:14].tolist() == [PREVIOUS_SAMPLE, 1, 2, 3, *range(16, 26)]
    assert step.positions[:14].tolist() == [2, 0, 1, 2, *range(16, 26)]
    assert step.num_sequences == 3
    assert step.sequence_seats[:3].tolist() == [2, 0, 3]
    assert step.sequence_starts[:4].tolist() == [0, 1, 4, 14]
    assert step.page_tables[0, 0] == 5
    assert step.page_tables[1, 0] == 9
    assert step.page_tables[2, :3].tolist() == [20, 21, 22]
    assert step.num_samples == 2, "the unfinished chunk samples nothing"
    assert step.sample_rows[:2].tolist() == [0, 3]
    assert step.sample_seats[:2].tolist() == [2, 0]


def test_a_token_the_host_knows_is_named() -> None:
    device = Recorder(pipeline_depth=0)
    runner = Runner(device, LIMITS)
    sequence = seated(1, [7, 8], [5])
    runner.submit(batch(span(sequence, 2), seated=(sequence,)))
    runner.collect()
    sequence.collect(2, sampled=True)
    sequence.accept(99)
    runner.submit(batch(span(sequence, 1), num_decode=1))
    assert device.steps[1].token_ids[0] == 99


def test_a_page_that_was_added_appears_in_the_next_step() -> None:
    device = Recorder()
    runner = Runner(device, LIMITS)
    sequence = seated(1, [1] * 16, [5])
    runner.submit(batch(span(sequence, 16), seated=(sequence,)))
    sequence.pages.append(6)
    runner.submit(batch(span(sequence, 1), num_decode=1))
    assert device.steps[1].page_tables[0, :2].tolist() == [5, 6]


def test_a_seat_taken_again_shows_its_new_pages() -> None:
    device = Recorder(pipeline_depth=2)
    runner = Runner(device, LIMITS)
    first, second = seated(1, [1] * 32, [5, 6]), seated(1, [2] * 32, [7, 8])
    for sequence in (first, second):
        runner.submit(batch(span(sequence, 32), seated=(sequence,)))
    assert device.steps[1].page_tables[0, :2].tolist() == [7, 8]


def test_every_buffer_shows_the_pages_of_whoever_is_in_the_row_now() -> None:
    device = Recorder(pipeline_depth=1)
    runner = Runner(device, LIMITS)
    one, two, three = (seated(seat, [seat] * 40, [seat * 8, seat * 8 + 1, seat * 8 + 2]) for seat in range(3))
    newcomer = seated(0, [9] * 20, [60, 61])
    rounds = [[one, two, three]] * 4 + [[two, three]] * 4 + [[newcomer, three], [three, newcomer]] * 4
    for number, sequences in enumerate(rounds):
        fresh = tuple(one for one in sequences if one.num_scheduled == 0)
        if number in (2, 6, 10):
            three.pages.append(40 + number)
        runner.submit(batch(*(span(one, 1) for one in sequences), seated=fresh))
        step = device.steps[-1]
        for row, sequence in enumerate(sequences):
            assert step.page_tables[row, : len(sequence.pages)].tolist() == sequence.pages
        if runner.must_collect:
            runner.collect()


def test_a_buffer_is_not_reused_before_its_step_was_collected() -> None:
    device = Recorder(pipeline_depth=1)
    runner = Runner(device, LIMITS)
    sequence = seated(0, [1] * 30, [1, 2])
    runner.submit(batch(span(sequence, 10), seated=(sequence,)))
    runner.submit(batch(span(sequence, 10)))
    queued = [runner.must_collect]
    assert device.steps[0] is not device.steps[1]
    assert device.steps[0].positions[0] == 0
    runner.collect()
    assert [*queued, runner.must_collect] == [True, False]
    runner.submit(batch(span(sequence, 5)))
    assert device.steps[2] is not device.steps[1]


def test_the_seat_learns_the_history_and_where_output_begins() -> None:
    device = Recorder()
    sequence = seated(
        3, [1, 2, 3, 50, 51], [0], max_tokens=9, num_resumed_tokens=2, min_tokens=4, stop_token_ids=(9, 10)
    )
    Runner(device, LIMITS).submit(batch(span(sequence, 5), seated=(sequence,)))
    params = device.seats[3]
    assert params.history.tolist() == [1, 2, 3, 50, 51]
    assert params.history.dtype == np.uint32
    assert params.num_prompt_tokens == 3
    assert params.suppressed_ids == (9, 10)
    assert params.suppress_below == 3 + 4
    assert params.sampling is sequence.request.sampling


def test_more_min_tokens_than_an_array_can_hold_last_to_the_end_of_the_sequence() -> None:
    device = Recorder()
    sequence = seated(0, [1, 2], [0], max_tokens=9, min_tokens=2**63, stop_token_ids=(9,))
    Runner(device, LIMITS).submit(batch(span(sequence, 2), seated=(sequence,)))
    assert device.seats[0].suppress_below == 2 + 9


def test_without_min_tokens_nothing_is_suppressed() -> None:
    device = Recorder()
    sequence = seated(0, [1], [0], stop_token_ids=(9,))
    Runner(device, LIMITS).submit(batch(span(sequence, 1), seated=(sequence,)))
    assert (device.seats[0].suppressed_ids, device.seats[0].suppress_below) == ((), 0)


def test_a_step_takes_the_time_the_device_says_or_the_clock_shows() -> None:
    device = Recorder()
    times = iter([10.0, 10.0, 13.0])
    runner = Runner(device, LIMITS, clock=lambda: next(times))
    sequence = seated(0, [1] * 30, [1, 2])
    runner.submit(batch(span(sequence, 10), seated=(sequence,)))
    runner.submit(batch(span(sequence, 10)))
    assert runner.collect().elapsed_s == 0.25
    device.elapsed_s = 0.0
    assert runner.collect().elapsed_s == 3.0


def test_the_oldest_step_is_the_one_a_fault_belongs_to() -> None:
    class Failing(Recorder):
        def collect(self) -> StepResult:
            raise DeviceFaultError("no")

    runner = Runner(Failing(), LIMITS)
    assert runner.oldest is None
    sequence = seated(0, [1] * 30, [1, 2])
    first = batch(span(sequence, 10), seated=(sequence,))
    runner.submit(first)
    runner.submit(batch(span(sequence, 10)))
    with pytest.raises(DeviceFaultError):
        runner.collect()
    assert runner.oldest is first
