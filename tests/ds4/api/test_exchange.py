"""ds4/api/exchange.py: bodies with limits, clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.front_rig import Front, until, with_front


async def _open(front: Front, body: bytes, path: str = "/v1/chat/completions") -> asyncio.StreamWriter:
    """A request whose answer nobody reads."""
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


def _chat(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_client_that_leaves_frees_every_sibling(tmp_path: Path, stream: bool, num_tokens: int) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(num_tokens)
        writer = await _open(front, _chat(stream=stream, n=3))
        await until(
            lambda: len(worker.requests) == 3 and all(each.num_sent == num_tokens for each in worker.requests)
        )
        writer.close()
        await until(lambda: worker.num_cancelled == 3 and worker.num_open == 0)
        await until(lambda: front.state.engine.ring.num_free_slots == 8)
        assert front.state.engine.num_running == 0
        metrics = front.state.engine.metrics
        await until(lambda: metrics.value("ds4_requests_cancelled_total") == 3)

    with_front(tmp_path, scenario)


def test_a_client_that_leaves_while_its_worker_is_lost_ends_the_wait(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(1)
        writer = await _open(front, _chat(stream=True))
        await until(lambda: bool(worker.requests))
        worker.stop()
        await until(lambda: front.state.engine.num_resuming == 1)
        writer.close()
        await until(lambda: front.state.engine.num_resuming == 0 and front.state.engine.num_running == 0)

    with_front(tmp_path, scenario)


def test_a_request_that_left_does_not_touch_its_neighbour(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(2)
        asking = asyncio.ensure_future(front.chat())
        await until(lambda: len(worker.requests) == 1)
        writer = await _open(front, _chat())
        await until(lambda: len(worker.requests) == 2)
        writer.close()
        await until(lambda: worker.num_cancelled == 1)
        worker.release()
        assert (await asking).json()["choices"][0]["message"]["content"] == "hello world"

    with_front(tmp_path, scenario)


def test_a_body_over_the_limit_is_413_declared_or_chunked(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        big = b" " * 3000

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield big[:1000]

        for content in (big, chunks()):
            response = await front.client.post("/v1/chat/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        assert (await front.chat()).status_code == 200

    with_front(tmp_path, scenario, max_body_bytes=2048)


def test_a_chunked_body_is_read_whole(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            body = _chat()
            for start in range(0, len(body), 7):
                yield body[start : start + 7]

        response = await front.client.post("/v1/chat/completions", content=chunks())
        assert response.status_code == 200

    with_front(tmp_path, scenario)


def test_expect_100_continue_is_answered(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        body = _chat()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode())
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        await reader.readline()
        writer.write(body)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()

    with_front(tmp_path, scenario)


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        body = _chat()
        one = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        last = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        writer.write((one + body) * 2 + last)
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert answer.count(b'"content":"hello world"') == 2
        assert answer.endswith(b'{"status":"ok"}')
        writer.close()

    with_front(tmp_path, scenario)


def test_a_large_body_is_prepared_off_the_loop_and_answered_the_same(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await front.client.post(
            "/v1/chat/completions", content=_chat(metadata={"x": "y" * 50_000})
        )
        assert response.json()["choices"][0]["message"]["content"] == "hello world"

    with_front(tmp_path, scenario)


def test_the_worker_knows_how_many_requests_are_on_their_way(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        engine = front.state.engine
        seen: list[int] = []
        before = engine.preparing

        def spy(change: int) -> None:
            before(change)
            seen.append(engine.num_preparing)

        engine.preparing = spy  # type: ignore[method-assign]
        await front.chat()
        assert (await front.client.post("/v1/chat/completions", content=b"{}")).status_code == 400
        assert seen == [1, 0, 1, 0]

    with_front(tmp_path, scenario)
