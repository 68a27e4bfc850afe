"""Requests that two HTTP parsers could read differently, each with a second one hidden behind it.

Runs in: tests. The promise: at most one request is ever answered, and never the hidden one, which is the only
one that can succeed. Source: the ambiguities of RFC 9112, sections 2.2, 5, 6.3, 7.1.
"""

from typing import Final

HIDDEN: Final = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
_POST: Final = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_LENGTH: Final = b"content-length: %d\r\n" % len(HIDDEN)

CASES: Final[dict[str, bytes]] = {
    "length and chunked": _POST + b"content-length: 5\r\n" + _CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
    "chunked and length": _POST + _CHUNKED + _LENGTH + b"\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": _POST + b"content-length: 0\r\n" + _LENGTH + b"\r\n" + HIDDEN,
    "a list of lengths": _POST + b"content-length: 0, %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "a signed length": _POST + b"content-length: +0\r\n\r\n" + HIDDEN,
    "a hexadecimal length": _POST + b"content-length: 0x0\r\n\r\n" + HIDDEN,
    "a space before the colon": _POST + b"content-length : %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
    "an unknown coding": _POST + b"transfer-encoding: xchunked\r\n" + _LENGTH + b"\r\n" + HIDDEN,
    "chunked twice": _POST + b"transfer-encoding: chunked, chunked\r\n" + _LENGTH + b"\r\n0\r\n\r\n" + HIDDEN,
    "chunked not last": _POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a tab in the coding": _POST
    + b"transfer-encoding:\tchunked\x0b\r\n"
    + _LENGTH
    + b"\r\n0\r\n\r\n"
    + HIDDEN,
    "a folded header": _POST + b"x-a: b\r\n " + _CHUNKED + _LENGTH + b"\r\n0\r\n\r\n" + HIDDEN,
    "a bare line feed in the coding": _POST
    + b"x-a: b\ntransfer-encoding: chunked\n"
    + _LENGTH
    + b"\r\n"
    + HIDDEN,
    "a bare carriage return": _POST + b"x-a: b\rcontent-length: 0\r\n" + _LENGTH + b"\r\n" + HIDDEN,
    "a chunk size that overflows": _POST + _CHUNKED + b"\r\n10000000000000000\r\n" + HIDDEN,
    "a negative chunk size": _POST + _CHUNKED + b"\r\n-1\r\n" + HIDDEN,
    "a chunk longer than it says": _POST + _CHUNKED + b"\r\n1\r\n{}}\r\n0\r\n\r\n" + HIDDEN,
    "two codings": _POST + _CHUNKED + b"transfer-encoding: identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunked in HTTP/1.0": _POST.replace(b"1.1", b"1.0") + _CHUNKED + _LENGTH + b"\r\n0\r\n\r\n" + HIDDEN,
    "a length with more behind it": _POST + b"content-length: 0;x\r\n\r\n" + HIDDEN,
    "a length that a hop shall drop": _POST + b"connection: content-length\r\n" + _LENGTH + b"\r\n" + HIDDEN,
    "a hexadecimal chunk size": _POST + _CHUNKED + b"\r\n0x0\r\n\r\n" + HIDDEN,
    "a chunk size with a space before it": _POST + _CHUNKED + b"\r\n 0\r\n\r\n" + HIDDEN,
    "an upgrade to HTTP/2 in the clear": _POST
    + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    + _LENGTH
    + b"\r\n"
    + HIDDEN,
    "a zero byte in a name": _POST + b"content-len\0gth: 0\r\n\r\n" + HIDDEN,
}
# nginx takes these for the end of the first request, and hands on what it read in a form of its own.
STRICT_CASES: Final[dict[str, bytes]] = {
    "a length in the trailers": _POST + _CHUNKED + b"\r\n0\r\n" + _LENGTH + b"\r\n" + HIDDEN,
    "a line feed in a chunk extension": _POST + _CHUNKED + b"\r\n0;x=\n\r\n\r\n" + HIDDEN,
    "chunks that end with bare line feeds": _POST + _CHUNKED + b"\r\n2\n{}\n0\n\n" + HIDDEN,
}
# Answering both requests is right where nothing is ambiguous; these show that the tests can fail.
PLAIN: Final = _POST + b"content-length: 0\r\n\r\n" + HIDDEN
