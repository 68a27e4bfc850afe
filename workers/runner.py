"""From a plan to the device and back: fills step buffers, queues steps, reads results one step behind.

Owns the step buffers and the seats' page tables. Runs in the worker. With a device of pipeline depth
1 the next step is queued before the tokens of the one before are read: a decode row whose token the
host does not know yet says PREVIOUS_SAMPLE, and the device takes the token its seat sampled last.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import msgspec
import numpy as np

from ds4.generation import SamplingParams
from workers.devices.interface import (
    PREVIOUS_SAMPLE,
    Device,
    Limits,
    SeatParams,
    StepBatch,
    StepResult,
)
from workers.sampling.interface import Constraint
from workers.scheduler.batch import Batch, Span
from workers.sequence import Sequence

_CERTAIN: Final = 1e9  # a bias that no logit of a model comes near


class Outcome(msgspec.Struct, frozen=True):
    """One collected step. `result` lives until the next collect."""

    batch: Batch
    result: StepResult
    elapsed_s: float


class _Buffer(StepBatch):
    """A step buffer that knows whose pages its rows show, by the revisions of the tables they came from."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.shown = np.zeros(limits.max_seats, np.int64)  # 0: nobody's


class _Flight(msgspec.Struct, frozen=True):
    batch: Batch
    buffer: _Buffer
    submitted_s: float


