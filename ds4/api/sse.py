"""Server-sent events: frames from prepared bytes, and a stream that is never silent for long.

Owns: one response's event stream. Runs in: front ends. Source: the HTML standard, server-sent events.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import Final

import msgspec
from starlette.types import Send

from ds4.api.errors import ClientGoneError

KEEP_ALIVE_S: Final = 5.0
STALLED_S: Final = 120.0  # a client that takes nothing for so long counts as gone
_TICK_S: Final = 1.0
COMMENT: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
# Stands for the text in a chunk that becomes a template; no client can guess it.
MARK: Final = secrets.token_hex(16)

_encode: Final = msgspec.json.Encoder().encode
_ENCODED_MARK: Final = _encode(MARK)
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(chunk: msgspec.Struct) -> bytes:
    """Any chunk as a frame."""
    return b"data: " + _encode(chunk) + b"\n\n"


def named_event(chunk: msgspec.Struct) -> bytes:
    """A chunk as a frame that also names its type, which is the chunk's tag."""
    name = str(chunk.__struct_config__.tag)
    return b"event: " + name.encode() + b"\ndata: " + _encode(chunk) + b"\n\n"


class FrameTemplate:
    """A chunk in which only one text changes: constant bytes before and after it. Immutable."""

    __slots__ = ("_prefix", "_suffix")

    def __init__(self, chunk: msgspec.Struct) -> None:
        tag = chunk.__struct_config__.tag
        frame = event(chunk) if tag is None else named_event(chunk)
        before, after = frame.split(_ENCODED_MARK)
        self._prefix = before
        self._suffix = after

    def frame(self, text: str) -> bytes:
        """The frame with `text` at the mark."""
        return self._prefix + _encode(text) + self._suffix


class EventStream:
    """One response. Written by the tasks of its request; the ticker breaks its silence."""

    def __init__(self, send: Send, send_frame: Send, sign_of_life: bytes = COMMENT) -> None:
        """`send` takes the headers and the end, `send_frame` what is between."""
        self._send = send
        self._send_frame = send_frame
        self._sign_of_life = sign_of_life
        self._loop = asyncio.get_running_loop()
        self.last_write_s = self._loop.time()
        self._writers: set[asyncio.Task[object]] = set()  # tasks that wait for the client to read
        self._is_stalled = False
        self._comment: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Send the headers, at once."""
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def write(self, frame: bytes) -> None:
        """Send one frame; waits while the client reads too slowly. Raises ClientGoneError if it reads no more."""
        task = asyncio.current_task()
        assert task is not None
        self._writers.add(task)
        try:
            await self._send_frame({"type": "http.response.body", "body": frame, "more_body": True})
        except asyncio.CancelledError:
            if not self._is_stalled:
                raise
            task.uncancel()
            raise ClientGoneError from None
        finally:
            self._writers.discard(task)
            self.last_write_s = self._loop.time()

    async def finish(self, frame: bytes = b"") -> None:
        """Send the last bytes."""
        if self._comment is not None:
            await asyncio.wait((self._comment,))
        await self._send({"type": "http.response.body", "body": frame, "more_body": False})

    def tick(self, now_s: float) -> None:
        """Send a sign of life if nothing went out lately. A blocked write is no silence of ours, but it
        holds a slot, so it does not last for ever.
        """
        if self._writers:
            if now_s - self.last_write_s > STALLED_S:
                self._is_stalled = True
                for task in self._writers:
                    task.cancel()
            return
        if now_s - self.last_write_s < KEEP_ALIVE_S - _TICK_S:
            return
        self._comment = self._loop.create_task(self.write(self._sign_of_life))
        self._comment.add_done_callback(self._commented)

    def _commented(self, task: asyncio.Task[None]) -> None:
        self._comment = None
        if not task.cancelled():
            task.exception()  # a closed connection is the request's own business


class KeepAlive:
    """The ticker of one front end: one timer for all streams, so that a frame costs no timer."""

    def __init__(self) -> None:
        self._streams: set[EventStream] = set()
        self._handle: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def watching(self, stream: EventStream) -> Iterator[None]:
        """Keep `stream` from falling silent inside the block."""
        self._streams.add(stream)
        if self._handle is None:
            self._arm()
        try:
            yield
        finally:
            self._streams.discard(stream)

    def _arm(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(_TICK_S, self.tick)

    @property
    def is_ticking(self) -> bool:
        """Whether the timer runs."""
        return self._handle is not None

    def tick(self) -> None:
        """Look at every stream, and come back while there are any."""
        self.close()
        if self._streams:
            now_s = asyncio.get_running_loop().time()
            for stream in list(self._streams):
                stream.tick(now_s)
            self._arm()

    def close(self) -> None:
        """Stop the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
