"""A front end's end of the ring, for asyncio: find the worker, keep a channel to it, notice its death.

Owns: this front end's place (lease byte, bell). Runs in: front end, one event loop; make it after fork.
Source: ours; the protocol is described in ARCHITECTURE.md.
"""

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.errors import RingError, RingFullError, RingUnavailableError, RingVersionError
from ds4.ring import layout
from ds4.ring.bell import Bell
from ds4.ring.channel import Channel
from ds4.ring.directory import (
    SEGMENT_NAME,
    front_end_bell_path,
    leave,
    open_directory,
    remove_prompts,
    unusable_directory,
)
from ds4.ring.events import CorruptEventError
from ds4.ring.fence import process_fence
from ds4.ring.liveness import FIRST_FRONT_END_BYTE, SUSPECT_BYTE, WORKER_BYTE, Leases
from ds4.ring.segment import attach_segment
from ds4.ring.states import SlotStatus, WorkerState
from ds4.ring.stream import RingStream

_log = logging.getLogger(__name__)

__all__ = ["FrontEndRing", "RingStream"]

CHECK_INTERVAL_S: Final = 0.1
CREDIT_WINDOW_TOKENS: Final = 512
_PLACE_ATTEMPTS: Final = 10
_PLACE_PAUSE_S: Final = 0.05
_CUT_OFF: Final = "the worker cut this front end off"


