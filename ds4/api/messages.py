"""`POST /v1/messages`, `/v1/messages/count_tokens`.

Owns: these routes. Runs in: front ends. Source: the Anthropic API reference.
"""

import secrets
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ds4.api.answers import collect_answer, stream_frames
from ds4.api.choices import Choice, Choices, Job, Piece, open_choices, with_grammar
from ds4.api.dialects import anthropic_error
from ds4.api.errors import Failure
from ds4.api.exchange import Exchange
from ds4.api.sse import MARK, FrameTemplate, named_event
from ds4.api.state import ServedModel
from ds4.api.turns import extensions, turn_job
from ds4.protocol.anthropic_messages import (
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    Ending,
    InputPart,
    Message,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignaturePart,
    TextBlock,
    TextPart,
    ThinkingBlock,
    ThinkingPart,
    ToolUseBlock,
    chat_fields,
    decode_count,
    decode_messages,
    message_usage,
)
from ds4.protocol.tokens import TokenCount
from ds4.text.tool_calls import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)

_PARAM: Final = "messages"
_PING: Final = named_event(Ping())
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CALL_PREFIX: Final = "toolu_"


async def messages(exchange: Exchange) -> None:
    """The route."""
    model = exchange.state.model
    request, job = await exchange.prepare(lambda body: _prepare(model, body))
    job = await with_grammar(exchange, job)
    with open_choices(exchange, job) as choices:
        answer = _Answer(choices, request.model or model.names[0])
        if request.stream:
            await stream_frames(
                exchange,
                choices,
                lambda choice: _MessageEvents(answer),
                _last,
                lambda told: _failed(told, exchange.request_id),
                sign_of_life=_PING,
            )
        else:
            (whole,) = await collect_answer(choices)
            blocks = _blocks((event for piece in whole.pieces for event in piece.output), answer.id)
            await exchange.reply(answer.message(blocks, answer.ending(whole.choice, whole.finish)))


async def count_tokens(exchange: Exchange) -> None:
    """How long a prompt is; never reaches the worker."""
    model = exchange.state.model
    await exchange.answer(lambda body: _count(model, body))


def _prepare(model: ServedModel, body: bytes) -> tuple[MessagesRequest, Job]:
    request = decode_messages(body)
    return request, turn_job(model, {**_extensions(body), **chat_fields(request)}, _PARAM)


def _count(model: ServedModel, body: bytes) -> TokenCount:
    fields = chat_fields(decode_count(body))
    job = turn_job(model, {**_extensions(body), **fields}, _PARAM)
    return TokenCount(len(job.prompts[0]))


def _extensions(body: bytes) -> dict[str, Any]:
    return extensions(body, MessagesRequest, ("logprobs", "top_logprobs", "timings_per_token"))


async def _last() -> bytes:
    return named_event(MessageStop())


def _failed(told: Failure, request_id: str) -> bytes:
    return named_event(anthropic_error(told, request_id))


class _Answer:
    """What all parts of one answer have in common. Immutable."""

    def __init__(self, choices: Choices, model: str) -> None:
        self.id = "msg_" + secrets.token_hex(12)
        self._model = model
        self._choices = choices

    def message(self, content: list[AnswerBlock], ending: Ending | None) -> Message:
        """The message; without an ending, as it is when it begins."""
        return Message(
            id=self.id,
            model=self._model,
            content=content,
            stop_reason=ending.stop_reason if ending is not None else None,
            stop_sequence=ending.stop_sequence if ending is not None else None,
            usage=self.usage,
        )

    @property
    def usage(self) -> MessageUsage:
        """Counts so far. What came out of the cache is known at the end only."""
        counts = self._choices.usage
        return message_usage(
            counts.prompt_tokens, counts.prompt_tokens_details.cached_tokens, counts.completion_tokens
        )

    @staticmethod
    def ending(choice: Choice, finish: str) -> Ending:
        """Why it ended, in Anthropic's words."""
        if choice.matched_stop is not None:
            return Ending("stop_sequence", choice.matched_stop)
        return Ending(_STOP_REASONS.get(finish, "end_turn"), None)


