"""One token for every row of a step, in NumPy: the order of operations is here and nowhere else.

Owns: `HostSampler` with the per-seat state of one device (parameters, penalty counts). Runs in: the
worker, called by the reference and CPU devices; the oracle for samplers on other devices.
Source: this project; semantics are those of `ds4.generation.SamplingParams`.

Order: penalties, bias, suppression, mask, softmax at the temperature, typical_p, top_k, min_p, top_p, draw. A row's
token is a function of its logits, its seat and its position; its batch mates change no bit of it,
because every shortcut below is exact (see `candidates`, `softmax`, `filters`).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workers.sampling import bias, candidates, filters, logprobs, penalties, typical
from workers.sampling.interface import SeatParams, StepResult
from workers.sampling.masks import SeatMasks
from workers.sampling.seats import ADJUSTS, ALWAYS, DRAWS, NO_TOP_K, REPORTS, SeatTable
from workers.sampling.softmax import SoftmaxMass
from workers.sampling.summary import Summary
from workers.sampling.uniform import uniforms

# Candidates tried before the whole row is sorted: most draws of a trained model end in the first.
_NUM_CANDIDATES: Final = (64, 1024, 8192)


class HostSampler:
    """Draws tokens for the seats of one device. Not thread-safe; one caller."""

    def __init__(self, max_seats: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._table = SeatTable(max_seats)
        self._penalties: list[penalties.Penalties | None] = [None] * max_seats
        self._bias: list[bias.Bias | None] = [None] * max_seats
        self._masks = SeatMasks(max_seats, vocab_size)
        self._typical_p = np.ones(max_seats)
        self._softmax = SoftmaxMass(vocab_size)
        # Copies of rows that cannot be used in place.
        self._rows = np.empty((max_seats, vocab_size), np.float32)

    def seat(self, seat: int, params: SeatParams) -> None:
        """Give `seat` to a sequence, forgetting the one before it."""
        sampling = params.sampling
        adjust_below = 0
        self._penalties[seat] = self._bias[seat] = None
        if bias.wanted(params):
            biased = self._bias[seat] = bias.Bias(params)
            adjust_below = biased.adjust_below
        if penalties.wanted(sampling):
            self._penalties[seat] = penalties.Penalties(sampling, params.history, params.num_prompt_tokens)
            adjust_below = ALWAYS
        self._typical_p[seat] = sampling.typical_p
        if typical.wanted(sampling):
            adjust_below = ALWAYS
        self._masks.seat(seat, params.constraint)
        if params.constraint is not None:
            adjust_below = ALWAYS
        self._table.set(seat, sampling, adjust_below=adjust_below)

    def describe(
        self, seats: NDArray[np.int32], positions: NDArray[np.int32], draws: NDArray[np.void]
    ) -> None:
        """Tell a device what to choose itself: fill in `draws` [n] DRAW; see `sample` for the arguments."""
        np.take(self._table.draws, seats, out=draws, mode="clip")
        draws["position"] = positions

    def take(self, seats: NDArray[np.int32], draws: NDArray[np.void], result: StepResult) -> bool:
        """Take over what a device chose; False where that is not all there is to do: then `sample`."""
        num_rows = len(draws)
        tokens = draws["token"]
        if tokens.min(initial=0) < 0 or np.bitwise_or.reduce(self._table.needs[seats]) & REPORTS:
            return False
        result.num_samples = num_rows
        result.forced = {}
        result.token_ids[:num_rows] = tokens
        result.ok[:num_rows] = True
        return True

    def sample(
        self,
        logits: NDArray[np.float32],
        seats: NDArray[np.int32],
        positions: NDArray[np.int32],
        result: StepResult,
        summary: Summary | None = None,
    ) -> None:
        """Draw one token per row into `result` and count it.

        logits [n, vocab_size] float32, only read; rows are contiguous and may be padded at their ends.
        seats [n], each at most once; positions [n]: where in its sequence the drawn token will stand.
        `summary`: of these logits, after `describe`; without it all of it is found here.
        """
        num_rows = len(seats)
        result.num_samples = num_rows
        result.forced = {}
        if num_rows == 0:
            return
        token_ids, ok = result.token_ids[:num_rows], result.ok[:num_rows]
        # arg-max stops at the first NaN, so the value it finds tells for the whole row.
        if summary is None:
            best_ids = logits.argmax(axis=1)
            best = logits[np.arange(num_rows), best_ids]
        else:
            best_ids, best = summary.best()
        token_ids[:] = best_ids
        np.isfinite(best, out=ok)
        needs = self._table.needs[seats]
        if not needs.any():
            return

        needs[~ok] = 0
        needs[positions >= self._table.adjust_below[seats]] &= ~np.uint8(ADJUSTS)
        adjusted = np.flatnonzero(needs & ADJUSTS)
        drawn = np.flatnonzero((needs & (DRAWS | ADJUSTS)) == DRAWS)
        if summary is not None and len(drawn):
            token_ids[drawn] = found = summary.draws["token"][drawn]
            drawn = drawn[found == filters.UNDECIDED]
        if len(drawn):
            token_ids[drawn] = self._draw(
                self._gather(logits, drawn),
                best[drawn],
                seats[drawn],
                positions[drawn],
                summary and summary.of(drawn),
            )
        if len(adjusted):
            result.forced = self._sample_adjusted(
                logits, adjusted, seats[adjusted], positions[adjusted], token_ids, ok
            )
        reported = np.flatnonzero(((needs & REPORTS) != 0) & ok)
        if len(reported):
            num_top = self._table.num_logprobs[seats[reported]]
            raw = self._gather(logits, reported)
            logprobs.report(raw, reported, best[reported], num_top, self._softmax, result)

    def _sample_adjusted(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.int64],
        seats: NDArray[np.int32],
        positions: NDArray[np.int32],
        token_ids: NDArray[np.int32],
        ok: NDArray[np.bool_],
    ) -> dict[int, Sequence[int]]:
        """The same for `rows` whose logits are changed first; on a copy, since log-probabilities are raw.

        Returns what constraints force after the drawn tokens, by row.
        """
        changed = self._copied(logits, rows)
        constrained = [index for index, seat in enumerate(seats.tolist()) if seat in self._masks]
        if constrained:
            self._masks.wait()
        for index, (seat, position) in enumerate(zip(seats.tolist(), positions.tolist(), strict=True)):
            self._adjust(changed[index], seat, position)
            if seat in self._masks and np.isneginf(changed[index].max()):
                changed[index] = logits[rows[index]]  # only the end is left: suppression has to give way
                self._adjust(changed[index], seat, ALWAYS)
            if self._typical_p[seat] < 1.0 and self._table.needs[seat] & DRAWS:
                typical.keep(changed[index], self._table.temperature[seat], float(self._typical_p[seat]))
        best_ids = changed.argmax(axis=1)
        best = changed[np.arange(len(rows)), best_ids]
        token_ids[rows] = best_ids
        ok[rows] = np.isfinite(best)  # False: everything is suppressed
        for index in constrained:
            if self._masks.has_failed(int(seats[index])):
                ok[rows[index]] = False
        drawn = np.flatnonzero((self._table.needs[seats] & DRAWS != 0) & ok[rows])
        if len(drawn):
            values = changed if len(drawn) == len(changed) else changed[drawn]
            token_ids[rows[drawn]] = self._draw(values, best[drawn], seats[drawn], positions[drawn])
        forced = self._accept(rows, seats, token_ids, ok) if constrained else {}
        for index, (token_id, seat) in enumerate(zip(token_ids[rows].tolist(), seats.tolist(), strict=True)):
            if (counts := self._penalties[seat]) is not None:
                for each in (token_id, *forced.get(int(rows[index]), ())):
                    counts.count(each)
        return forced

    def _accept(
        self,
        rows: NDArray[np.int64],
        seats: NDArray[np.int32],
        token_ids: NDArray[np.int32],
        ok: NDArray[np.bool_],
    ) -> dict[int, Sequence[int]]:
        """Let constraints read what was drawn; what that forces, by row."""
        drawn = {int(seat): int(row) for seat, row in zip(seats, rows, strict=True) if ok[row]}
        forced = self._masks.accept((seat, int(token_ids[row])) for seat, row in drawn.items())
        return {drawn[seat]: ids for seat, ids in forced.items()}

    def _adjust(self, row: NDArray[np.float32], seat: int, position: int) -> None:
        """Penalties, bias, suppression and mask of one row [vocab], in place."""
        if (counts := self._penalties[seat]) is not None:
            counts.apply(row)
        if (biased := self._bias[seat]) is not None:
            biased.apply(row, position)
        if seat in self._masks:
            self._masks.apply(seat, row)

    def _gather(self, logits: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """`logits[rows]`, without a copy if that is all of them; valid until the next call."""
        return logits if len(rows) == len(logits) else self._copied(logits, rows)

    def _copied(self, logits: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """`logits[rows]` in memory of our own; valid until the next call."""
        return np.take(logits, rows, axis=0, out=self._rows[: len(rows)], mode="clip")

    def _draw(
        self,
        values: NDArray[np.float32],
        best: NDArray[np.float32],
        seats: NDArray[np.int32],
        positions: NDArray[np.int32],
        summary: Summary | None = None,
    ) -> NDArray[np.int64]:
        """Tokens [n] for rows that all draw. values [n, vocab], best [n] their finite maxima."""
        params, vocab = self._table.draws[seats], self._vocab_size
        uniform = uniforms(params["stream"], positions)
        temperature, top_k = params["temperature"], params["top_k"]
        min_p, top_p = params["min_p"], params["top_p"]
        mass = np.full(len(seats), np.nan)
        unlimited = np.flatnonzero((top_k == NO_TOP_K) & (min_p == 0.0))
        if summary is not None:
            mass[unlimited] = summary.draws["mass"][unlimited]
        elif len(unlimited):
            subset = values if len(unlimited) == len(values) else values[unlimited]
            mass[unlimited] = self._softmax.of(subset, best[unlimited], temperature[unlimited])

        def choose(rows: NDArray[np.int64], sorted_values: NDArray[np.float32]) -> NDArray[np.int64]:
            return filters.draw(
                sorted_values,
                whole_row=sorted_values.shape[1] == vocab,
                temperature=temperature[rows],
                top_k=top_k[rows],
                min_p=min_p[rows],
                top_p=top_p[rows],
                mass=mass[rows],
                uniform=uniform[rows],
            )

        tokens = np.empty(len(seats), np.int64)
        pending = np.arange(len(seats))
        for k in _NUM_CANDIDATES:
            if k >= vocab or not len(pending):
                break
            found = candidates.best(
                values if len(pending) == len(values) else values[pending],
                k,
                summary and summary.of(pending),
            )
            done = np.flatnonzero(found.complete)
            index = choose(pending[done], found.values[done])
            decided = index != filters.UNDECIDED
            done, index = done[decided], index[decided]
            tokens[pending[done]] = found.ids[done, index]
            pending = pending[:0] if len(done) == len(pending) else np.delete(pending, done)
        for i in range(len(pending)):
            row = pending[i : i + 1]
            order = candidates.ranked(values[row[0]])
            tokens[row] = order[choose(row, values[row[0]][order][None])]
        return tokens