class FrontEndRing:
    """Owned by one event loop. Usable without a worker: it attaches when one comes.

    index: this front end's place, -1 before `start`.
    """

    def __init__(self, directory: Path, *, window: int = CREDIT_WINDOW_TOKENS) -> None:
        self.directory = directory
        self.index = -1
        self._window = window
        self._fence = process_fence()
        self._leases: Leases | None = None
        self._bell: Bell | None = None
        self._channel: Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ready = asyncio.Event()
        self._refused: tuple[int, int] | None = None  # a segment we cannot use; said once
        self._short_of = ""  # what there was not enough of to attach; said once
        self._preparing = 0
        self._heartbeat = 0  # the worker's, as last seen
        self._heartbeat_s = 0.0  # when it last changed
        self._pulse = 0  # the worker process's, as last seen
        self._pulse_s = 0.0  # when it last changed
        self.num_wakes = 0  # bells answered
        self.lost_s = time.monotonic()  # since when there is no worker, where none is attached

    # -- coming and going

    async def start(self) -> None:
        """Take a place and begin watching for a worker; does not need one.

        Raises ConfigError for the directory, RingFullError when every place is taken,
        RingVersionError when a living worker speaks another version.
        """
        open_directory(self.directory)
        self._loop = asyncio.get_running_loop()
        try:
            self._leases = Leases(self.directory)
            await self._find_place(self._leases)
            self._bell = Bell(front_end_bell_path(self.directory, self.index), create=True)
            self._bell.drain()
            if self._leases.is_held_by_other(WORKER_BYTE):
                self._attach()
        except (RingVersionError, RingFullError):
            await self.close()
            raise
        except OSError as error:
            await self.close()
            raise unusable_directory(self.directory, error) from None
        except RingError:
            pass  # the first tick tries again, and says so
        assert self._bell is not None
        self._loop.add_reader(self._bell.fd, self._rung)
        self._tick()

    async def _find_place(self, leases: Leases) -> None:
        for _ in range(_PLACE_ATTEMPTS):
            if self._take_place(leases):
                return
            # A worker that clears up behind a dead front end holds its place for a moment.
            await asyncio.sleep(_PLACE_PAUSE_S)
        raise RingFullError("every front-end place is taken; raise --max-front-ends")

    def _take_place(self, leases: Leases) -> bool:
        limit = layout.MAX_FRONT_ENDS
        with contextlib.suppress(OSError, RingError):  # without a usable segment any place will do
            limit = attach_segment(self.directory, writable=False).shape.num_front_ends
        for index in range(limit):
            if leases.take(FIRST_FRONT_END_BYTE + index):
                self.index = index
                return True
        return False

    async def close(self) -> None:
        """Leave: open requests fail, the worker drops them, the last one out clears the directory."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._channel is not None:
            if self._channel.is_echoed:
                self._channel.resign()
            self._lose("this front end closes")
        if self._bell is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._bell.fd)
            self._bell.close()
            self._bell.path.unlink(missing_ok=True)
            self._bell = None
        if self._leases is not None:
            remove_prompts(self.directory, self.index)
            leave(self.directory, self._leases)
            self._leases = None

    # -- the worker, as seen from here

    @property
    def attached(self) -> bool:
        """A worker knows us, and its segment is the current one as far as we have looked."""
        channel = self._channel
        return channel is not None and channel.is_open and channel.is_echoed

    @property
    def worker_state(self) -> WorkerState | None:
        """What the worker says it is; None without one."""
        return None if self._channel is None else self._channel.segment.state

    @property
    def model_info(self) -> bytes | None:
        """The worker's description of its model; None without a worker."""
        return None if self._channel is None else self._channel.segment.model_info

    @property
    def worker_silent_s(self) -> float:
        """How long the attached worker has not come round its loop; 0 without one. Only changes of its
        heartbeat count: its clock need not be ours.
        """
        return 0.0 if self._channel is None else time.monotonic() - self._heartbeat_s

    @property
    def worker_stopped_s(self) -> float:
        """How long the attached worker's process has not run at all, a long step being no stop; 0 without
        a worker, or with one that has no pulse.
        """
        return 0.0 if self._channel is None or not self._pulse else time.monotonic() - self._pulse_s

    @property
    def num_free_slots(self) -> int:
        """Requests that could be submitted now."""
        return self._channel.num_free if self.attached and self._channel is not None else 0

    @property
    def num_open(self) -> int:
        """Requests of this front end without an ending."""
        return 0 if self._channel is None else self._channel.num_open

    @property
    def num_running(self) -> int:
        """Sequences that hold a seat at the worker."""
        return 0 if self._channel is None else self._channel.segment.words[layout.LIVE_RUNNING]

    async def wait_attached(self) -> None:
        """Until a worker is READY and knows us. The caller puts the deadline."""
        await self._ready.wait()

    def num_pending(self) -> int:
        """Requests that wait for evaluation, over all front ends."""
        return 0 if self._channel is None else self._channel.segment.num_pending(self._fence)

    def slots(self) -> list[SlotStatus]:
        """Every slot of the ring; empty without a worker."""
        return [] if self._channel is None else self._channel.segment.slot_statuses()

    # -- requests

    def submit(self, params: bytes, prompt: NDArray[np.uint32]) -> RingStream:
        """Hand a request to the worker: `params` are opaque here, `prompt` [num_tokens] uint32.

        Raises RingUnavailableError without a READY worker, RingFullError when no slot is free or the
        shared directory has no room, RequestError when the request is beyond the ring's limits.
        """
        if self._channel is None:
            raise RingUnavailableError("no worker is attached")
        return self._channel.submit(params, prompt)

    def set_preparing(self, count: int) -> None:
        """How many requests are on their way to `submit` (read, rendered or tokenized) right now."""
        self._preparing = count
        if self._channel is not None and self._channel.is_open:
            self._channel.set_preparing(count)

    def take_turn(self) -> bool:
        """Take the one place for suspects that all front ends share; False while another one has it."""
        return self._leases is not None and self._leases.take(SUSPECT_BYTE)

    def use_turn(self) -> None:
        """Tell all front ends that what is submitted next runs on this worker as the one suspect."""
        if self._channel is not None:
            self._channel.set_alone(True)

    def drop_turn(self) -> None:
        """Give it back."""
        if self._channel is not None:
            self._channel.set_alone(False)
        if self._leases is not None:
            self._leases.drop(SUSPECT_BYTE)

    # -- watching

    def _tick(self) -> None:
        try:
            self.check()
        finally:
            assert self._loop is not None
            self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._tick)

    def check(self) -> None:
        """Look once whether the worker lives, this is still its segment, and it still knows us."""
        assert self._leases is not None
        alive = self._leases.is_held_by_other(WORKER_BYTE)
        published = self._published() if alive else None
        inode = None if published is None else published[0]
        channel = self._channel
        if channel is not None:
            reason = self._reason_to_leave(channel, alive, inode)
            if reason:
                with contextlib.suppress(CorruptEventError):
                    if channel.is_open:
                        channel.drain()  # what was published before the loss still counts
                # Who leaves in order says so; a process that cut us off still runs.
                crashed = channel.segment.state != WorkerState.RETIRED and reason != _CUT_OFF
                self._lose(reason, crashed=crashed)
        if self._channel is None and published is not None and published != self._refused:
            try:
                self._attach()
            except RingError as error:
                self._refused = published
                _log.error("the ring cannot be used: %s", error)
            except OSError as error:  # no descriptor or no memory is left: this may pass
                if self._short_of != (reason := str(error)):
                    self._short_of = reason
                    _log.error("the ring cannot be attached yet: %s", reason)
            else:
                self._short_of = ""
        if self._channel is not None:
            heartbeat = self._channel.segment.words[layout.LIVE_HEARTBEAT]
            if heartbeat != self._heartbeat or self._channel is not channel:
                self._heartbeat, self._heartbeat_s = heartbeat, time.monotonic()
            pulse = self._channel.segment.words[layout.LIVE_PULSE]
            if pulse != self._pulse or self._channel is not channel:
                self._pulse, self._pulse_s = pulse, time.monotonic()
            self._advance(self._channel)
            self._channel.beat(time.monotonic_ns())

    def _reason_to_leave(self, channel: Channel, alive: bool, inode: int | None) -> str:
        if not alive:
            return "the worker died"
        if inode != channel.segment.inode:
            return "the worker was replaced"
        if channel.segment.state == WorkerState.RETIRED:
            return "the worker left"
        if channel.segment.state == WorkerState.FAILED:
            return "the worker failed"
        if channel.is_open and not channel.is_echoed:
            return _CUT_OFF
        return ""

    def _published(self) -> tuple[int, int] | None:
        """The segment's inode, and when it was put there: a tmpfs gives the inode of a removed one again."""
        try:
            found = os.stat(self.directory / SEGMENT_NAME)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns

    def _attach(self) -> None:
        try:
            segment = attach_segment(self.directory)
            if segment.state in (WorkerState.RETIRED, WorkerState.FAILED):
                return
            channel = Channel(self.directory, segment, self.index, self._fence, self._window)
        except FileNotFoundError:
            return  # replaced or removed under our hands: look again later
        self._channel = channel
        self._heartbeat_s = time.monotonic()
        channel.begin()

    def _advance(self, channel: Channel) -> None:
        """Open the channel once it is echoed; tell waiters while the worker is READY."""
        if not channel.is_open and channel.is_echoed:
            channel.open()
            channel.set_preparing(self._preparing)
            _log.info("attached to a worker as front_end=%d", self.index)
        if channel.is_open and channel.segment.state == WorkerState.READY:
            self._ready.set()
        else:
            self._ready.clear()

    def _lose(self, reason: str, *, crashed: bool = False) -> None:
        channel, self._channel = self._channel, None
        self._ready.clear()
        self.lost_s = time.monotonic()
        if channel is not None:
            _log.info("detached: %s; open_requests=%d", reason, channel.num_open)
            channel.close(reason, crashed=crashed, is_explained=crashed and channel.has_suspect)

    def _rung(self) -> None:
        assert self._bell is not None
        self.num_wakes += 1
        self._bell.drain()
        self._take_events()

    def _take_events(self) -> None:
        channel = self._channel
        if channel is None or self._loop is None:
            return
        if not channel.is_open or not channel.is_echoed or channel.segment.state != WorkerState.READY:
            self.check()
            channel = self._channel
            if channel is None or not channel.is_open:
                return
        try:
            more = channel.rung()
        except CorruptEventError as error:
            _log.error("detached: %s", error)
            self._lose("the worker's events are damaged")
            return
        if more:
            self._loop.call_soon(self._take_events)  # let the readers run in between
        elif not self._ready.is_set():
            self._advance(channel)
