"""Clients that cost next to nothing: hundreds of streams, thousands of connections, in one loop.

Runs in: stress programs, next to the server they load, on the same few cores. For one careful client see
raw_http.py. Each client is a protocol without a task, and looks into an answer only for what is counted:
its status, when pieces of it came, and whether it was whole.
"""

import asyncio
import json
import socket
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

_DONE: Final = b"data: [DONE]"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_SLOW_READS_S: Final = 0.5
_SLOW_BUFFER_BYTES: Final = 4096


def http_post(path: str, body: Mapping[str, Any], **headers: str) -> bytes:
    """A request as bytes. `connection="close"`: each on a connection of its own."""
    raw = json.dumps(body).encode()
    fields = {"host": "x", "content-type": "application/json", "content-length": str(len(raw)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + raw


class Tally:
    """What all clients of one flood saw. Times are in seconds."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.gaps_s = array("d")  # between two pieces of one stream
        self.first_s = array("d")  # until the first piece with a token
        self.refused_s = array("d")  # until a refusal
        self.stopping = False

    def fault(self, what: str) -> None:
        """Something that must not happen."""
        self.counts["fault"] += 1
        if len(self.faults) < 20:
            self.faults.append(what)


class Caller(asyncio.Protocol):
    """Asks for one stream after the other, on one connection as long as it lasts.

    A polite one comes back when it was told to, a rude one at once, every other time on a new connection. With
    `when_free` it asks only when `ask` says so, and says itself when it has its answer.
    """

    def __init__(
        self,
        port: int,
        request: bytes,
        tally: Tally,
        *,
        is_rude: bool = False,
        when_free: "Callable[[Caller], None] | None" = None,
    ) -> None:
        self._port = port
        self._request = request
        self._tally = tally
        self._is_rude = is_rude
        self._when_free = when_free
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_waiting = False  # for an answer, or for more of it
        self._seen = b""
        self._is_streaming = False
        self._is_last = False  # this connection ends with this answer
        self._asked_s = self._heard_s = 0.0

    async def connect(self) -> None:
        """Open a connection and ask."""
        try:
            await self._loop.create_connection(lambda: self, "127.0.0.1", self._port)
        except OSError as error:
            if not self._tally.stopping:
                self._tally.fault(f"connection refused: {error}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        if self._tally.stopping:
            self.hang_up()
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """In the middle of an answer nobody may hang up on us; between two, anybody may."""
        self._transport = None
        if self._is_waiting and not self._tally.stopping:
            self._tally.fault(f"the connection ended within an answer: {exc}, {self._seen[-200:]!r}")
            self._is_waiting = False
        if self._is_last:
            self._is_last = False
            self.ask()

    def data_received(self, data: bytes) -> None:
        """More of the answer."""
        now_s = time.monotonic()
        if self._is_streaming:
            self._heard(data, now_s)
            self._seen = self._seen[-64:] + data
            if self._seen.endswith(_LAST_CHUNK):
                self._ended(200)
            return
        self._seen += data
        head, has_body, body = self._seen.partition(b"\r\n\r\n")
        if not has_body:
            return
        status = int(head[9:12])
        self._is_last = b"connection: close" in head.lower()
        if status == 200:
            self._is_streaming = True
            self._heard_s, self._num_events = 0.0, 0
            self._heard(body, now_s)
            if self._seen.endswith(_LAST_CHUNK):
                self._ended(200)
        elif len(body) >= _number(head, b"content-length"):
            self._tally.refused_s.append(now_s - self._asked_s)
            self._ended(status, _number(head, b"retry-after"))

    def _heard(self, data: bytes, now_s: float) -> None:
        """Note when tokens came: the first event of a stream opens it and has none, and comes at once."""
        self._num_events += data.count(b"data: ")
        if self._num_events < 2:
            return
        if self._heard_s:
            self._tally.gaps_s.append(now_s - self._heard_s)
        else:
            self._tally.first_s.append(now_s - self._asked_s)
        self._heard_s = now_s

    def hang_up(self) -> None:
        """No more."""
        if self._transport is not None:
            self._transport.abort()

    def ask(self) -> None:
        """Send the request, on a new connection if there is none."""
        if self._tally.stopping:
            return
        if self._transport is None or self._transport.is_closing():
            self._reconnect()
            return
        self._is_waiting, self._is_streaming, self._seen = True, False, b""
        self._asked_s = time.monotonic()
        self._transport.write(self._request)

    def _reconnect(self) -> None:
        task = self._loop.create_task(self.connect())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _ended(self, status: int, retry_after_s: int = 0) -> None:
        self._is_waiting = False
        if status == 200 and _DONE in self._seen:
            self._tally.counts["whole"] += 1
        elif status == 429 and retry_after_s >= 1:
            self._tally.counts["429"] += 1
        elif not self._tally.stopping:
            self._tally.fault(f"neither whole nor an honest refusal: {status}, {self._seen[-200:]!r}")
            retry_after_s = 1
        if self._when_free is not None:
            if self._is_last and self._transport is not None:
                self._transport.close()
            self._is_last = False
            self._when_free(self)
            return
        if retry_after_s and not self._is_rude:
            self._is_last = False  # whatever becomes of the connection meanwhile
            self._loop.call_later(retry_after_s, self.ask)
        elif status == 429 and self._tally.counts["429"] % 2:
            self._is_last = True
        if self._is_last and self._transport is not None:
            self._transport.close()
        elif not retry_after_s or self._is_rude:
            self.ask()


class Arrivals:
    """Requests that come `rate` a second, evenly, whatever becomes of those before: an open loop.

    As long as one of the clients is free: there is one for each of `requests`. `num_late` found none.
    """

    def __init__(self, port: int, requests: Sequence[bytes], tally: Tally, rate: float) -> None:
        self.callers: list[Caller] = []
        self._port = port
        self._requests = list(requests)
        self._tally = tally
        self._rate = rate
        self._free: list[Caller] = []
        self.num_late = 0

    async def run(self) -> None:
        """Send them, until the tally stops."""
        began_s, num_sent = time.monotonic(), 0
        while not self._tally.stopping:
            due = int(self._rate * (time.monotonic() - began_s)) - num_sent
            for _ in range(due):
                self._send()
            num_sent += due
            await asyncio.sleep(1 / self._rate)

    def _send(self) -> None:
        if self._free:
            self._free.pop().ask()
        elif self._requests:
            caller = Caller(self._port, self._requests.pop(), self._tally, when_free=self._free.append)
            self.callers.append(caller)
            caller.ask()
        else:
            self.num_late += 1


def _number(head: bytes, name: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(name + b":"):
            return int(line.split(b":")[1])
    return 0


class Idler(asyncio.Protocol):
    """Holds a connection open and says nothing, or `words`, a byte a second; comes back when it is hung up on."""

    def __init__(self, port: int, tally: Tally, words: bytes = b"") -> None:
        self._port = port
        self._tally = tally
        self._words = words
        self._said = 0
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether it holds a connection now."""
        return self._transport is not None

    async def connect(self) -> None:
        """Open one."""
        self._said = 0
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to say nothing."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        if self._tally.stopping:
            self.hang_up()
        self._speak()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server lost its patience."""
        self._transport = None
        if not self._tally.stopping:
            task = asyncio.get_running_loop().create_task(self.connect())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def hang_up(self) -> None:
        """No more."""
        if self._transport is not None:
            self._transport.abort()

    def _speak(self) -> None:
        if self._said < len(self._words) and self._transport is not None:
            self._transport.write(self._words[self._said : self._said + 1])
            self._said += 1
            asyncio.get_running_loop().call_later(1.0, self._speak)


async def read_slowly(port: int, request: bytes, tally: Tally) -> None:
    """Streams read a few kilobytes a second, through a buffer too small to hide it; until cancelled."""
    loop = asyncio.get_running_loop()
    while not tally.stopping:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, request)
            while piece := await loop.sock_recv(client, _SLOW_BUFFER_BYTES):
                if piece.endswith(_LAST_CHUNK) or piece.startswith(b"HTTP/1.1 429"):
                    break
                await asyncio.sleep(_SLOW_READS_S)
        await asyncio.sleep(1.0)