class _MessageEvents:
    """The frames of one answer: blocks that open and close as the kind of output changes."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._index = -1
        self._open: type[TextDelta | ReasoningDelta | CallBegin] | None = None
        self._text: FrameTemplate | None = None  # of the open block

    def opening(self) -> bytes:
        """The empty message."""
        return named_event(MessageStart(self._answer.message([], None)))

    def piece(self, piece: Piece) -> bytes:
        """Blocks and what they are made of."""
        return b"".join(self._frames(event) for event in piece.output)

    def ending(self, choice: Choice, finish: str) -> bytes:
        """The last block's end, the reason, the counts."""
        delta = MessageDelta(self._answer.ending(choice, finish), self._answer.usage)
        return self._close() + named_event(delta)

    def _frames(self, event: OutputEvent) -> bytes:
        if isinstance(event, TextDelta):
            return self._begin(TextDelta, TextBlock(text=""), TextPart(MARK)) + self._more(event.text)
        if isinstance(event, ReasoningDelta):
            block = ThinkingBlock(thinking="", signature="")
            return self._begin(ReasoningDelta, block, ThinkingPart(MARK)) + self._more(event.text)
        if isinstance(event, CallBegin):
            call = ToolUseBlock(id=_call_id(event), name=event.name, input={})
            return self._close() + self._begin(CallBegin, call, InputPart(MARK))
        if isinstance(event, ArgumentsDelta):
            return self._more(event.text)
        return self._close()

    def _begin(
        self,
        kind: type[TextDelta | ReasoningDelta | CallBegin],
        block: AnswerBlock,
        part: TextPart | ThinkingPart | InputPart,
    ) -> bytes:
        if self._open is kind:
            return b""
        frames = self._close()
        self._open = kind
        self._index += 1
        self._text = FrameTemplate(BlockDelta(self._index, part))
        ping = _PING if self._index == 0 else b""  # its place in Anthropic's own streams
        return frames + named_event(BlockStart(self._index, block)) + ping

    def _more(self, text: str) -> bytes:
        assert self._text is not None
        return self._text.frame(text)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        frames = b""
        if self._open is ReasoningDelta:
            frames = named_event(BlockDelta(self._index, SignaturePart(self._answer.id)))
        self._open = None
        return frames + named_event(BlockStop(self._index))


def _blocks(events: Iterable[OutputEvent], signature: str) -> list[AnswerBlock]:
    """The whole content."""
    blocks: list[AnswerBlock] = []
    texts: list[str] = []
    begun: OutputEvent | None = None

    def close() -> None:
        nonlocal begun
        text = "".join(texts)
        texts.clear()
        if isinstance(begun, TextDelta):
            blocks.append(TextBlock(text=text))
        elif isinstance(begun, ReasoningDelta):
            blocks.append(ThinkingBlock(thinking=text, signature=signature))
        elif isinstance(begun, CallBegin):
            blocks.append(ToolUseBlock(id=_call_id(begun), name=begun.name, input=_input(text)))
        begun = None

    for event in events:
        if isinstance(event, CallBegin | CallEnd):
            close()
            begun = event if isinstance(event, CallBegin) else None
            continue
        if not isinstance(event, ArgumentsDelta) and type(event) is not type(begun):
            close()
            begun = event
        texts.append(event.text)
    close()
    return blocks


def _call_id(event: CallBegin) -> str:
    return event.id if event.id.startswith(_CALL_PREFIX) else _CALL_PREFIX + event.id.removeprefix("call_")


def _input(text: str) -> dict[str, Any]:
    """A call's arguments. The dialect has no place for what is no object: it goes under a name."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"raw_arguments": text}
