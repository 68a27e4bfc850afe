"""A client that costs little: one request on one connection, its answer as it comes.

Runs in: stress programs and their tests, hundreds at a time on few cores, next to the server they load.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec


class Answer(msgspec.Struct):
    """What one request came to. `error`: an error object of the API, or why the connection ended."""

    status: int = 0
    text: str = ""
    num_events: int = 0
    is_done: bool = False
    error: str = ""
    retry_after_s: int = 0

    @property
    def is_refused(self) -> bool:
        """A plain, explicit no."""
        return self.status in (429, 503)


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed at the end, whatever state it is in."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.close()


async def status_of(port: int, path: str) -> int:
    """The status of one GET; 0 where nobody answers within seconds."""
    try:
        async with asyncio.timeout(2.0), connected(port) as (reader, writer):
            writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
            return int((await reader.readline()).split()[1])
    except (OSError, IndexError, ValueError):
        return 0


async def _lines(reader: asyncio.StreamReader, *, chunked: bool, length: int) -> AsyncIterator[bytes]:
    """The body, line by line."""
    if not chunked:
        for line in (await reader.readexactly(length)).split(b"\n"):
            yield line
        return
    rest = b""
    while True:
        size = int(await reader.readline() or b"", 16)
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        *whole, rest = (rest + data[:-2]).split(b"\n")
        for line in whole:
            yield line


async def chat(
    port: int,
    body: Mapping[str, Any],
    *,
    leave_after: int = 0,
    pause_s: float = 0.0,
    answer: Answer | None = None,
) -> Answer:
    """One chat request, streamed unless the body says otherwise.

    `leave_after`: hang up after so many events. `pause_s`: read slowly.

    Never raises for what the server does: a connection that ends early is an `error` without `is_done`.
    `answer` is filled as the answer comes, for callers that give up waiting.
    """
    answer = answer or Answer()
    raw = json.dumps({"stream": True, **body}).encode()
    try:
        async with connected(port) as (reader, writer):
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw
            )
            await _read(reader, answer, leave_after, pause_s)
    except (OSError, EOFError, ValueError, asyncio.IncompleteReadError) as error:
        answer.error = answer.error or f"connection: {type(error).__name__}"
    return answer


def _text(part: Mapping[str, Any]) -> str:
    """The text of a message or of a piece of one."""
    return part.get("content") or ""


async def _read(reader: asyncio.StreamReader, answer: Answer, leave_after: int, pause_s: float) -> None:
    status_line = await reader.readline()
    if not status_line:
        raise EOFError
    answer.status = int(status_line.split()[1])
    chunked, length = False, 0
    while (line := (await reader.readline()).strip().lower()) != b"":
        name, _, value = line.partition(b":")
        if name == b"transfer-encoding":
            chunked = b"chunked" in value
        elif name == b"content-length":
            length = int(value)
        elif name == b"retry-after":
            answer.retry_after_s = int(value)
    async for line in _lines(reader, chunked=chunked, length=length):
        if answer.status != 200:
            answer.error = json.loads(line)["error"]["code"] or "error"
            return
        if not chunked and line.startswith(b"{"):
            answer.text = "".join(_text(choice["message"]) for choice in json.loads(line)["choices"])
            answer.is_done = True
        elif line == b"data: [DONE]":
            answer.is_done = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = event["error"]["code"] or "error"
                continue
            answer.num_events += 1
            answer.text += "".join(_text(choice["delta"]) for choice in event["choices"])
            if leave_after and answer.num_events >= leave_after:
                return
            if pause_s:
                await asyncio.sleep(pause_s)
