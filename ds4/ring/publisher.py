"""Writing a step's tokens and endings into the event rings, all slots at once.

Owns: event tails, credit and room checks, which requests are outstanding. Runs in: worker.
Source: ours.

Cost is what matters here: no Python loop over slots, only over rows that carry top pairs or an ending.
What follows from a step's set of slots alone (their order by front end, counts, bases) is planned once
and kept while the set stays the same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.generation import GenerationEnd
from ds4.ring import events, layout
from ds4.ring.fence import Fence
from ds4.ring.segment import Segment, Words

TopPairs = Mapping[int, Sequence[tuple[int, float]]]
Ends = Mapping[int, GenerationEnd]

_NO_TOP: Final[TopPairs] = {}
_NO_ENDS: Final[Ends] = {}
_NUM_PLANS: Final = 2


class _Plan(msgspec.Struct):
    """What follows from a set of slots. Rows are in ring order: grouped by front end."""

    key: NDArray[np.int64]  # the slots as given
    order: NDArray[np.int64] | None  # ring order of the given rows; None: as given
    slots: NDArray[np.int64]
    row_front_ends: NDArray[np.int64]
    front_ends: NDArray[np.int64]  # those concerned, ascending
    counts: NDArray[np.int64]  # rows of each of them
    starts: NDArray[np.int64]  # first row of each of them
    ranks: NDArray[np.int64]  # position of a row among its front end's
    records: Words  # [n, 4]; word 1 is constant


class Publisher:
    """The worker's writing half. Owned by one `WorkerRing`, single thread.

    request_ids [num_slots]: the outstanding request of each slot, 0 where there is none.
    num_sent [num_slots]: tokens of it sent so far.
    """

    def __init__(
        self,
        segment: Segment,
        fence: Fence,
        ring_bell: Callable[[int], None],
        cut_off: Callable[[int, str], None],
    ) -> None:
        shape = segment.shape
        self.request_ids = np.zeros(shape.num_slots, np.uint64)
        self.num_sent = np.zeros(shape.num_slots, np.uint64)
        self._blocked: NDArray[np.int64] = np.zeros(0, np.int64)  # slots the last `writable` refused
        self._blocked_ids = np.zeros(0, np.uint64)  # and their requests then
        self.num_rings = 0
        self._segment = segment
        self._fence = fence.call
        self._ring_bell = ring_bell
        self._cut_off = cut_off
        self._capacity = shape.event_capacity
        self._per_front_end = shape.slots_per_front_end
        # The worst the step in flight may still write, and one ending for every slot.
        self._held_back = (layout.MAX_RECORDS_PER_TOKEN + 1) * shape.slots_per_front_end
        self._front_end_of_slot = np.arange(shape.num_slots, dtype=np.int64) // shape.slots_per_front_end
        self._tails = np.zeros(shape.num_front_ends, np.int64)
        self._rung = np.zeros(shape.num_front_ends, np.uint64)
        self._shared_tails = segment.worker_blocks[:, layout.WORKER_EVENT_TAIL]
        self._heads = segment.front_ends[:, layout.FRONT_EVENT_HEAD]
        self._sleeps = segment.front_ends[:, layout.FRONT_SLEEP]
        self._plans: list[_Plan] = []  # latest first; what is asked for and what is published may differ

    def begin(self, slot: int, request_id: int) -> None:
        """A request arrived in a free slot."""
        self.request_ids[slot] = request_id
        self.num_sent[slot] = 0

    def forget_rings(self, front_end: int) -> None:
        """A front end came back: its sleep word starts anew."""
        self._rung[front_end] = 0

    def has_requests(self, front_end: int) -> bool:
        """Whether any slot of this front end has a request."""
        first = front_end * self._per_front_end
        return bool(self.request_ids[first : first + self._per_front_end].any())

    def release(self, slots: NDArray[np.int64]) -> None:
        """These slots have no request any more."""
        self.request_ids[slots] = 0
        self.num_sent[slots] = 0
        self._segment.status[slots] = 0

    def _plan(self, slots: NDArray[np.int64]) -> _Plan:
        for plan in self._plans:
            if np.array_equal(plan.key, slots):
                return plan
        plan = self._new_plan(slots)
        self._plans = [plan, *self._plans[: _NUM_PLANS - 1]]
        return plan

    def _new_plan(self, slots: NDArray[np.int64]) -> _Plan:
        row_front_ends = self._front_end_of_slot[slots]
        order = None
        if len(slots) > 1 and (row_front_ends[1:] < row_front_ends[:-1]).any():
            order = np.argsort(row_front_ends, kind="stable")
            row_front_ends = row_front_ends[order]
        in_order = slots.copy() if order is None else slots[order]
        all_counts = np.bincount(row_front_ends, minlength=self._segment.shape.num_front_ends)
        front_ends = np.flatnonzero(all_counts)
        counts = all_counts[front_ends]
        starts = np.cumsum(counts) - counts
        ranks = np.arange(len(slots)) - np.repeat(starts, counts)
        records = np.zeros((len(slots), layout.EVENT_WORDS), np.uint64)
        records[:, 1] = in_order | events.TOKEN_WORD
        return _Plan(
            slots.copy(), order, in_order, row_front_ends, front_ends, counts, starts, ranks, records
        )

    def writable(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each slot [n] int64: may it get one more token now. One step may be in flight.

        Reads credit and event head; a head that moved makes its cells free (its store is released
        after the copy, this load is followed by a branch before any store into the cells).
        """
        plan = self._plan(slots)
        allowed = self._segment.credits[slots] > self.num_sent[slots]
        front_ends = plan.front_ends
        used = self._tails[front_ends] - self._heads[front_ends].view(np.int64)
        needed = layout.MAX_RECORDS_PER_TOKEN * plan.counts + self._held_back
        tight = (used < 0) | (used + needed > self._capacity)
        if tight.any():
            allowed &= ~np.isin(self._front_end_of_slot[slots], front_ends[tight])
        if allowed.all():
            self._blocked = self._blocked[:0]
        else:
            self._blocked = slots[~allowed]
            self._blocked_ids = self.request_ids[self._blocked]
        return allowed

    @property
    def num_blocked(self) -> int:
        """Slots that the last `writable` refused."""
        return len(self._blocked)

    def is_unblocked(self) -> bool:
        """Whether a request that the last `writable` refused may go on by now."""
        slots, request_ids = self._blocked, self._blocked_ids
        if not len(slots):
            return False
        found = self.writable(slots) & (self.request_ids[slots] == request_ids)
        self._blocked, self._blocked_ids = slots, request_ids
        return bool(found.any())

    def out_of_range(self) -> NDArray[np.int64]:
        """Front ends whose event head is one that no reader can have."""
        unread = self._tails - self._heads.view(np.int64)
        return np.flatnonzero((unread < 0) | (unread > self._capacity))

    def publish(
        self,
        slots: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32] | None,
        top: TopPairs | None,
        ends: Ends | None,
    ) -> None:
        """One token for each of `slots` [n] int64; keys of `top` and `ends` are rows."""
        alive = self.request_ids[slots] != 0
        if not alive.all():  # dropped since the caller last polled: it hears of it at the next poll
            rows = np.flatnonzero(alive)
            moved = {row: at for at, row in enumerate(rows.tolist())}
            slots, token_ids = slots[rows], token_ids[rows]
            logprobs = None if logprobs is None else logprobs[rows]
            top = {moved[row]: pairs for row, pairs in (top or _NO_TOP).items() if row in moved}
            ends = {moved[row]: end for row, end in (ends or _NO_ENDS).items() if row in moved}
        if not len(slots):
            return
        plan = self._plan(slots)
        records, order = plan.records, plan.order
        records[:, 0] = self.request_ids[plan.slots]
        halves = records.view(np.uint32)
        halves[:, events.INDEX_COLUMN] = self.num_sent[plan.slots]
        halves[:, events.TOKEN_COLUMN] = token_ids if order is None else token_ids[order]
        if logprobs is None:
            records[:, 3] = 0
        else:
            records.view(np.float32)[:, events.LOGPROB_COLUMN] = (
                logprobs if order is None else logprobs[order]
            )
        if top or ends:
            self._publish_chains(plan, top or _NO_TOP, ends or _NO_ENDS)
        else:
            self._write(plan.front_ends, plan.counts, plan.row_front_ends, plan.ranks, records)
        self.num_sent[slots] += np.uint64(1)
        if ends:
            self.release(slots[list(ends)])

    def _publish_chains(self, plan: _Plan, top: TopPairs, ends: Ends) -> None:
        """As `publish`, where some rows take more than one record."""
        num_rows = len(plan.slots)
        place = np.arange(num_rows)
        if plan.order is not None:
            place[plan.order] = np.arange(num_rows)
        widths = np.ones(num_rows, np.int64)
        for row, pairs in top.items():
            widths[place[row]] += events.num_chain_records(min(len(pairs), layout.MAX_TOP_PAIRS))
        for row in ends:
            widths[place[row]] += 1
        stops = np.cumsum(widths)
        firsts = stops - widths
        records = np.empty((int(stops[-1]), layout.EVENT_WORDS), np.uint64)
        records[firsts] = plan.records
        for row, pairs in top.items():
            if pairs:
                pairs = pairs[: layout.MAX_TOP_PAIRS]
                first = int(firsts[place[row]])
                records[first, 1] |= np.uint64(len(pairs) << events.PAIRS_SHIFT)
                chain = events.encode_pairs(pairs)
                records[first + 1 : first + 1 + len(chain)] = chain
        for row, end in ends.items():
            at = int(place[row])
            slot = int(plan.slots[at])
            records[int(stops[at]) - 1] = self._final(slot, int(self.num_sent[slot]) + 1, end)
        totals = np.add.reduceat(widths, plan.starts)
        ranks = np.arange(len(records)) - np.repeat(np.cumsum(totals) - totals, totals)
        row_front_ends = np.repeat(plan.front_ends, totals)
        self._write(plan.front_ends, totals, row_front_ends, ranks, records)

    def finish(self, ends: Mapping[int, GenerationEnd]) -> None:
        """Endings without a token; keys are slots. Slots without a request are passed over."""
        slots = np.array(sorted(ends), np.int64)
        slots = slots[self.request_ids[slots] != 0]
        if not len(slots):
            return
        plan = self._new_plan(slots)
        records = np.array(
            [self._final(slot, int(self.num_sent[slot]), ends[slot]) for slot in plan.slots.tolist()],
            np.uint64,
        )
        self._write(plan.front_ends, plan.counts, plan.row_front_ends, plan.ranks, records)
        self.release(slots)

    def _final(self, slot: int, num_tokens: int, end: GenerationEnd) -> list[int]:
        text_bytes = self._segment.write_text(slot, end.error_text) if end.error_text else 0
        return events.final_record(int(self.request_ids[slot]), slot, num_tokens, end, text_bytes)

    def _write(
        self,
        front_ends: NDArray[np.int64],
        counts: NDArray[np.int64],
        row_front_ends: NDArray[np.int64],
        ranks: NDArray[np.int64],
        records: Words,
    ) -> None:
        """Records in ring order -> rings, tails, bells: two fences, one bell per sleeping front end."""
        used = self._tails[front_ends] - self._heads[front_ends].view(np.int64)
        broken = (used < 0) | (used + counts > self._capacity)
        if broken.any():
            # Its head is nonsense, or a caller went past `writable`: never overwrite unread records.
            for front_end in front_ends[broken].tolist():
                self._cut_off(front_end, "its event ring is full or its head is out of range")
            keep = ~np.isin(row_front_ends, front_ends[broken])
            front_ends, counts = front_ends[~broken], counts[~broken]
            row_front_ends, ranks, records = row_front_ends[keep], ranks[keep], records[keep]
            if not len(front_ends):
                return
        cells = (self._tails[row_front_ends] + ranks) & (self._capacity - 1)
        self._segment.events[row_front_ends * self._capacity + cells] = records
        self._fence()  # records before tails; pairs with the tail load in Channel.drain
        tails = self._tails[front_ends] + counts
        self._tails[front_ends] = tails
        self._shared_tails[front_ends] = tails
        self._fence()  # tails before sleep words; pairs with the sleep store in Channel.arm
        sleeps = self._sleeps[front_ends]
        wake = ((sleeps & np.uint64(1)) != 0) & (sleeps != self._rung[front_ends])
        if wake.any():
            woken = front_ends[wake]
            self._rung[woken] = sleeps[wake]
            self.num_rings += len(woken)
            for front_end in woken.tolist():
                self._ring_bell(front_end)
