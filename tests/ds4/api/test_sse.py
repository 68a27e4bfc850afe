"""ds4/api/sse.py: frames from prepared bytes, comments in silence."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message

from ds4.api.errors import ClientGoneError
from ds4.api.sse import KEEP_ALIVE_S, MARK, STALLED_S, EventStream, FrameTemplate, KeepAlive, event
from ds4.protocol.openai_completions import Completion, CompletionChoice
from tests.support.front_rig import run


def _chunk(text: str) -> Completion:
    choice = CompletionChoice(index=0, text=text, logprobs=None, finish_reason=None)
    return Completion(id="i", created=1, model="m", system_fingerprint="f", choices=[choice])


@pytest.mark.parametrize(
    "text", ["", "plain", 'quo"te\\', "line\nbreak\r\n\n", "😀 \x00\x7f\u2028", "data: x"]
)
def test_a_template_makes_the_same_frame_as_encoding_the_chunk(text: str) -> None:
    frame = FrameTemplate(_chunk(MARK)).frame(text)
    assert frame == event(_chunk(text))
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert b"\n" not in frame[:-2]
    assert json.loads(frame[6:])["choices"][0]["text"] == text


class _Sent:
    """Collects what goes out; `gate` holds it up."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, message: Message) -> None:
        await self.gate.wait()
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


def _with_stream(scenario: Callable[[_Sent, EventStream], Awaitable[None]]) -> None:
    async def whole() -> None:
        sent = _Sent()
        await scenario(sent, EventStream(sent.send, sent.send))

    run(whole)


def test_silence_is_broken_by_a_comment_and_speech_is_not() -> None:
    async def scenario(sent: _Sent, stream: EventStream) -> None:
        await stream.start()
        await stream.write(b"data: 1\n\n")
        stream.tick(stream.last_write_s + 1)
        await asyncio.sleep(0)
        assert sent.bodies == [b"data: 1\n\n"]
        stream.tick(stream.last_write_s + KEEP_ALIVE_S)
        await stream.finish(b"end")
        assert sent.bodies == [b"data: 1\n\n", b": keep-alive\n\n", b"end"]

    _with_stream(scenario)


def test_a_client_that_reads_slowly_gets_no_comments_on_top() -> None:
    async def scenario(sent: _Sent, stream: EventStream) -> None:
        sent.gate.clear()
        writing = asyncio.ensure_future(stream.write(b"x"))
        await asyncio.sleep(0)
        for _ in range(3):
            stream.tick(stream.last_write_s + 100)
        sent.gate.set()
        await writing
        await stream.finish()
        assert sent.bodies == [b"x", b""]

    _with_stream(scenario)


def test_a_client_that_reads_no_more_counts_as_gone() -> None:
    async def scenario(sent: _Sent, stream: EventStream) -> None:
        sent.gate.clear()
        writing = [asyncio.ensure_future(stream.write(b"x")) for _ in range(2)]
        await asyncio.sleep(0)
        stream.tick(stream.last_write_s + STALLED_S - 1)
        await asyncio.sleep(0)
        assert not any(task.done() for task in writing)
        stream.tick(stream.last_write_s + STALLED_S + 1)
        ends = await asyncio.gather(*writing, return_exceptions=True)
        assert [type(end) for end in ends] == [ClientGoneError, ClientGoneError]

    _with_stream(scenario)


def test_a_cancelled_write_is_a_cancelled_write() -> None:
    async def scenario(sent: _Sent, stream: EventStream) -> None:
        sent.gate.clear()
        writing = asyncio.ensure_future(stream.write(b"x"))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait((writing,))
        assert writing.cancelled()

    _with_stream(scenario)


def test_a_comment_that_cannot_be_sent_harms_nobody() -> None:
    async def whole() -> None:
        async def broken(message: Message) -> None:
            raise OSError("gone")

        stream = EventStream(broken, broken)
        stream.tick(stream.last_write_s + 100)
        await asyncio.sleep(0.001)
        with pytest.raises(OSError, match="gone"):
            await stream.finish()

    run(whole)


def test_the_ticker_runs_only_while_streams_are_open() -> None:
    async def scenario(sent: _Sent, stream: EventStream) -> None:
        keep_alive = KeepAlive()
        ticking: list[bool] = []
        with keep_alive.watching(stream):
            ticking.append(keep_alive.is_ticking)
            stream.last_write_s -= 100
            keep_alive.tick()
            ticking.append(keep_alive.is_ticking)
        keep_alive.tick()
        ticking.append(keep_alive.is_ticking)
        assert ticking == [True, True, False]
        await stream.finish()
        assert sent.bodies == [b": keep-alive\n\n", b""]

    _with_stream(scenario)
