"""The life of slots as a state machine: any order of submits, steps, cancels, reads and deaths.

The model is plain Python: which request each slot holds, at the front end and at the worker. After every
rule the ring must agree with it; at the end everything is free and the directory is empty.
"""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ds4.errors import RingFullError, RingUnavailableError
from ds4.generation import FinishReason, GenerationEnd
from ds4.ring.front_end import FrontEndRing
from ds4.ring.layout import RingShape
from ds4.ring.states import WorkerState
from ds4.ring.stream import RingStream
from ds4.ring.worker_end import WorkerRing
from tests.ds4.ring.harness import CANCELLED, kill, prompt
from tests.stress.ring_kill import expected_token, expected_tokens

SHAPE = RingShape(num_front_ends=2, slots_per_front_end=3, descriptor_bytes=512)
places = st.integers(0, 1)
picks = st.integers(0, 1 << 16)


class Open(msgspec.Struct):
    """A request as its reader knows it."""

    stream: RingStream
    received: int = 0
    is_cancelled: bool = False


class Taken(msgspec.Struct):
    """A request as the worker knows it."""

    request_id: int
    sent: int = 0
    is_admitted: bool = False


class LifeCycle(RuleBasedStateMachine):
    """One worker, two front ends, three slots each, in one process on one loop."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.parent = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.directory = Path(self.parent) / "ring"
        self.worker: WorkerRing | None = None
        self.taken: dict[int, Taken] = {}  # by slot
        self.fronts: list[FrontEndRing | None] = [None, None]
        self.open: list[list[Open]] = [[], []]
        self.make_worker()
        for place in (0, 1):
            self.make_front_end(place)

    # -- helpers

    def make_worker(self) -> None:
        self.worker = WorkerRing(self.directory, SHAPE, b"")
        self.worker.set_state(WorkerState.READY)
        self.taken = {}

    def make_front_end(self, place: int) -> None:
        front = FrontEndRing(self.directory, window=6)
        self.loop.run_until_complete(front.start())
        assert front.index == place
        self.fronts[place] = front
        self.open[place] = []

    def turn_loop(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def take_polled(self) -> None:
        assert self.worker is not None
        polled = self.worker.poll()
        for slot in polled.dropped:
            del self.taken[slot]  # KeyError: dropped something never reported
        for submission in polled.submissions:
            assert submission.slot not in self.taken
            assert submission.params == submission.prompt.tobytes()
            self.taken[submission.slot] = Taken(submission.request_id)
        for slot in polled.cancelled:
            self.worker.finish({slot: CANCELLED})
            del self.taken[slot]

    def check_events(self, request: Open) -> bool:
        """Read what is there; True when the request is over."""
        stream = request.stream
        if not stream._events and stream._end is None and not stream._loss:
            return False
        try:
            events, end = self.loop.run_until_complete(stream.read())
        except RingUnavailableError:
            return True
        for event in events:
            assert event.token_id == expected_token(stream.request_id, request.received)
            request.received += 1
        if end is None:
            return False
        if end.reason == FinishReason.CANCELLED:
            assert request.is_cancelled
        else:
            assert end == GenerationEnd(FinishReason.LENGTH, 0, "", request.received)
        return True

    # -- rules

    @rule(place=places, length=st.sampled_from((0, 3, 400)))
    def submit(self, place: int, length: int) -> None:
        front = self.fronts[place]
        if front is None:
            return
        free = front.num_free_slots
        try:
            stream = front.submit(prompt(length).tobytes(), prompt(length))
        except RingFullError:
            assert free == 0
        except RingUnavailableError:
            # Attached, it may not have noticed yet that the worker it knows is gone.
            assert self.worker is None or not front.attached or front.worker_state != WorkerState.READY
        else:
            assert front.num_free_slots == free - 1
            self.open[place].append(Open(stream))

    @precondition(lambda self: self.worker is not None)
    @rule()
    def poll(self) -> None:
        self.take_polled()

    @precondition(lambda self: self.worker is not None and self.taken)
    @rule(pick=picks)
    def admit(self, pick: int) -> None:
        assert self.worker is not None
        slots = [slot for slot in self.taken if pick >> slot & 1]
        self.worker.admit(slots)
        for slot in slots:
            self.taken[slot].is_admitted = True

    @precondition(lambda self: self.worker is not None and self.taken)
    @rule(pick=picks, ending=picks)
    def step(self, pick: int, ending: int) -> None:
        assert self.worker is not None
        slots = np.array([slot for slot in self.taken if pick >> slot & 1], np.int64)
        slots = slots[self.worker.writable(slots)]
        rows = slots.tolist()
        ids = np.array([self.taken[slot].request_id for slot in rows], np.uint64)
        sent = np.array([self.taken[slot].sent for slot in rows], np.uint64)
        ends = {
            row: GenerationEnd(FinishReason.LENGTH, 0, "", self.taken[slot].sent + 1)
            for row, slot in enumerate(rows)
            if ending >> slot & 1
        }
        top = {row: [(1, -1.0)] * (slot * 4) for row, slot in enumerate(rows) if ending >> slot & 2}
        self.worker.publish(slots, expected_tokens(ids, sent), None, top, ends)
        for row, slot in enumerate(rows):
            self.taken[slot].sent += 1
            if row in ends:
                del self.taken[slot]

    @precondition(lambda self: self.worker is not None and self.taken)
    @rule(pick=picks)
    def end_without_token(self, pick: int) -> None:
        assert self.worker is not None
        slot = sorted(self.taken)[pick % len(self.taken)]
        self.worker.finish({slot: GenerationEnd(FinishReason.LENGTH, 0, "", self.taken.pop(slot).sent)})

    @rule()
    def deliver(self) -> None:
        self.turn_loop()

    @rule(place=places, pick=picks)
    def cancel(self, place: int, pick: int) -> None:
        if self.open[place]:
            request = self.open[place][pick % len(self.open[place])]
            request.stream.cancel()
            request.is_cancelled = True

    @rule(place=places, pick=picks)
    def read(self, place: int, pick: int) -> None:
        if self.open[place]:
            request = self.open[place][pick % len(self.open[place])]
            if self.check_events(request):
                self.open[place].remove(request)

    @rule(place=places)
    def look(self, place: int) -> None:
        front = self.fronts[place]
        if front is not None:
            front.check()

    @rule(place=places)
    def kill_front_end(self, place: int) -> None:
        front = self.fronts[place]
        if front is not None:
            kill(front)
            self.fronts[place] = None
            self.open[place] = []

    @rule(place=places)
    def leave(self, place: int) -> None:
        front = self.fronts[place]
        if front is not None:
            self.loop.run_until_complete(front.close())
            for request in self.open[place]:
                self.check_events(request)
                assert request.stream._end is not None or request.stream._loss
            self.fronts[place] = None
            self.open[place] = []

    @precondition(lambda self: self.fronts == [None, None] or None in self.fronts)
    @rule()
    def start_front_end(self) -> None:
        self.make_front_end(self.fronts.index(None))

    @precondition(lambda self: self.worker is not None)
    @rule()
    def sweep(self) -> None:
        assert self.worker is not None
        self.worker._next_sweep = 0.0
        self.take_polled()
        living = {place for place, front in enumerate(self.fronts) if front is not None}
        assert {slot // SHAPE.slots_per_front_end for slot in self.taken} <= living

    @precondition(lambda self: self.worker is not None)
    @rule()
    def kill_worker(self) -> None:
        assert self.worker is not None
        kill(self.worker)
        self.worker = None

    @precondition(lambda self: self.worker is not None)
    @rule()
    def close_worker(self) -> None:
        assert self.worker is not None
        self.worker.close()
        self.worker = None

    @precondition(lambda self: self.worker is None)
    @rule()
    def start_worker(self) -> None:
        self.make_worker()

    # -- what always holds

    @invariant()
    def slots_are_conserved(self) -> None:
        for front in self.fronts:
            if front is not None and front.attached:
                assert front.num_free_slots + front.num_open == SHAPE.slots_per_front_end

    @invariant()
    def the_worker_holds_what_the_model_says(self) -> None:
        if self.worker is not None:
            assert self.worker.num_outstanding == len(self.taken)
            waiting = sum(not one.is_admitted for one in self.taken.values())
            assert self.worker.num_pending >= waiting

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        if self.worker is None:
            self.make_worker()
        assert self.worker is not None
        living = [front for front in self.fronts if front is not None]
        for _ in range(3):  # find the worker, shake hands, open
            for front in living:
                front.check()
            self.sweep()
        assert all(front.attached for front in living)
        for requests in self.open:
            for request in requests:
                request.stream.cancel()
                request.is_cancelled = True
        self.take_polled()
        assert self.worker.num_pending == sum(not one.is_admitted for one in self.taken.values())
        self.worker.finish(
            {slot: GenerationEnd(FinishReason.LENGTH, 0, "", one.sent) for slot, one in self.taken.items()}
        )
        self.turn_loop()
        for requests in self.open:
            for request in requests:
                while not self.check_events(request):
                    pass
        assert all(front.num_free_slots == SHAPE.slots_per_front_end for front in living)
        assert self.worker.num_outstanding == self.worker.num_pending == 0
        assert not self.worker._segment.status.any()
        for front in living:
            self.loop.run_until_complete(front.close())
        self.worker.close()
        assert os.listdir(self.directory) == []
        shutil.rmtree(self.parent)
        self.loop.close()


LifeCycle.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestLifeCycle = LifeCycle.TestCase
