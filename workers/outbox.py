"""Tokens on their way to the ring: a step's tokens go out together, and none is ever lost.

Owns the tokens of slots whose front end has given no credit for them. Runs in the worker. The engine
pauses such slots, but a step that was queued before may still bring a token: it is held here, in
order, with the ending that follows it.
"""

from collections import deque
from collections.abc import Iterable, KeysView

import msgspec
import numpy as np

from ds4.generation import GenerationEnd, TokenEvent
from ds4.ring.worker_end import WorkerRing


class StepTokens:
    """What one step brought, row by row. Filled by the engine, sent once."""

    __slots__ = ("ends", "events", "finals", "logprobs", "slots", "token_ids", "top")

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: dict[int, float] = {}  # by row, of those that asked
        self.top: dict[int, list[tuple[int, float]]] = {}  # by row
        self.ends: dict[int, GenerationEnd] = {}  # by row: the request ends with this token
        self.finals: dict[int, GenerationEnd] = {}  # by slot: it ends without one

    def add(self, slot: int, event: TokenEvent, end: GenerationEnd | None = None) -> None:
        """One more row."""
        row = len(self.slots)
        self.slots.append(slot)
        self.token_ids.append(event.token_id)
        if event.logprob:
            self.logprobs[row] = event.logprob
        if event.top:
            self.top[row] = list(event.top)
        if end is not None:
            self.ends[row] = end


class _Held(msgspec.Struct, frozen=True):
    event: TokenEvent | None  # None: the ending stands alone
    end: GenerationEnd | None


class Outbox:
    """The engine's way to the ring. Owned by the engine."""

    def __init__(self, ring: WorkerRing) -> None:
        self._ring = ring
        self._held: dict[int, deque[_Held]] = {}

    @property
    def blocked(self) -> KeysView[int]:
        """Slots that have something held back."""
        return self._held.keys()

    def send(self, step: StepTokens) -> None:
        """Publish a step's rows; hold back those of slots that cannot take one now."""
        if step.slots:
            slots = np.array(step.slots, np.int64)
            writable = self._ring.writable(slots)
            if self._held:
                writable &= ~np.isin(slots, list(self._held))
            if writable.all():
                self._publish(step, slots)
            else:
                step = self._split(step, writable)
                if step.slots:
                    self._publish(step, np.array(step.slots, np.int64))
        if step.finals:
            self._finish(step.finals)

    def retry(self) -> None:
        """Publish what was held and may go now."""
        while self._held:
            slots = np.fromiter(self._held, np.int64, len(self._held))
            step = StepTokens()
            for slot, writable in zip(slots.tolist(), self._ring.writable(slots).tolist(), strict=True):
                entries = self._held[slot]
                first = entries[0]
                if first.event is None:
                    assert first.end is not None
                    step.finals[slot] = first.end
                elif writable:
                    step.add(slot, first.event, first.end)
                else:
                    continue
                entries.popleft()
                if not entries:
                    del self._held[slot]
            if not step.slots and not step.finals:
                return
            if step.slots:
                self._publish(step, np.array(step.slots, np.int64))
            if step.finals:
                self._ring.finish(step.finals)

    def replace(self, slot: int, end: GenerationEnd) -> None:
        """Drop what is held for `slot`; it ends with `end` now."""
        self._held.pop(slot, None)
        self._ring.finish({slot: end})

    def forget(self, slots: Iterable[int]) -> None:
        """These slots are gone: nobody reads them any more."""
        for slot in slots:
            self._held.pop(slot, None)

    def _finish(self, finals: dict[int, GenerationEnd]) -> None:
        at_once = {}
        for slot, end in finals.items():
            if slot in self._held:
                self._held[slot].append(_Held(None, end))
            else:
                at_once[slot] = end
        if at_once:
            self._ring.finish(at_once)

    def _publish(self, step: StepTokens, slots: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        logprobs = None
        if step.logprobs:
            logprobs = np.zeros(len(slots), np.float32)
            logprobs[list(step.logprobs)] = list(step.logprobs.values())
        self._ring.publish(
            slots, np.array(step.token_ids, np.int32), logprobs, step.top or None, step.ends or None
        )

    def _split(self, step: StepTokens, writable: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> StepTokens:
        """The rows that may go; the others are held."""
        going = StepTokens()
        going.finals = step.finals
        for row, may_go in enumerate(writable.tolist()):
            slot = step.slots[row]
            event = TokenEvent(step.token_ids[row], step.logprobs.get(row, 0.0), tuple(step.top.get(row, ())))
            end = step.ends.get(row)
            if may_go:
                going.add(slot, event, end)
            else:
                self._held.setdefault(slot, deque()).append(_Held(event, end))
        return going
