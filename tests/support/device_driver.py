"""Drives a device step by step, as the runner would: seats, pages, prompt chunks, decode rows.

Owns: one device under test and where each of its sequences stands. Runs in: tests of devices.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ds4.generation import SamplingParams
from workers.devices.interface import (
    PAGE_TOKENS,
    PREVIOUS_SAMPLE,
    Device,
    Limits,
    SeatParams,
    StepBatch,
    StepResult,
)


def small_limits(
    *, max_rows: int = 512, max_seats: int = 32, max_context_tokens: int = 256, spare_pages: int = 0
) -> Limits:
    """Limits with pages for every seat at full context."""
    pages = max_seats * -(-max_context_tokens // PAGE_TOKENS) + spare_pages
    return Limits(
        max_rows=max_rows, max_seats=max_seats, max_context_tokens=max_context_tokens, num_pages=pages
    )


class DeviceDriver:
    """Each seat owns the pages of its full context, shuffled, so that page order never hides a mistake."""

    def __init__(self, device: Device, limits: Limits, seed: int = 0) -> None:
        self.device = device
        self._limits = limits
        self._batch = StepBatch(limits)
        pages = np.random.default_rng(seed).permutation(limits.num_pages)
        columns = limits.max_pages_per_sequence
        self._tables = pages[: limits.max_seats * columns].reshape(limits.max_seats, columns)
        self.lengths = [0] * limits.max_seats

    def seat(self, seat: int, sampling: SamplingParams | None = None, history: Sequence[int] = ()) -> None:
        """A new sequence on `seat`; arg-max unless told otherwise."""
        self.lengths[seat] = 0
        params = SeatParams(
            sampling=sampling or SamplingParams(temperature=0.0),
            history=np.array(history, np.uint32),
            num_prompt_tokens=len(history),
        )
        self.device.seat(seat, params)

    def share_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """`target` continues after the first `num_tokens` (whole pages) of `source`, reading its pages."""
        assert num_tokens % PAGE_TOKENS == 0
        num_pages = num_tokens // PAGE_TOKENS
        self._tables[target, :num_pages] = self._tables[source, :num_pages]
        self.lengths[target] = num_tokens

    def step(self, rows: Mapping[int, Sequence[int]]) -> StepResult:
        """One step: new token ids for each seat, in the order of the mapping; each seat's last row is sampled."""
        batch, start = self._batch, 0
        batch.page_tables.fill(np.iinfo(np.int32).min)  # undefined entries must not be used
        for index, (seat, ids) in enumerate(rows.items()):
            first, end = self.lengths[seat], start + len(ids)
            batch.token_ids[start:end] = ids
            batch.positions[start:end] = np.arange(first, first + len(ids))
            batch.sequence_seats[index] = batch.sample_seats[index] = seat
            batch.sequence_starts[index : index + 2] = start, end
            batch.sample_rows[index] = end - 1
            self.lengths[seat] = first + len(ids)
            num_pages = -(-self.lengths[seat] // PAGE_TOKENS)
            batch.page_tables[index, :num_pages] = self._tables[seat, :num_pages]
            start = end
        batch.num_rows, batch.num_sequences, batch.num_samples = start, len(rows), len(rows)
        self.device.submit(batch)
        return self.device.collect()

    def score(self, ids: Sequence[int], num_samples: int) -> StepResult:
        """One new sequence on seat 0 in one step, its last `num_samples` rows sampled.

        A sample needs a seat each: for all but the last, the other seats are only names.
        """
        batch, count = self._batch, len(ids)
        for seat in range(num_samples):
            self.seat(seat)
        batch.num_rows, batch.num_sequences, batch.num_samples = count, 1, num_samples
        batch.token_ids[:count] = ids
        batch.positions[:count] = np.arange(count)
        batch.sequence_seats[0] = 0
        batch.sequence_starts[:2] = 0, count
        batch.sample_rows[:num_samples] = np.arange(count - num_samples, count)
        batch.sample_seats[:num_samples] = np.arange(num_samples)[::-1]
        batch.page_tables[0] = self._tables[0]
        self.lengths[0] = count
        self.device.submit(batch)
        return self.device.collect()

    def decode(self, seats: Sequence[int]) -> StepResult:
        """One more token for each of `seats`, from the one it sampled last."""
        return self.step({seat: [PREVIOUS_SAMPLE] for seat in seats})

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens of all prompts together, prompt `i` on seat `i`; prompts go in one at a time."""
        tokens: list[list[int]] = []
        for seat, prompt in enumerate(prompts):
            self.seat(seat)
            tokens.append([int(self.step({seat: prompt}).token_ids[0])])
        seats = range(len(prompts))
        for _ in range(num_tokens - 1):
            result = self.decode(seats)
            for seat in seats:
                tokens[seat].append(int(result.token_ids[seat]))
        return tokens
