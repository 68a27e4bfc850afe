"""The worker's end of the ring: take requests, publish tokens, notice who died.

Owns: the segment, the worker's lease, header and worker blocks. Runs in: worker, single thread.
Source: ours; the protocol is described in ARCHITECTURE.md.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ErrorCode, RingError, RingTakenError
from ds4.generation import FinishReason, GenerationEnd
from ds4.ring import layout
from ds4.ring.bell import Bell
from ds4.ring.descriptor import DescriptorError, read_descriptor
from ds4.ring.directory import (
    PROMPTS_NAME,
    WORKER_BELL_NAME,
    front_end_bell_path,
    leave,
    open_directory,
    remove_orphan_bells,
    remove_prompts,
    remove_segment,
    remove_unfinished,
    unusable_directory,
)
from ds4.ring.fence import process_fence
from ds4.ring.layout import RingShape
from ds4.ring.liveness import FIRST_FRONT_END_BYTE, WORKER_BYTE, Leases
from ds4.ring.publisher import Ends, Publisher, TopPairs
from ds4.ring.segment import create_segment
from ds4.ring.states import SlotState, WorkerState

_log = logging.getLogger(__name__)

SWEEP_INTERVAL_S: Final = 0.1
EVICT_AFTER_S: Final = 30.0


class Submission(msgspec.Struct, frozen=True):
    """One new request: parameters as the front end encoded them, prompt [num_tokens] uint32."""

    request_id: int
    slot: int
    front_end: int
    params: bytes
    prompt: NDArray[np.uint32]


class Polled(msgspec.Struct, frozen=True):
    """What happened since the last poll. Handle `dropped` first, then submissions, then cancels.

    dropped: slots whose front end died, left or was cut off; the ring has released them already.
    submissions: new requests; a slot may have been dropped in the same poll.
    cancelled: slots whose request is no longer wanted; the worker still owes its `finish`.
    """

    submissions: list[Submission]
    cancelled: list[int]
    dropped: list[int]


class WorkerRing:
    """The only writer of the header, the worker blocks, status, texts and events of its segment.

    Raises ConfigError for the directory, RingTakenError when another worker lives in it.

    last_poll_s: when the worker's loop last came round.
    """

    def __init__(
        self,
        directory: Path,
        shape: RingShape,
        model_info: bytes,
        *,
        evict_after_s: float = EVICT_AFTER_S,
    ) -> None:
        self._fence = process_fence().call
        open_directory(directory)
        self.directory = directory
        self.shape = shape
        try:
            self._leases = Leases(directory)
        except OSError as error:
            raise unusable_directory(directory, error) from None
        if not self._leases.take(WORKER_BYTE):
            self._leases.abandon()
            raise RingTakenError(f"another worker serves {directory}; stop it or choose another --shared-dir")
        try:
            # Nobody can have submitted to this worker yet: all of this is the dead ones'.
            remove_segment(directory)
            remove_unfinished(directory)
            remove_orphan_bells(directory, self._leases)
            (directory / PROMPTS_NAME).mkdir(mode=0o700, exist_ok=True)
            self._bell = Bell(directory / WORKER_BELL_NAME, create=True)
            self._bell.drain()
            self._segment = create_segment(directory, shape, model_info, process_fence())
        except BaseException as error:
            remove_segment(directory)
            leave(directory, self._leases)
            if isinstance(error, OSError):
                raise unusable_directory(directory, error) from None
            raise
        self.last_poll_s = time.monotonic()
        self._pulses = 0
        self._evict_after_s = evict_after_s
        self._words = self._segment.words
        num = shape.num_front_ends
        self._publisher = Publisher(self._segment, process_fence(), self._ring_front_end, self._cut_off)
        self._bells: list[Bell | None] = [None] * num
        # Private copies of what this end writes: it never reads a word it shares.
        self._seen = np.zeros(num, np.uint64)  # last nonce dealt with
        self._live = np.zeros(num, np.bool_)
        self._command_heads = np.zeros(num, np.uint64)
        self._num_admitted = np.zeros(num, np.int64)
        self._is_waiting = np.zeros(shape.num_slots, np.bool_)  # submitted, not admitted
        self._sleep_word = 0
        self._num_steps = 0
        self._dropped: list[int] = []
        self._next_sweep = 0.0
        self._last_beat = np.zeros(num, np.uint64)
        self._beat_changed = np.zeros(num, np.float64)
        self._nonces = self._segment.front_ends[:, layout.FRONT_NONCE]
        self._command_tails = self._segment.front_ends[:, layout.FRONT_COMMAND_TAIL]
        self._submitted = self._segment.front_ends[:, layout.FRONT_SUBMITTED]
        self._preparing = self._segment.front_ends[:, layout.FRONT_PREPARING]
        self._beats = self._segment.front_ends[:, layout.FRONT_HEARTBEAT]

    # -- what it says about itself

    def set_state(self, state: WorkerState) -> None:
        """Publish the worker's state; front ends hear of it at once."""
        self._words[layout.LIVE_STATE] = int(state)
        self._fence()
        for index in np.flatnonzero(self._live).tolist():
            self._ring_front_end(index)

    def pulse(self) -> None:
        """Show that the process runs, whatever its loop does. The only method for another thread."""
        self._pulses += 1
        self._words[layout.LIVE_PULSE] = self._pulses

    def set_num_running(self, num_running: int) -> None:
        """How many sequences hold a seat (display)."""
        self._words[layout.LIVE_RUNNING] = num_running

    def set_status(
        self,
        slots: NDArray[np.int64],
        num_prompt: NDArray[np.int64] | int,
        num_cached: NDArray[np.int64] | int,
        num_generated: NDArray[np.int64] | int,
        state: NDArray[np.int64] | SlotState | int,
    ) -> None:
        """Report slots [n] for `/slots`: arrays [n] or one value for all. Slots without a request stay free."""
        status = self._segment.status
        status[slots, layout.STATUS_PROMPT] = num_prompt
        status[slots, layout.STATUS_CACHED] = num_cached
        status[slots, layout.STATUS_GENERATED] = num_generated
        status[slots, layout.STATUS_STATE] = state
        gone = self._publisher.request_ids[slots] == 0
        if gone.any():
            status[slots[gone]] = 0

    @property
    def num_pending(self) -> int:
        """Submitted and not admitted, over all living front ends; exact when quiet, never negative."""
        waiting = self._submitted.view(np.int64) - self._num_admitted
        return int(np.clip(waiting, 0, self.shape.slots_per_front_end)[self._live].sum())

    @property
    def num_preparing(self) -> int:
        """Requests that living front ends are reading or tokenizing now."""
        return int(np.minimum(self._preparing[self._live], np.uint64(1 << 20)).sum())

    @property
    def num_front_ends(self) -> int:
        """Front ends attached now."""
        return int(self._live.sum())

    @property
    def num_outstanding(self) -> int:
        """Slots with a request that has no ending yet."""
        return int(np.count_nonzero(self._publisher.request_ids))

    @property
    def num_rings(self) -> int:
        """Bells rung for tokens and endings, ever."""
        return self._publisher.num_rings

    # -- taking requests

    def poll(self) -> Polled:
        """Everything new: commands, front ends that came, left or died. Microseconds when nothing is."""
        now = self.last_poll_s = time.monotonic()
        if (self._nonces != self._seen).any():
            self._shake_hands(now)
        if now >= self._next_sweep:
            self._sweep(now)
        submissions: list[Submission] = []
        cancelled: list[int] = []
        tails = self._command_tails.copy()
        new = (tails != self._command_heads) & self._live
        if new.any():
            self._fence()  # tails before commands and descriptors; pairs with Channel._command
            for index in np.flatnonzero(new).tolist():
                self._take_commands(index, int(tails[index]), submissions, cancelled)
        dropped, self._dropped = self._dropped, []
        return Polled(submissions, cancelled, dropped)

    def _take_commands(
        self, index: int, tail: int, submissions: list[Submission], cancelled: list[int]
    ) -> None:
        capacity = self.shape.command_capacity
        head = int(self._command_heads[index])
        count = tail - head
        if not 0 < count <= capacity:
            self._cut_off(index, "its command tail is out of range")
            return
        entries = self._segment.commands[index, np.arange(head, tail) & (capacity - 1)].tolist()
        first_slot = index * self.shape.slots_per_front_end
        owned = range(first_slot, first_slot + self.shape.slots_per_front_end)
        request_ids = self._publisher.request_ids
        taken: list[Submission] = []
        refused: dict[int, GenerationEnd] = {}
        ended: list[int] = []
        fault = ""
        for word, request_id in entries:
            operation, slot = word >> 32, word & 0xFFFFFFFF
            if slot not in owned or request_id >> layout.ID_FRONT_SHIFT != index + 1:
                fault = "it used what belongs to another front end"
            elif operation == layout.CANCEL:
                # The request may have ended while the command was on its way.
                if int(request_ids[slot]) == request_id and slot not in refused and slot not in ended:
                    ended.append(slot)
            elif operation != layout.SUBMIT:
                fault = f"it sent an unknown command {operation}"
            elif request_ids[slot] != 0:
                fault = "it submitted to a slot in use"
            else:
                self._publisher.begin(slot, request_id)
                self._is_waiting[slot] = True
                try:
                    params, prompt = read_descriptor(self.directory, self._segment, index, slot, request_id)
                except DescriptorError as error:
                    refused[slot] = GenerationEnd(FinishReason.ERROR, ErrorCode.INVALID_REQUEST, f"{error}")
                else:
                    taken.append(Submission(request_id, slot, index, params, prompt))
            if fault:
                break
        if fault:
            # What this poll took was never reported: release it before the rest is dropped.
            unreported = np.array([*refused, *(one.slot for one in taken)], np.int64)
            self._publisher.release(unreported)
            self._is_waiting[unreported] = False
            self._cut_off(index, fault)
            return
        self._fence()  # copied out before the cells are given back
        self._command_heads[index] = tail
        self._segment.worker_blocks[index, layout.WORKER_COMMAND_HEAD] = tail
        if refused:
            self.finish(refused)
            if not self._live[index]:  # its event ring turned out to be broken: nothing it sent counts
                return
        if taken:
            slots = np.array([one.slot for one in taken], np.int64)
            lengths = np.array([len(one.prompt) for one in taken], np.int64)
            self.set_status(slots, lengths, 0, 0, SlotState.WAITING)
            submissions.extend(taken)
        cancelled.extend(ended)

    def admit(self, slots: Sequence[int]) -> None:
        """These requests left the waiting state: the pending count falls. Repeating it is harmless."""
        self._admit(np.asarray(slots, np.int64))

    def _admit(self, slots: NDArray[np.int64]) -> None:
        slots = slots[self._is_waiting[slots]]
        if not len(slots):
            return
        self._is_waiting[slots] = False
        self._num_admitted += np.bincount(
            slots // self.shape.slots_per_front_end, minlength=self.shape.num_front_ends
        )
        self._segment.worker_blocks[:, layout.WORKER_ADMITTED] = self._num_admitted

    # -- publishing

    def writable(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each of `slots` [n] int64: may it get one more token now (credit and ring room).

        Holds for the next publish, also while one step is still in flight.
        """
        return self._publisher.writable(slots)

    def publish(
        self,
        slots: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32] | None = None,
        top: TopPairs | None = None,
        ends: Ends | None = None,
    ) -> None:
        """One token for each slot of a step: `slots` [n] int64, `token_ids` [n] int32, `logprobs` [n] float32.

        `top` (row -> pairs, best first) and `ends` (row -> the ending that comes with this token) are
        keyed by row. Rings each sleeping front end concerned once.
        """
        if ends:
            self._admit(slots[list(ends)])
        self._publisher.publish(slots, token_ids, logprobs, top, ends)
        self._num_steps += 1
        self._words[layout.LIVE_STEPS] = self._num_steps

    def finish(self, ends: Mapping[int, GenerationEnd]) -> None:
        """End requests without a token (slot -> ending). A slot that has none already is passed over."""
        self._admit(np.array(list(ends), np.int64))
        self._publisher.finish(ends)

    # -- front ends coming and going

    def _ring_front_end(self, index: int) -> None:
        bell = self._bells[index]
        if bell is not None:
            bell.ring()

    def _shake_hands(self, now: float) -> None:
        """Answer new nonces; the echo comes after everything of the predecessor is gone."""
        nonces = self._nonces.copy()
        self._fence()  # nonces before their owners' cursors; pairs with Channel.begin
        for index in np.flatnonzero(nonces != self._seen).tolist():
            self._forget(index)
            self._seen[index] = nonces[index]
            if nonces[index] == 0:  # left cleanly
                continue
            try:
                self._bells[index] = Bell(front_end_bell_path(self.directory, index), create=False)
            except (OSError, RingError) as error:
                _log.warning("front_end=%d has no bell: %s", index, error)
                continue
            self._live[index] = True
            self._last_beat[index] = self._beats[index]
            self._beat_changed[index] = now
            self._command_heads[index] = self._command_tails[index]
            self._num_admitted[index] = int(self._submitted[index])
            self._publisher.forget_rings(index)
            block = self._segment.worker_blocks[index]
            block[layout.WORKER_COMMAND_HEAD] = self._command_heads[index]
            block[layout.WORKER_ADMITTED] = self._num_admitted[index]
            self._fence()  # clean state before the echo; pairs with the echo load in Channel.is_echoed
            block[layout.WORKER_ECHO] = nonces[index]
            self._fence()
            self._ring_front_end(index)
            _log.info("front_end=%d attached", index)

    def _cut_off(self, index: int, reason: str) -> None:
        """Part with one front end alone; if it lives, it comes back with a new nonce."""
        _log.warning("front_end=%d cut off: %s", index, reason)
        self._forget(index)

    def _forget(self, index: int) -> None:
        """Release everything of front end `index`; the slots are reported by the next poll."""
        first = index * self.shape.slots_per_front_end
        slots = first + np.flatnonzero(
            self._publisher.request_ids[first : first + self.shape.slots_per_front_end]
        )
        self._dropped.extend(slots.tolist())
        self._publisher.release(slots)
        self._is_waiting[slots] = False
        self._live[index] = False
        self._segment.worker_blocks[index, layout.WORKER_ECHO] = 0
        bell = self._bells[index]
        if bell is not None:
            bell.ring()
            bell.close()
            self._bells[index] = None
        remove_prompts(self.directory, index)

    def _sweep(self, now: float) -> None:
        self._next_sweep = now + SWEEP_INTERVAL_S
        self._words[layout.LIVE_HEARTBEAT] = time.monotonic_ns()
        beats = self._beats.copy()
        moved = beats != self._last_beat
        self._last_beat = beats
        self._beat_changed[moved] = now
        for index in self._publisher.out_of_range().tolist():
            if self._live[index] and self._publisher.has_requests(index):
                self._cut_off(index, "its event head is out of range")
        for index in np.flatnonzero(self._live).tolist():
            byte = FIRST_FRONT_END_BYTE + index
            if not self._leases.is_held_by_other(byte):
                _log.info("front_end=%d died", index)
                self._forget(index)
                # Its place may be taken again already: only who holds the place may remove the bell.
                if self._leases.take(byte):
                    front_end_bell_path(self.directory, index).unlink(missing_ok=True)
                    self._leases.drop(byte)
            elif now - self._beat_changed[index] > self._evict_after_s:
                self._cut_off(index, f"no heartbeat for {self._evict_after_s:.0f} s")

    # -- sleeping and leaving

    def sleep(self, timeout_s: float) -> None:
        """Wait for a bell or the timeout; returns at once when something is already there."""
        self._sleep_word += 1  # odd
        self._words[layout.LIVE_BLOCKED] = self._publisher.num_blocked
        self._words[layout.LIVE_SLEEP] = self._sleep_word
        self._fence()  # sleep word before the last look; pairs with the fence before Channel._ring_worker
        something = (
            bool(((self._command_tails != self._command_heads) & self._live).any())
            or bool((self._nonces != self._seen).any())
            or bool(self._dropped)
            or self._publisher.is_unblocked()
        )
        if not something:
            self._bell.wait(timeout_s)
        self._sleep_word += 1  # even
        self._words[layout.LIVE_SLEEP] = self._sleep_word
        self._bell.drain()

    def wake(self) -> None:
        """End a `sleep`, from a signal handler or another thread."""
        with contextlib.suppress(OSError):
            self._bell.ring()

    def close(self, *, failed: bool = False) -> None:
        """Leave: front ends see RETIRED (or FAILED) at once, and nothing of this worker stays behind."""
        self.set_state(WorkerState.FAILED if failed else WorkerState.RETIRED)
        remove_segment(self.directory)
        remove_orphan_bells(self.directory, self._leases)
        for bell in self._bells:
            if bell is not None:
                bell.close()
        self._bells = [None] * len(self._bells)
        self._bell.close()
        leave(self.directory, self._leases)
