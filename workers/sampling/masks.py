"""Which ids each constrained seat may draw next: masks made in the background, applied before sampling.

Owns: `SeatMasks`, one per device, with the mask of every seat. Runs in: the worker; the masks are
computed on one thread of its own while the device computes the step they belong to. Source: this
project; the packing is llguidance's, which other grammar libraries share.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workers.sampling.interface import Constraint

# What the eight bits of each byte add to eight logits: cheaper than unpacking bits and choosing by them.
_ADDENDS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") > 0,
    np.float32(0),
    np.float32(-np.inf),
)


class SeatMasks:
    """Masks by seat. Owned by a device's sampler, which is the only caller."""

    def __init__(self, max_seats: int, vocab_size: int) -> None:
        num_words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._masks = np.zeros((max_seats, num_words), np.uint32)
        self._constraints: dict[int, Constraint] = {}
        self._pending: list[Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._addends = np.empty((num_words * 4, 8), np.float32)

    def seat(self, seat: int, constraint: Constraint | None) -> None:
        """Give `seat` to a sequence; begins to compute its first mask."""
        self._constraints.pop(seat, None)
        if constraint is not None:
            self._constraints[seat] = constraint
            self._start([seat])

    def __contains__(self, seat: int) -> bool:
        return seat in self._constraints

    def accept(self, drawn: Iterable[tuple[int, int]]) -> dict[int, Sequence[int]]:
        """These (seat, token) were drawn: the ids that are forced after them, by seat.

        Begins to compute the masks of the tokens after all that.
        """
        constrained = [(seat, token) for seat, token in drawn if seat in self]
        if not constrained:
            return {}
        work = [(self._constraints[seat], token) for seat, token in constrained]
        # All of a worker's constraints have one source.
        reading = self._executor().submit(work[0][0].source.accept, work)
        self._start([seat for seat, _ in constrained])
        forced = zip(constrained, reading.result(), strict=True)
        return {seat: ids for (seat, _), ids in forced if ids}

    def wait(self) -> NDArray[np.uint32]:
        """The masks [max_seats, ceil(vocab / 32)] of all constrained seats, once they are computed."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        return self._masks

    def has_failed(self, seat: int) -> bool:
        """After `wait`: nothing that may be drawn is known for this seat."""
        return bool(self._constraints[seat].failure)

    def apply(self, seat: int, row: NDArray[np.float32]) -> None:
        """After `wait`: forbid in the logits `row` [vocab], in place, what the seat may not draw."""
        np.take(_ADDENDS, self._masks[seat].view(np.uint8), axis=0, out=self._addends, mode="clip")
        row += self._addends.reshape(-1)[: self._vocab_size]

    def _start(self, seats: list[int]) -> None:
        wanted = [(self._constraints[seat], seat) for seat in seats]
        source = wanted[0][0].source
        self._pending.append(self._executor().submit(source.compute, wanted, self._masks))

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ds4-masks")
        return self._thread
