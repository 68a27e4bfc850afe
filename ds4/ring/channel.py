"""One attachment of a front end to one segment, under one nonce: submit, cancel, grant, drain.

Owns: the front end's block, command ring, credits and descriptors in that segment, its free slots and
its streams. Runs in: front end, on the loop. Source: ours; the protocol is described in ARCHITECTURE.md.

A channel is used up, never mended: after a loss the front end makes a new one with a new nonce.
"""

import secrets
from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.errors import RingError, RingFullError, RingUnavailableError
from ds4.ring import events, layout
from ds4.ring.bell import Bell
from ds4.ring.descriptor import write_descriptor
from ds4.ring.directory import WORKER_BELL_NAME
from ds4.ring.fence import Fence
from ds4.ring.segment import Segment
from ds4.ring.states import WorkerState
from ds4.ring.stream import RingStream


class Channel:
    """Owned by one `FrontEndRing`."""

    def __init__(self, directory: Path, segment: Segment, index: int, fence: Fence, window: int) -> None:
        shape = segment.shape
        if index >= shape.num_front_ends:
            raise RingError(
                f"the worker has room for {shape.num_front_ends} front ends, this is number {index + 1}; "
                "raise --max-front-ends"
            )
        self.segment = segment
        self.is_open = False  # echoed: everything below may be used
        self._directory = directory
        self._index = index
        self._fence = fence.call
        self._window = window
        self._words = segment.words
        self._mine = segment.front_end_words(index)
        self._workers = segment.worker_words(index)
        self._bell = Bell(directory / WORKER_BELL_NAME, create=False)
        self._rung = 0  # the worker's sleep word we last rang for
        self._nonce = secrets.randbits(63) | 1
        self._sleep_word = 0
        self._command_tail = 0
        self._event_head = 0
        self._num_submitted = 0
        self._free: deque[int] = deque()
        self._streams: dict[int, RingStream] = {}
        self._commands = segment.commands[index]
        capacity = shape.event_capacity
        self._events = segment.events[index * capacity : (index + 1) * capacity]

    # -- attaching

    def begin(self) -> None:
        """Ask for this part of the segment; nothing of it may be used before the echo."""
        self._sleep_word = self._mine[layout.FRONT_SLEEP] | 1
        self._mine[layout.FRONT_SLEEP] = self._sleep_word
        self._mine[layout.FRONT_PREPARING] = 0
        self._mine[layout.FRONT_ALONE] = 0
        self._fence()  # pairs with the fence in WorkerRing._shake_hands
        self._mine[layout.FRONT_NONCE] = self._nonce
        self._fence()
        self._bell.ring()

    @property
    def is_echoed(self) -> bool:
        """The worker knows this nonce: nothing of a predecessor is left, and we are not cut off."""
        return self._workers[layout.WORKER_ECHO] == self._nonce

    def open(self) -> None:
        """After the echo: carry the predecessor's cursors on, so that each word keeps one history."""
        self._fence()  # echo before the cursors; pairs with the fence before it in _shake_hands
        self._command_tail = self._mine[layout.FRONT_COMMAND_TAIL]
        self._num_submitted = self._mine[layout.FRONT_SUBMITTED]
        self._event_head = self._workers[layout.WORKER_EVENT_TAIL]
        self._mine[layout.FRONT_EVENT_HEAD] = self._event_head
        per_front_end = self.segment.shape.slots_per_front_end
        first = self._index * per_front_end
        self._free = deque(range(first, first + per_front_end))
        self.is_open = True

    def beat(self, now_ns: int) -> None:
        """Show that the loop runs."""
        self._mine[layout.FRONT_HEARTBEAT] = now_ns

    def set_preparing(self, count: int) -> None:
        """Publish how many requests are being prepared."""
        self._mine[layout.FRONT_PREPARING] = count

    def set_alone(self, is_alone: bool) -> None:
        """Publish, before it is submitted, that a suspect of this front end runs on this worker alone."""
        self._mine[layout.FRONT_ALONE] = int(is_alone)

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect of any front end runs, or ran when this worker was lost. It stays true of a lost
        one: when others come to look, the turn may have gone to the next.
        """
        return bool(self.segment.front_ends[:, layout.FRONT_ALONE].any())

    # -- towards the worker

    @property
    def num_free(self) -> int:
        """Slots without a request."""
        return len(self._free)

    @property
    def num_open(self) -> int:
        """Requests without an ending."""
        return len(self._streams)

    def submit(self, params: bytes, prompt: NDArray[np.uint32]) -> RingStream:
        """Claim a slot, write the request, publish it.

        Until the command tail moves nothing shared has changed that matters, so dying anywhere
        before leaks nothing but a prompt file, which the worker deletes with its dead owner.
        """
        if not self.is_open or not self.is_echoed or self.segment.state != WorkerState.READY:
            raise RingUnavailableError("no worker takes requests right now")
        if not self._free:
            raise RingFullError("every slot of this front end is in use")
        slot = self._free.popleft()
        self._num_submitted += 1
        request_id = (
            (self._index + 1) << layout.ID_FRONT_SHIFT
            | (self._nonce >> 1 & layout.ID_NONCE_MASK) << layout.ID_NONCE_SHIFT
            | (self._num_submitted & layout.ID_COUNT_MASK)
        )
        try:
            write_descriptor(self._directory, self.segment, self._index, slot, request_id, params, prompt)
        except BaseException:
            self._free.append(slot)
            self._num_submitted -= 1
            raise
        self.segment.credits[slot] = self._window
        stream = RingStream(self, slot, request_id, self._window)
        self._streams[request_id] = stream
        self._mine[layout.FRONT_SUBMITTED] = self._num_submitted
        self._command(layout.SUBMIT, slot, request_id)
        return stream

    def _command(self, operation: int, slot: int, request_id: int) -> None:
        capacity = self.segment.shape.command_capacity
        at = self._command_tail & (capacity - 1)
        self._commands[at] = (operation << 32 | slot, request_id)
        self._fence()  # command and descriptor before the tail; pairs with the fence in WorkerRing.poll
        self._command_tail += 1
        self._mine[layout.FRONT_COMMAND_TAIL] = self._command_tail
        self._ring_worker()

    def _ring_worker(self) -> None:
        """Wake the worker if it sleeps, once per sleep."""
        self._fence()  # what was published before the sleep word; pairs with the fence in WorkerRing.sleep
        sleep_word = self._words[layout.LIVE_SLEEP]
        if sleep_word & 1 and sleep_word != self._rung:
            self._rung = sleep_word
            self._bell.ring()

    def grant(self, slot: int, limit: int) -> None:
        """Allow the worker `limit` tokens of this slot's request in all."""
        if self.is_open:
            self.segment.credits[slot] = limit
            self._ring_worker()

    def cancel(self, slot: int, request_id: int) -> None:
        """Ask the worker to end a request; its FINAL still comes."""
        if self.is_open:
            self._command(layout.CANCEL, slot, request_id)

    # -- from the worker

    def rung(self) -> bool:
        """After a bell: take everything, then declare sleep. True when more came meanwhile: call again."""
        if self._sleep_word & 1:
            self._sleep_word += 1  # even
            self._mine[layout.FRONT_SLEEP] = self._sleep_word
        self.drain()
        return not self.arm()

    def arm(self) -> bool:
        """Declare sleep; False, and awake again, when something came before the worker could know."""
        self._sleep_word += 1  # odd
        self._mine[layout.FRONT_SLEEP] = self._sleep_word
        self._fence()  # sleep word before the last look; pairs with the second fence in Publisher._write
        if self._workers[layout.WORKER_EVENT_TAIL] == self._event_head:
            return True
        self._sleep_word += 1
        self._mine[layout.FRONT_SLEEP] = self._sleep_word
        return False

    def drain(self) -> None:
        """Hand everything in the event ring to its streams. Raises CorruptEventError."""
        head, tail = self._event_head, self._workers[layout.WORKER_EVENT_TAIL]
        count, capacity = tail - head, self.segment.shape.event_capacity
        if count == 0:
            return
        if not 0 < count <= capacity:
            raise events.CorruptEventError("the event tail is out of range")
        self._fence()  # tail before records; pairs with the first fence in Publisher._write
        start = head & (capacity - 1)
        if start + count <= capacity:
            records = self._events[start : start + count].copy()
        else:
            records = np.concatenate((self._events[start:], self._events[: start + count - capacity]))
        self._fence()  # records before the head: their cells are the worker's again
        self._event_head = tail
        self._mine[layout.FRONT_EVENT_HEAD] = tail
        # Room was given back: a worker that sleeps for want of it must hear of it.
        self._fence()  # head before the blocked count; pairs with the fence in WorkerRing.sleep
        if self._words[layout.LIVE_BLOCKED]:
            self._ring_worker()
        for request_id, index, token, end_words in events.decode_records(records):
            stream = self._streams.get(request_id)
            if stream is None:
                raise events.CorruptEventError("an event for a request that is not open")
            if token is not None:
                whole = stream.push_token(index, token)
            else:
                whole = self._take_end(stream, index, end_words)
            if not whole:
                raise events.CorruptEventError("tokens of a request are missing")

    def _take_end(self, stream: RingStream, num_tokens: int, words: tuple[int, int, int] | None) -> bool:
        assert words is not None
        word_3 = words[2]
        text_bytes = word_3 >> 32
        text = self.segment.read_text(stream.slot, text_bytes) if text_bytes else ""
        del self._streams[stream.request_id]
        self._free.append(stream.slot)
        return stream.push_end(num_tokens, events.decode_final(*words, text))

    # -- leaving

    def close(self, reason: str, *, crashed: bool = False, is_explained: bool = False) -> None:
        """The end of this attachment: every request without an ending fails (see WorkerLostError)."""
        self.is_open = False
        self._bell.close()
        for stream in self._streams.values():
            stream.fail(
                reason, worker_pid=self.segment.worker_pid, crashed=crashed, is_explained=is_explained
            )
        self._streams.clear()
        self._free.clear()

    def resign(self) -> None:
        """Tell a living worker that this front end leaves (before `close`)."""
        self._mine[layout.FRONT_NONCE] = 0
        self._fence()
        self._bell.ring()