class Runner:
    """The only caller of the device. Owned by the engine."""

    def __init__(
        self, device: Device, limits: Limits, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = device
        self._clock = clock
        self.pipeline_depth: Final = device.pipeline_depth
        self._buffers = deque(_Buffer(limits) for _ in range(device.pipeline_depth + 2))
        self._flights: deque[_Flight] = deque()
        # Page tables by seat, how much of each is filled, and a number that each got with its latest change.
        # A step copies those of its sequences that its buffer does not show yet: with long contexts all of
        # them together are megabytes.
        self._tables = np.zeros((limits.max_seats, limits.max_pages_per_sequence), np.int32)
        self._table_sizes = [0] * limits.max_seats
        self._revisions = np.zeros(limits.max_seats, np.int64)
        self._num_revisions = 0

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not collected."""
        return len(self._flights)

    @property
    def must_collect(self) -> bool:
        """True while the device has as many steps queued as it takes."""
        return len(self._flights) > self.pipeline_depth

    @property
    def oldest(self) -> Batch | None:
        """What the next collect will return: the batch a device fault belongs to."""
        return self._flights[0].batch if self._flights else None

    def submit(self, batch: Batch) -> None:
        """Queue one step. Raises DeviceFaultError."""
        for sequence in batch.seated:
            self._seat(sequence)
        scored = [span for span in batch.spans if span.scoring_seats]
        for span in scored:
            self._seat_scores(span)
        buffer = self._buffers.popleft()
        self._fill(buffer, batch)
        if scored:
            self._fill_scored(buffer, batch)
        self._flights.append(_Flight(batch, buffer, self._clock()))
        self._device.submit(buffer)

    def collect(self) -> Outcome:
        """Wait for the oldest step. Raises DeviceFaultError."""
        result = self._device.collect()
        flight = self._flights.popleft()
        self._buffers.append(flight.buffer)
        elapsed_s = result.elapsed_s or self._clock() - flight.submitted_s
        return Outcome(flight.batch, result, elapsed_s)

    def _seat(self, sequence: Sequence) -> None:
        request = sequence.request
        # Past the end of the sequence it makes no difference, and any number may have been asked for.
        suppress_below = min(sequence.num_origin + request.min_tokens, sequence.max_total)
        self._device.seat(
            sequence.seat,
            SeatParams(
                sampling=request.sampling,
                history=np.array(sequence.tokens, np.uint32),
                num_prompt_tokens=sequence.num_origin,
                suppressed_ids=request.stop_token_ids if request.min_tokens else (),
                suppress_below=suppress_below if request.min_tokens else 0,
                # A sequence knows less of it, because scheduling knows no arrays.
                constraint=cast(Constraint | None, sequence.constraint),
            ),
        )
        self._table_sizes[sequence.seat] = 0

    def _seat_scores(self, span: Span) -> None:
        """Have each row "draw" the token that comes next anyway: then its log-probability is the score."""
        sequence = span.sequence
        num_logprobs = max(0, sequence.request.sampling.num_logprobs)
        tokens = np.frombuffer(sequence.tokens, np.uint32)
        for position, seat in enumerate(span.scoring_seats, span.start):
            forced = SamplingParams(
                temperature=0.0,
                logit_bias=((int(tokens[position + 1]), _CERTAIN),),
                num_logprobs=num_logprobs,
            )
            history = tokens[: position + 1]
            self._device.seat(
                seat, SeatParams(sampling=forced, history=history, num_prompt_tokens=len(history))
            )

    @staticmethod
    def _fill_scored(buffer: StepBatch, batch: Batch) -> None:
        """The rows to sample where some spans sample all of theirs."""
        rows: list[int] = []
        seats: list[int] = []
        starts = buffer.sequence_starts.tolist()
        for index, span in enumerate(batch.spans):
            if span.scoring_seats:
                rows += range(starts[index], starts[index + 1])
                seats += span.scoring_seats
            elif span.samples:
                rows.append(starts[index + 1] - 1)
                seats.append(span.sequence.seat)
        buffer.num_samples = len(rows)
        buffer.sample_rows[: len(rows)] = rows
        buffer.sample_seats[: len(rows)] = seats

    def _fill(self, buffer: _Buffer, batch: Batch) -> None:
        spans = batch.spans
        seats = [span.sequence.seat for span in spans]
        num_sequences = len(spans)
        for span in spans:
            sequence = span.sequence
            if len(sequence.pages) != self._table_sizes[sequence.seat]:
                self._update_table(sequence)

        num_decode = batch.num_decode
        decoding = spans[:num_decode]
        buffer.token_ids[:num_decode] = [_known_token(span) for span in decoding]
        buffer.positions[:num_decode] = [span.start for span in decoding]
        buffer.sequence_starts[: num_decode + 1] = np.arange(num_decode + 1, dtype=np.int32)
        row = num_decode
        for index in range(num_decode, num_sequences):
            row = self._fill_chunk(buffer, spans[index], row)
            buffer.sequence_starts[index + 1] = row

        buffer.num_rows = row
        buffer.num_sequences = num_sequences
        buffer.sequence_seats[:num_sequences] = seats
        self._show_tables(buffer, seats)
        sampled = [index for index, span in enumerate(spans) if span.samples]
        num_samples = buffer.num_samples = len(sampled)
        buffer.sample_rows[:num_samples] = buffer.sequence_starts[1 : num_sequences + 1][sampled] - 1
        buffer.sample_seats[:num_samples] = buffer.sequence_seats[:num_sequences][sampled]

    def _fill_chunk(self, buffer: StepBatch, span: Span, row: int) -> int:
        end = row + span.num_rows
        known = np.frombuffer(span.sequence.tokens, np.uint32, span.num_rows, span.start * 4)
        buffer.token_ids[row:end] = known
        buffer.positions[row:end] = np.arange(span.start, span.start + span.num_rows, dtype=np.int32)
        return end

    def _update_table(self, sequence: Sequence) -> None:
        seat, first = sequence.seat, self._table_sizes[sequence.seat]
        num_pages = len(sequence.pages)
        self._tables[seat, first:num_pages] = sequence.pages[first:]
        self._table_sizes[seat] = num_pages
        self._num_revisions += 1
        self._revisions[seat] = self._num_revisions

    def _show_tables(self, buffer: _Buffer, seats: list[int]) -> None:
        """Have the buffer's rows show the tables of these seats."""
        revisions, shown = self._revisions[seats], buffer.shown[: len(seats)]
        for row in np.flatnonzero(revisions != shown).tolist():
            seat = seats[row]
            size = self._table_sizes[seat]
            buffer.page_tables[row, :size] = self._tables[seat, :size]
        shown[:] = revisions


def _known_token(span: Span) -> int:
    tokens = span.sequence.tokens
    return tokens[span.start] if span.start < len(tokens) else PREVIOUS_SAMPLE
