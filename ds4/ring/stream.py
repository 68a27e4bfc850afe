"""One request as its front end sees it: what arrived, what may still come, how it ended.

Owns: the events of one request that nobody has read yet, and its credit. Runs in: front end, on the loop.
Source: ours.
"""

import asyncio
from typing import Protocol

from ds4.errors import WorkerLostError
from ds4.generation import GenerationEnd, TokenEvent


class StreamOwner(Protocol):
    """What a stream asks of the channel it runs on."""

    def grant(self, slot: int, limit: int) -> None:
        """Allow the worker `limit` tokens in all."""

    def cancel(self, slot: int, request_id: int) -> None:
        """Ask the worker to end the request."""


class RingStream:
    """Filled by its channel, read by one task. The slot comes free with the ending, read or not."""

    __slots__ = (
        "_cancelled",
        "_crashed",
        "_end",
        "_ended",
        "_events",
        "_is_explained",
        "_limit",
        "_loss",
        "_num_read",
        "_num_received",
        "_owner",
        "_waiter",
        "_window",
        "_worker_pid",
        "request_id",
        "slot",
    )

    def __init__(self, owner: StreamOwner, slot: int, request_id: int, window: int) -> None:
        self.slot = slot
        self.request_id = request_id
        self._owner = owner
        self._window = window
        self._limit = window
        self._events: list[TokenEvent] = []
        self._end: GenerationEnd | None = None
        self._ended = False  # the ending was read
        self._loss = ""  # why no ending will come
        self._worker_pid = 0  # which worker is lost
        self._crashed = False  # and whether it was because the worker crashed
        self._is_explained = False  # on somebody else
        self._num_received = 0
        self._num_read = 0
        self._cancelled = False
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> tuple[list[TokenEvent], GenerationEnd | None]:
        """Everything that arrived since the last read, and the ending once it came; waits for either.

        Raises WorkerLostError, after the last events, when the worker died, was replaced or cut
        this front end off. After an ending there is nothing more to read.
        """
        if self._ended:
            raise RuntimeError("read past the ending of a request")
        while not self._events and self._end is None:
            if self._loss:
                raise WorkerLostError(
                    self._loss,
                    worker_pid=self._worker_pid,
                    crashed=self._crashed,
                    is_explained=self._is_explained,
                )
            if self._waiter is not None and not self._waiter.done():
                raise RuntimeError("a stream has one reader")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        self._num_read += len(events)
        if self._end is not None:
            self._ended = True
        elif not self._loss and self._num_read + self._window // 2 >= self._limit:
            self._limit = self._num_read + self._window
            self._owner.grant(self.slot, self._limit)
        return events, self._end

    def cancel(self) -> None:
        """Ask for the end; idempotent. What is on its way still arrives, then the ending."""
        if not self._cancelled and self._end is None and not self._loss:
            self._cancelled = True
            self._owner.cancel(self.slot, self.request_id)

    # -- for the channel

    def push_token(self, index: int, event: TokenEvent) -> bool:
        """Take a token; False when it is not the next one."""
        if index != self._num_received:
            return False
        self._num_received = index + 1
        self._events.append(event)
        if self._waiter is not None:
            self.wake()
        return True

    def push_end(self, num_tokens: int, end: GenerationEnd) -> bool:
        """Take the ending; False when tokens are missing before it."""
        if num_tokens != self._num_received:
            return False
        self._end = end
        self.wake()
        return True

    def fail(
        self, reason: str, *, worker_pid: int = 0, crashed: bool = False, is_explained: bool = False
    ) -> None:
        """The channel is lost and no ending will come."""
        self._loss = reason
        self._worker_pid = worker_pid
        self._crashed = crashed
        self._is_explained = is_explained
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
