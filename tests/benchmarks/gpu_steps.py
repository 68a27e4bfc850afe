"""Steps of a device as the engine would submit them, one ahead: prompts and decode batches of a given size.

Runs in: the GPU's benchmark.
"""

import time
from collections import deque
from typing import Final

import numpy as np

from ds4.generation import SamplingParams
from workers.devices.interface import PAGE_TOKENS, PREVIOUS_SAMPLE, Device, Limits, SeatParams, StepBatch

WARM_UP: Final = 3  # steps


class Bench:
    """Drives one device with `rows` sequences, one step ahead. Owns the step buffers and the pages."""

    def __init__(self, device: Device, limits: Limits, vocab_size: int) -> None:
        self._device = device
        self._limits = limits
        self._buffers = deque(StepBatch(limits) for _ in range(device.pipeline_depth + 2))
        self._flights: deque[StepBatch] = deque()
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size
        # Each sequence's pages lie scattered, as after an hour of service.
        self._all_pages = self._rng.permutation(limits.num_pages).astype(np.int32)
        self.lay_out(1, limits.max_context_tokens)

    def lay_out(self, num_sequences: int, num_tokens: int) -> None:
        """Give each of so many sequences pages of its own for so many tokens."""
        each = -(-num_tokens // PAGE_TOKENS)
        self._pages = self._all_pages[: num_sequences * each].reshape(num_sequences, each)

    def _submit(self, batch: StepBatch) -> None:
        self._device.submit(batch)
        self._flights.append(batch)
        if len(self._flights) > self._device.pipeline_depth:
            self._collect()

    def _collect(self) -> None:
        result = self._device.collect()
        assert result.ok[: result.num_samples].all(), "the model produced values that are not numbers"
        self._buffers.append(self._flights.popleft())

    def _drain(self) -> None:
        while self._flights:
            self._collect()

    def prefill(self, seat: int, num_tokens: int) -> float:
        """Seconds for one prompt on a fresh seat."""
        self._device.seat(
            seat,
            SeatParams(
                sampling=SamplingParams(temperature=0.0), history=np.zeros(0, np.uint32), num_prompt_tokens=0
            ),
        )
        tokens = self._rng.integers(0, self._vocab_size, num_tokens).astype(np.int32)
        started = time.perf_counter()
        for first in range(0, num_tokens, self._limits.max_rows):
            count = min(self._limits.max_rows, num_tokens - first)
            batch = self._buffers.popleft()
            batch.num_rows, batch.num_sequences = count, 1
            batch.token_ids[:count] = tokens[first : first + count]
            batch.positions[:count] = np.arange(first, first + count)
            batch.sequence_seats[0] = batch.sample_seats[0] = seat
            batch.sequence_starts[:2] = 0, count
            self._set_pages(batch, 0, seat, first + count)
            batch.num_samples = int(first + count == num_tokens)
            batch.sample_rows[0] = count - 1
            self._submit(batch)
        self._drain()
        return time.perf_counter() - started

    def decode(self, rows: int, context: int, num_steps: int) -> float:
        """Seconds for `num_steps` steps of `rows` sequences that hold `context` tokens each."""
        started = 0.0
        for step in range(-WARM_UP, num_steps):
            if step == 0:
                self._drain()
                started = time.perf_counter()
            batch = self._buffers.popleft()
            batch.num_rows = batch.num_sequences = batch.num_samples = rows
            batch.token_ids[:rows] = PREVIOUS_SAMPLE
            position = context + WARM_UP + step
            batch.positions[:rows] = position
            batch.sequence_seats[:rows] = batch.sample_seats[:rows] = np.arange(rows)
            batch.sequence_starts[: rows + 1] = np.arange(rows + 1)
            batch.sample_rows[:rows] = np.arange(rows)
            for seat in range(rows):
                self._set_pages(batch, seat, seat, position + 1)
            self._submit(batch)
        self._drain()
        return time.perf_counter() - started

    def _set_pages(self, batch: StepBatch, index: int, seat: int, num_tokens: int) -> None:
        count = -(-num_tokens // PAGE_TOKENS)
        batch.page_tables[index, :count] = self._pages[seat, :count]
