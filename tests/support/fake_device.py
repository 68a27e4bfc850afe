"""A device without a model, for tests of everything above the device seam.

Its next token is a hash of a seed and of *all* earlier tokens of the sequence, read back through the
page table of the step: a wrong page, position, seat or token changes every token after it. It can
return rows that failed and raise device faults, and works with pipeline depth 0 and 1.
"""

import hashlib
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from workers.devices.interface import (
    PAGE_TOKENS,
    PREVIOUS_SAMPLE,
    DeviceFaultError,
    Limits,
    SeatParams,
    StepBatch,
    StepResult,
)

_UNWRITTEN = -7


def next_token(tokens: Iterable[int], vocab_size: int, seed: int = 0) -> int:
    """What the fake device samples after `tokens`."""
    raw = np.array([*tokens, seed & 0x7FFFFFFF], np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") % vocab_size


def generate(prompt: Iterable[int], count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """The first `count` tokens that follow `prompt`."""
    tokens = list(prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size, seed))
    return tokens[start:]


class FakeDevice:
    """Implements `workers.devices.interface.Device`. `poisoned` tokens make their sequence's rows fail."""

    def __init__(
        self,
        limits: Limits,
        *,
        vocab_size: int = 1000,
        pipeline_depth: int = 0,
        poisoned: Iterable[int] = (),
        fault_at_step: int | None = None,
    ) -> None:
        self.name = "fake"
        self.pipeline_depth = pipeline_depth
        self.limits = limits
        self.vocab_size = vocab_size
        self.poisoned = frozenset(poisoned)
        self.fault_at_step = fault_at_step
        self.num_steps = 0
        self.num_rows = 0  # over all steps
        self.closed = False
        self.batches: list[tuple[int, int]] = []  # (rows, sequences) of each step
        self._kv = np.full(limits.num_pages * PAGE_TOKENS, _UNWRITTEN, np.int64)
        self._params: dict[int, SeatParams] = {}
        self._last = np.zeros(limits.max_seats, np.int64)
        self._counts = [0] * limits.max_seats  # tokens each seat should know: history and samples
        self._queued: deque[StepBatch | tuple[NDArray[np.int32], NDArray[np.bool_]]] = deque()
        self._result = StepResult(limits.max_seats)

    def seat(self, seat: int, params: SeatParams) -> None:
        assert params.history.dtype == np.uint32
        self._params[seat] = params
        self._counts[seat] = len(params.history)

    def submit(self, batch: StepBatch) -> None:
        assert len(self._queued) <= self.pipeline_depth, "more steps queued than the device takes"
        self._queued.append(batch)
        if self.pipeline_depth == 0:
            self._queued.append(self._compute(self._queued.pop()))  # type: ignore[arg-type]

    def collect(self) -> StepResult:
        entry = self._queued.popleft()
        token_ids, passed = self._compute(entry) if isinstance(entry, StepBatch) else entry
        result, count = self._result, len(token_ids)
        result.token_ids.fill(-1)  # whoever keeps a result past the next collect shall notice
        result.num_samples = count
        result.token_ids[:count] = token_ids
        result.ok[:count] = passed
        result.logprobs[:count] = -0.5 - token_ids
        result.top_ids[:count] = token_ids[:, None] + np.arange(result.top_ids.shape[1])
        result.top_logprobs[:count] = -0.5 - token_ids[:, None] - np.arange(result.top_ids.shape[1])
        result.elapsed_s = 0.0123
        return result

    def close(self) -> None:
        self.closed = True

    def _compute(self, batch: StepBatch) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        self.num_steps += 1
        if self.fault_at_step is not None and self.num_steps >= self.fault_at_step:
            raise DeviceFaultError("the fake device was told to fail")
        limits = self.limits
        assert 0 < batch.num_rows <= limits.max_rows
        assert 0 < batch.num_sequences <= limits.max_seats
        assert batch.sequence_starts[0] == 0
        assert batch.sequence_starts[batch.num_sequences] == batch.num_rows
        seats = batch.sequence_seats[: batch.num_sequences].tolist()
        assert len(set(seats)) == len(seats), "a seat occurs twice in a step"
        self.num_rows += batch.num_rows
        self.batches.append((batch.num_rows, batch.num_sequences))
        owners: dict[int, int] = {}
        for index, seat in enumerate(seats):
            self._write(batch, index, seat, owners)
        token_ids, passed = [], []
        sampled = batch.sample_seats[: batch.num_samples].tolist()
        assert len(set(sampled)) == len(sampled), "a seat is sampled twice in a step"
        for row, seat in zip(
            batch.sample_rows[: batch.num_samples].tolist(),
            batch.sample_seats[: batch.num_samples].tolist(),
            strict=True,
        ):
            token, is_sound = self._sample(batch, row, seat)
            token_ids.append(token)
            passed.append(is_sound)
        return np.array(token_ids, np.int32), np.array(passed, np.bool_)

    def _write(self, batch: StepBatch, index: int, seat: int, owners: dict[int, int]) -> None:
        first, end = batch.sequence_starts[index], batch.sequence_starts[index + 1]
        assert first < end
        positions = batch.positions[first:end]
        assert (np.diff(positions) == 1).all()
        assert positions[-1] < self.limits.max_context_tokens
        tokens = batch.token_ids[first:end].astype(np.int64)
        if tokens[-1] == PREVIOUS_SAMPLE:
            tokens[-1] = self._last[seat]
        assert (tokens >= 0).all()
        assert (tokens < self.vocab_size).all()
        cells = self._cells(batch, index, positions)
        for page in set((cells // PAGE_TOKENS).tolist()):
            assert owners.setdefault(page, seat) == seat, "two sequences write to one page"
        self._kv[cells] = tokens

    def _sample(self, batch: StepBatch, row: int, seat: int) -> tuple[int, bool]:
        starts = batch.sequence_starts[: batch.num_sequences + 1]
        index = int(np.searchsorted(starts, row, side="right")) - 1
        forced = self._params[seat].sampling.logit_bias[:1]
        if not forced:  # else a row that is scored: any seat will do
            assert batch.sequence_seats[index] == seat
        position = int(batch.positions[row])
        tokens = self._kv[self._cells(batch, index, np.arange(position + 1))].tolist()
        assert _UNWRITTEN not in tokens, "a position was read that nobody computed"
        params = self._params[seat]
        assert len(tokens) == self._counts[seat], "the seat's history does not match its position"
        self._counts[seat] += 1
        sampling = params.sampling
        token = forced[0][0] if forced else next_token(tokens, self.vocab_size, sampling.seed)
        while position + 1 < params.suppress_below and token in params.suppressed_ids:
            token = (token + 1) % self.vocab_size
        self._last[seat] = token
        return token, not self.poisoned.intersection(tokens)

    def _cells(self, batch: StepBatch, index: int, positions: NDArray[np.signedinteger]) -> NDArray[np.int64]:
        pages: NDArray[np.int64] = batch.page_tables[index, positions // PAGE_TOKENS].astype(np.int64)
        assert (pages >= 0).all()
        assert (pages < self.limits.num_pages).all()
        cells: NDArray[np.int64] = pages * PAGE_TOKENS + positions % PAGE_TOKENS
        return cells
