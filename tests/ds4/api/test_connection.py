"""ds4/api/connection.py: what a connection may cost, with real sockets."""

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ds4.api import exchange
from ds4.api.connection import MAX_HEAD_BYTES, RESERVED_FILES, BoundedConnection
from tests.support.front_rig import DEADLINE_S, Front, until, with_front
from tests.support.smuggling import CASES, PLAIN, STRICT_CASES

_GET = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"


async def _talk(front: Front, pieces: Iterable[bytes], pause_s: float = 0.0) -> bytes:
    """Send pieces until the server hangs up or there are no more; everything it said until it hung up."""

    def talk() -> bytes:
        # A plain socket: an event loop's forgets what it has not read yet when the other side resets it.
        said = b""
        with socket.create_connection(("127.0.0.1", front.port), DEADLINE_S) as connection:
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause_s)
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(65536):
                    said += piece
        return said

    return await asyncio.to_thread(talk)


@pytest.mark.parametrize(
    "flood",
    [b"x-flood: 1\r\n" * 100, b"a" * 1024],
    ids=["headers without end", "one header without end"],
)
def test_a_head_without_end_is_refused(tmp_path: Path, flood: bytes) -> None:
    async def scenario(front: Front) -> None:
        num_sent = 0

        def pieces() -> Iterator[bytes]:
            nonlocal num_sent
            yield _GET + b"x-long: "
            while True:
                num_sent += len(flood)
                yield flood

        answer = await _talk(front, pieces())
        # Empty where the kernel dropped the answer together with the connection still being written to.
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 "), answer
        assert num_sent < 64 * MAX_HEAD_BYTES
        assert (await front.client.get("/health/live")).status_code == 200

    with_front(tmp_path, scenario, None)


def test_a_long_head_within_the_limit_is_read(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _talk(front, [_GET + b"x-long: " + b"a" * 40_000 + b"\r\nconnection: close\r\n\r\n"])
        assert answer.startswith(b"HTTP/1.1 200 ")

    with_front(tmp_path, scenario, None)


def test_a_head_of_a_byte_at_a_time_and_a_silent_connection_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedConnection, "head_timeout_s", 0.3)

    async def scenario(front: Front) -> None:
        slow = iter([bytes((byte,)) for byte in _GET * 100])
        answers = await asyncio.gather(_talk(front, slow, pause_s=0.02), _talk(front, []))
        assert answers[0].startswith(b"HTTP/1.1 408 ")
        assert answers[1] == b""

    with_front(tmp_path, scenario, None)


@pytest.mark.parametrize("rest", [b"", b"x" * 999], ids=["a body that does not end", "silence after it"])
def test_an_answer_before_the_body_does_not_keep_the_connection_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    # The head itself has its time, on any machine.
    timeout_s = property(lambda made: 0.3 if made.cycle and made.cycle.response_complete else DEADLINE_S)
    monkeypatch.setattr(BoundedConnection, "head_timeout_s", timeout_s)

    async def scenario(front: Front) -> None:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
        answer = await _talk(front, [head, rest[:500], rest[500:]], pause_s=0.05)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert answer.count(b"HTTP/1.1 ") == 1

    with_front(tmp_path, scenario, None, api_key="secret")


def test_a_body_that_does_not_arrive_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.2)

    async def scenario(front: Front) -> None:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
        answer = await _talk(front, [head])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer

    with_front(tmp_path, scenario, None)


def test_who_sends_too_much_hears_of_it_and_may_go_on(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        def head(length: int) -> bytes:
            return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length

        last = _GET + b"connection: close\r\n\r\n"
        answer = await _talk(front, [head(1_000_000), *[b"x" * 10_000] * 100, last])
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert answer.count(b"HTTP/1.1 200 ") == 1

        def pieces() -> Iterator[bytes]:
            yield head(10**15)
            while True:
                yield b"x" * 100_000

        answer = await _talk(front, pieces())
        # Empty where the kernel dropped the answer together with the connection still being written to.
        assert answer == b"" or (answer.startswith(b"HTTP/1.1 413 ") and answer.count(b"HTTP/1.1 ") == 1)

    with_front(tmp_path, scenario, None, max_body_bytes=2048)


def test_connections_leave_descriptors_for_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (RESERVED_FILES + 3, RESERVED_FILES + 3))

    async def scenario(front: Front) -> None:
        def connect() -> socket.socket:
            return socket.create_connection(("127.0.0.1", front.port), DEADLINE_S)

        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connect()) for _ in range(3)]
            for _ in range(2):
                answer = await _talk(front, [])
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1\r\n" in answer
            assert sum("open files" in line.message for line in caplog.records) == 1
            idle[0].sendall(_GET + b"\r\n")
            assert (await asyncio.to_thread(idle[0].recv, 65536)).startswith(b"HTTP/1.1 200 ")
        await until(lambda: not front.server.server_state.connections)
        assert (await _talk(front, [_GET + b"connection: close\r\n\r\n"])).startswith(b"HTTP/1.1 200 ")

    with_front(tmp_path, scenario, None)


