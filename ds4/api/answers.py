"""The two ways to answer a generating request: one document, or a stream of events.

Owns: the order of events and what happens to a stream that fails. Runs in: front ends. Dialects give
the shapes.
"""

import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from ds4.api.choices import Choice, Choices, Piece, TokenText, each_choice
from ds4.api.errors import ClientGoneError, Failure, failure
from ds4.api.exchange import Exchange
from ds4.api.sse import COMMENT, DONE, EventStream, event
from ds4.protocol.common import Plan, Usage


class Identity:
    """What all chunks of one answer have in common."""

    __slots__ = ("created", "fingerprint", "id", "model")

    def __init__(self, exchange: Exchange, prefix: str, model: str | None) -> None:
        served = exchange.state.model
        self.id = prefix + secrets.token_hex(12)
        self.created = int(datetime.now(UTC).timestamp())
        self.model = model or served.names[0]  # the request's name is echoed: it never selects a model
        self.fingerprint = served.fingerprint


class Counts:
    """The `usage` of a choice's chunks: none, null until the last, or what there is so far."""

    __slots__ = ("_choice", "_unchanged", "change")

    def __init__(self, choice: Choice, plan: Plan) -> None:
        self.change = plan.counts_always
        self._choice = choice
        self._unchanged = None if plan.include_usage else msgspec.UNSET

    @property
    def usage(self) -> Usage | msgspec.UnsetType | None:
        """Of the next chunk."""
        return self._choice.usage if self.change else self._unchanged


class ChunkWriter(Protocol):
    """A dialect's frames for one choice."""

    def opening(self) -> bytes:
        """Sent before the first token, at once."""
        ...

    def piece(self, piece: Piece) -> bytes:
        """Sent for each piece that has text or tokens."""
        ...

    def ending(self, choice: Choice, finish: str) -> bytes:
        """Sent last."""
        ...


async def stream_answer(
    exchange: Exchange,
    choices: Choices,
    writer: Callable[[Choice], ChunkWriter],
    usage_chunk: msgspec.Struct | None,
) -> None:
    """An OpenAI stream: opening chunks, pieces, then usage and `[DONE]`.

    `usage_chunk`: a chunk without choices, to be filled in; None where the usage was not asked for.
    """

    async def last() -> bytes:
        if usage_chunk is None:
            return DONE
        times = choices.all[0].timings  # llama-server's clients look for them here
        return event(msgspec.structs.replace(usage_chunk, usage=choices.usage, timings=times)) + DONE

    await stream_frames(exchange, choices, writer, last, lambda told: event(told.body) + DONE)


async def stream_frames(
    exchange: Exchange,
    choices: Choices,
    writer: Callable[[Choice], ChunkWriter],
    last: Callable[[], Awaitable[bytes]],
    failed: Callable[[Failure], bytes],
    *,
    sign_of_life: bytes = COMMENT,
) -> None:
    """Headers and opening frames at once, pieces as they come, then the last frames.

    An error after the headers becomes an error event: the stream ends, but never as if all was well.
    """
    stream = EventStream(exchange.send, exchange.send_frame, sign_of_life)
    await stream.start()

    async def run(choice: Choice) -> None:
        chunks = writer(choice)
        if opening := chunks.opening():
            await stream.write(opening)
        finish = ""
        while not finish:
            piece = await choice.read()
            frames = chunks.piece(piece) if piece.text or piece.tokens or piece.events else b""
            if finish := piece.finish:
                frames += chunks.ending(choice, finish)
            if frames:
                await stream.write(frames)

    with exchange.state.keep_alive.watching(stream):
        try:
            await each_choice(choices, run)
            ending = await last()
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - the request boundary: headers are out
            exchange.state.engine.metrics.add("ds4_request_errors_total")
            await stream.finish(failed(failure(error, exchange.request_id)))
            return
    await stream.finish(ending)


class Collected:
    """A whole choice."""

    __slots__ = ("choice", "finish", "pieces", "text", "tokens")

    def __init__(self, choice: Choice, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.choice = choice
        self.text = "".join(piece.text for piece in self.pieces)
        self.tokens: list[TokenText] = [token for piece in self.pieces for token in piece.tokens]
        self.finish = self.pieces[-1].finish


async def collect_answer(choices: Choices) -> list[Collected]:
    """All choices, whole, in order. Raises WorkerError, ClientGoneError."""
    done: dict[int, Collected] = {}

    async def run(choice: Choice) -> None:
        pieces = [await choice.read()]
        while not pieces[-1].finish:
            pieces.append(await choice.read())
        done[choice.index] = Collected(choice, pieces)

    await each_choice(choices, run)
    return [done[choice.index] for choice in choices.all]
