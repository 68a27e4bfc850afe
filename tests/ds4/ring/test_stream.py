"""What a reader of one request sees, in every order of arrival, cancel and loss."""

import asyncio

import pytest

from ds4.errors import RingUnavailableError
from ds4.generation import TokenEvent
from ds4.ring.stream import RingStream
from tests.ds4.ring.harness import STOP


class Recorder:
    """Stands for the channel: notes what the stream asked for."""

    def __init__(self) -> None:
        self.grants: list[tuple[int, int]] = []
        self.cancels: list[tuple[int, int]] = []

    def grant(self, slot: int, limit: int) -> None:
        self.grants.append((slot, limit))

    def cancel(self, slot: int, request_id: int) -> None:
        self.cancels.append((slot, request_id))


def make(window: int = 8) -> tuple[RingStream, Recorder]:
    owner = Recorder()
    return RingStream(owner, 3, 77, window), owner


def push(stream: RingStream, first: int, count: int) -> None:
    for index in range(first, first + count):
        assert stream.push_token(index, TokenEvent(100 + index))


def test_a_read_takes_everything_that_is_there() -> None:
    async def run() -> None:
        stream, _ = make()
        push(stream, 0, 3)
        events, end = await stream.read()
        assert [event.token_id for event in events] == [100, 101, 102]
        assert end is None
        push(stream, 3, 1)
        assert stream.push_end(4, STOP)
        events, end = await stream.read()
        assert [event.token_id for event in events] == [103]
        assert end == STOP

    asyncio.run(run())


def test_a_read_waits_for_a_token_an_ending_or_a_loss() -> None:
    async def run() -> None:
        for happens in ("token", "end", "loss"):
            stream, _ = make()
            reading = asyncio.ensure_future(stream.read())
            await asyncio.sleep(0)
            assert not reading.done()
            if happens == "token":
                push(stream, 0, 1)
                assert (await reading)[0] == [TokenEvent(100)]
            elif happens == "end":
                stream.push_end(0, STOP)
                assert await reading == ([], STOP)
            else:
                stream.fail("gone")
                with pytest.raises(RingUnavailableError, match="gone"):
                    await reading

    asyncio.run(run())


def test_what_arrived_before_a_loss_is_read_first() -> None:
    async def run() -> None:
        stream, _ = make()
        push(stream, 0, 2)
        stream.fail("the worker died")
        assert len((await stream.read())[0]) == 2
        for _ in range(2):
            with pytest.raises(RingUnavailableError, match="died"):
                await stream.read()

    asyncio.run(run())


def test_an_ending_wins_over_a_later_loss() -> None:
    async def run() -> None:
        stream, _ = make()
        stream.push_end(0, STOP)
        stream.fail("the worker died")
        assert await stream.read() == ([], STOP)

    asyncio.run(run())


def test_reading_past_the_ending_and_reading_twice_at_once_are_mistakes() -> None:
    async def run() -> None:
        stream, _ = make()
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await stream.read()
        stream.push_end(0, STOP)
        await reading
        with pytest.raises(RuntimeError, match="past the ending"):
            await stream.read()

    asyncio.run(run())


def test_a_read_that_was_given_up_can_be_repeated() -> None:
    async def run() -> None:
        stream, _ = make()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.read(), 0.001)
        push(stream, 0, 1)
        assert (await stream.read())[0] == [TokenEvent(100)]

    asyncio.run(run())


def test_credit_follows_what_was_read_not_what_arrived() -> None:
    async def run() -> None:
        stream, owner = make(window=8)
        push(stream, 0, 3)
        await stream.read()
        assert owner.grants == []  # more than half of the window is left
        push(stream, 3, 5)
        assert owner.grants == []
        await stream.read()
        assert owner.grants == [(3, 16)]
        push(stream, 8, 8)
        stream.push_end(16, STOP)
        await stream.read()
        assert owner.grants == [(3, 16)]  # over: nothing more to allow

    asyncio.run(run())


def test_cancel_is_sent_once_and_never_after_the_end() -> None:
    stream, owner = make()
    stream.cancel()
    stream.cancel()
    assert owner.cancels == [(3, 77)]
    ended, owner = make()
    ended.push_end(0, STOP)
    ended.cancel()
    lost, other = make()
    lost.fail("gone")
    lost.cancel()
    assert owner.cancels == other.cancels == []


def test_gaps_and_repeats_are_noticed() -> None:
    stream, _ = make()
    push(stream, 0, 2)
    assert not stream.push_token(1, TokenEvent(1))
    assert not stream.push_token(3, TokenEvent(1))
    assert not stream.push_end(1, STOP)
    assert not stream.push_end(3, STOP)
    assert stream.push_end(2, STOP)