def test_trailers_without_end_are_refused_and_none_counts_as_a_header(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

        def pieces() -> Iterator[bytes]:
            yield head + b"1\r\n{\r\n0\r\n"
            while True:
                yield b"x-trailer: " + b"a" * 4096 + b"\r\n"

        answer = await _talk(front, pieces())
        assert answer == b"" or answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 ")), answer[:100]
        assert (await front.client.get("/health/live")).status_code == 200

    with_front(tmp_path, scenario, None, max_body_bytes=1024)


def test_the_limit_counts_each_request_of_a_connection_anew(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        one = _GET + b"x-long: " + b"a" * 40_000 + b"\r\n\r\n"
        last = _GET + b"connection: close\r\n\r\n"
        answer = await _talk(front, [one, one, one, last], pause_s=0.05)
        assert answer.count(b"HTTP/1.1 200 ") == 4

    with_front(tmp_path, scenario, None)


_OFFERS = {
    "HTTP/2 in the clear": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    "a web socket": b"connection: upgrade\r\nupgrade: websocket\r\n",
}


@pytest.mark.parametrize("offer", _OFFERS.values(), ids=_OFFERS.keys())
def test_an_offer_of_another_protocol_is_passed_over_and_the_body_read(tmp_path: Path, offer: bytes) -> None:
    hidden = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + offer
    body = b'{"content": "hello"}'

    async def scenario(front: Front) -> None:
        for framed in (
            b"content-length: %d\r\n\r\n%s" % (len(body), body),
            b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        ):
            request = head + framed
            for pieces in ([request], [request[:-9], request[-9:]], [bytes((byte,)) for byte in request]):
                answer = await _talk(front, [*pieces, _GET + b"connection: close\r\n\r\n"])
                assert answer.count(b"HTTP/1.1 200 ") == 2, answer
                assert b'"tokens"' in answer
        # What the body holds is no request of its own, however it arrives.
        smuggled = head + b"content-length: %d\r\n\r\n" % len(hidden)
        answer = await _talk(front, [smuggled, hidden, _GET + b"connection: close\r\n\r\n"], pause_s=0.05)
        assert answer.count(b"HTTP/1.1 400 ") == answer.count(b"HTTP/1.1 200 ") == 1, answer
        # Many in one piece, and a tunnel.
        many = b"GET /health/live HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n"
        answer = await _talk(front, [many * 2000 + _GET + b"connection: close\r\n\r\n"])
        assert answer.count(b"HTTP/1.1 200 ") == 2001
        answer = await _talk(front, [b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n" + hidden])
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1

    with_front(tmp_path, scenario, None)


async def _answers(front: Front, raw: bytes, *, wanted: int = 0) -> bytes:
    """So many answers, or all that is said within a moment: a second one would come at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    said = b""
    try:
        writer.write(raw)
        while not wanted or said.count(b"HTTP/1.1 ") < wanted:
            piece = await asyncio.wait_for(reader.read(65536), DEADLINE_S if wanted else 1)
            if not piece:
                break
            said += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return said


def test_no_request_can_be_hidden_in_another(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        plain = await _answers(front, PLAIN, wanted=2)
        assert plain.count(b"HTTP/1.1 200 ") == 1, "the hidden one is never looked for"
        cases = CASES | STRICT_CASES
        answers = await asyncio.gather(*(_answers(front, raw) for raw in cases.values()))
        for name, said in zip(cases, answers, strict=True):
            assert said.count(b"HTTP/1.1 ") <= 1, name
            assert b"HTTP/1.1 200 " not in said, name
            assert b"HTTP/1.1 5" not in said, name
        assert (await front.client.get("/health/live")).status_code == 200

    with_front(tmp_path, scenario, None)
