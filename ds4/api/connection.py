"""One HTTP connection with limits: on its head in bytes and time, on all bytes of a message, on how many there are.

Owns: these limits. Runs in: front ends. Source: uvicorn's httptools protocol, which has none of its own:
without them a client could hold memory with a header that never ends, or a connection for ever with one
byte a second.
"""

import asyncio
import logging
import resource
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 64 * 1024
HEAD_TIMEOUT_S: Final = 60.0
# Chunked encoding and trailers may double a body; beyond that somebody is playing.
_BODY_FACTOR: Final = 2
_BODY_SPARE_BYTES: Final = 1024 * 1024
# Descriptors that no connection gets: for the ring of the next worker, prompt files, the store, grammar checks.
RESERVED_FILES: Final = 96
_WARN_EVERY_S: Final = 60.0


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection. The limits of a process are set by `bounded_connection`."""

    max_body_bytes = 0
    max_connections = 0
    warn_again_s = 0.0
    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._num_bytes = 0  # of the head while in it, of the body after it
        self._timer: asyncio.TimerHandle | None = None
        self._plain_head = b""  # of a request that offers another protocol, without the offer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection that says nothing is given up as well."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._turn_away()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """No more timers."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what is not known to be good yet."""
        self._num_bytes += len(data)
        self._parse(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            if self._num_bytes > MAX_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", "its head is too large")
        elif self._num_bytes > _BODY_FACTOR * self.max_body_bytes + _BODY_SPARE_BYTES:
            # Answered long ago, where it was looked at.
            _log.warning("connection closed: its body does not end")
            self.transport.close()

    def _parse(self, data: bytes) -> None:
        """In place of uvicorn's, which reads the body of a request that offers another protocol as the next one."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._feed(rest) :]
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def _feed(self, data: memoryview) -> int:
        """Parse; how many bytes were read. Behind an offer the parser stops, and another one goes on without it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            head, self._plain_head = self._plain_head, b""
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head)
            return int(offer.args[0])
        return len(data)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head = True
        self._stop_timer()  # of the silence before it
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; what comes after the body (a trailer) is nobody's business."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: from here on the application's limits hold. No offer of another protocol is taken."""
        if self.parser.should_upgrade():
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                raise ValueError("this is no proxy")
            lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self._plain_head = b"\r\n".join(
                (b"%s %s HTTP/%s" % (method, self.url, version), *lines, b"", b"")
            )
            return
        self._in_head = False
        self._num_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next byte belongs to another request."""
        if self._plain_head:
            return
        self._num_bytes = 0
        self._stop_timer()
        if self.cycle.response_complete:  # what came of the body has ended uvicorn's wait for the next one
            self._start_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer that did not wait for the body: the rest of it is read and dropped, for a while."""
        super().on_response_complete()
        if self.cycle.more_body and self.cycle.response_complete and not self.transport.is_closing():
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self._is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            return  # a pipelined request behind one that is being answered
        if self._in_head and self._num_bytes:
            self._refuse(b"408 Request Timeout", "its head does not end")
        else:
            self.transport.close()

    def _turn_away(self) -> None:
        if (now_s := self.loop.time()) >= type(self).warn_again_s:
            type(self).warn_again_s = now_s + _WARN_EVERY_S
            _log.warning("no more than %d connections: raise the limit of open files", self.max_connections)
        self.transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        self.transport.close()

    def _refuse(self, status: bytes, why: str) -> None:
        _log.warning("connection closed: %s", why)
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
        self.transport.close()


def bounded_connection(max_body_bytes: int) -> type[BoundedConnection]:
    """The protocol class for this body limit, and for as many connections as there are descriptors to spare."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {"max_body_bytes": max_body_bytes, "max_connections": max(1, max_files - RESERVED_FILES)}
    return type("BoundedConnection", (BoundedConnection,), limits)
