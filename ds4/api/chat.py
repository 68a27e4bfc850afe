"""`POST /v1/chat/completions`, `/v1/chat/completions/input_tokens`.

Owns: these routes. Runs in: front ends. Source: the OpenAI API reference; llama-server for the second.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from ds4.api.answers import Collected, Counts, Identity, collect_answer, stream_answer
from ds4.api.choices import (
    Choice,
    Choices,
    Job,
    Parsing,
    Piece,
    TokenText,
    make_job,
    open_choices,
    with_grammar,
)
from ds4.api.exchange import Exchange
from ds4.api.rendering import render
from ds4.api.sse import MARK, FrameTemplate, event
from ds4.api.state import ServedModel
from ds4.api.structure import structured
from ds4.protocol.common import Plan, Usage
from ds4.protocol.openai_chat import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    conversation,
    decode_chat,
    plan_chat,
)
from ds4.protocol.tokens import TokenCount
from ds4.text.tool_calls import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    tool_types,
)

_EMPTY: Final = Delta()
_PARAM: Final = "messages"
_TAIL_CHARS: Final = 256  # of a prompt, enough to see whether it opened the reasoning


async def chat_completions(exchange: Exchange) -> None:
    """The route."""
    model = exchange.state.model
    request, job = await exchange.prepare(lambda body: _prepare(model, body))
    job = await with_grammar(exchange, job)
    with open_choices(exchange, job) as choices:
        identity = Identity(exchange, "chatcmpl-", request.model)
        if job.plan.stream:
            await _stream(exchange, choices, job.plan, identity, is_timed=bool(request.timings_per_token))
        else:
            await exchange.reply(_document(choices, await collect_answer(choices), identity))


async def chat_input_tokens(exchange: Exchange) -> None:
    """How long a prompt is; never reaches the worker."""
    model = exchange.state.model
    await exchange.answer(lambda body: TokenCount(len(_prepare(model, body)[1].prompts[0])))


def _prepare(model: ServedModel, body: bytes) -> tuple[ChatRequest, Job]:
    request = decode_chat(body)
    return request, chat_job(model, request, _PARAM)


def chat_job(model: ServedModel, request: ChatRequest, param: str) -> Job:
    """What a conversation asks of the worker. Raises RequestError.

    For every dialect: the others bring their requests into the form of this one. `param` is where
    their conversation is.
    """
    plan = plan_chat(request, model.defaults, model.vocabulary)
    asked = conversation(request)
    rendered = render(model, asked)
    model.refuse_absurd(rendered, param)
    output, plan = structured(model, plan, asked, rendered)
    # The tail, because a job shall not keep all of the text.
    parser = partial(
        output.parser,
        rendered=rendered[-_TAIL_CHARS:],
        tools=tool_types(asked.tools),
        is_parallel=asked.is_parallel,
        is_forced=asked.is_forced,
    )
    parsing = None
    if parser() is not None:
        closing = model.tokenizer.encode(model.output.closing, add_special=False, parse_special=True)
        parsing = Parsing(parser, model.shown_ids, asked.max_reasoning_tokens, tuple(closing))
    return make_job([model.tokenizer.encode_rendered(rendered)], plan, param, parsing)


class _ChatChunks:
    """The frames of one choice."""

    def __init__(self, identity: Identity, choice: Choice, plan: Plan, *, is_timed: bool) -> None:
        """`is_timed`: every piece comes with the times so far."""
        self._identity = identity
        self._index = choice.index
        self._counts = Counts(choice, plan)
        self._timed = choice if is_timed else None
        self._text = FrameTemplate(self._chunk(Delta(content=MARK)))
        self._reasoning: FrameTemplate | None = None
        self._arguments: FrameTemplate | None = None  # of the call that began last

    def _chunk(
        self, delta: Delta, logprobs: ChoiceLogprobs | None = None, finish: str | None = None
    ) -> ChatChunk:
        return _chunk(
            self._identity,
            [ChunkChoice(index=self._index, delta=delta, logprobs=logprobs, finish_reason=finish)],
            self._counts.usage,
        )

    def opening(self) -> bytes:
        """The role."""
        return event(self._chunk(Delta(role="assistant", content="")))

    def piece(self, piece: Piece) -> bytes:
        """What the model said, with its tokens where they were asked for."""
        if not piece.tokens and self._timed is None and not self._counts.change:
            if not piece.events:
                return self._text.frame(piece.text)
            return b"".join(map(self._frame, piece.events))
        # The tokens go with the first delta: they cannot be told apart by what became of them.
        deltas = [_delta(part) for part in piece.output if not isinstance(part, CallEnd)]
        first, *rest = deltas or [Delta(content="")]
        chunks = [self._chunk(first, _logprobs(piece.tokens) if piece.tokens else None)]
        chunks += [self._chunk(delta) for delta in rest]
        if self._timed is not None:
            times = self._timed.timings
            chunks = [msgspec.structs.replace(chunk, timings=times) for chunk in chunks]
        return b"".join(map(event, chunks))

    def _frame(self, part: OutputEvent) -> bytes:
        match part:
            case TextDelta(text):
                return self._text.frame(text)
            case ReasoningDelta(text):
                if self._reasoning is None:
                    self._reasoning = FrameTemplate(self._chunk(Delta(reasoning_content=MARK)))
                return self._reasoning.frame(text)
            case ArgumentsDelta(index, text):
                if self._arguments is None:
                    self._arguments = FrameTemplate(self._chunk(_delta(ArgumentsDelta(index, MARK))))
                return self._arguments.frame(text)
            case CallEnd():
                self._arguments = None
                return b""
            case CallBegin():
                return event(self._chunk(_delta(part)))

    def ending(self, choice: Choice, finish: str) -> bytes:
        """The finish reason, and the times."""
        chunk = self._chunk(_EMPTY, finish=finish)
        return event(msgspec.structs.replace(chunk, timings=choice.timings))


def _delta(part: TextDelta | ReasoningDelta | CallBegin | ArgumentsDelta) -> Delta:
    match part:
        case TextDelta(text):
            return Delta(content=text)
        case ReasoningDelta(text):
            return Delta(reasoning_content=text)
        case CallBegin(index, call_id, name):
            function = CalledFunction(name=name, arguments="")
            return Delta(tool_calls=[ToolCall(index=index, id=call_id, type="function", function=function)])
        case ArgumentsDelta(index, text):
            return Delta(tool_calls=[ToolCall(index=index, function=CalledFunction(arguments=text))])


def _message(pieces: Sequence[Piece]) -> AnswerMessage:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[CallBegin, list[str]]] = []
    for part in (part for piece in pieces for part in piece.output):
        match part:
            case TextDelta(text):
                texts.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case CallBegin():
                calls.append((part, []))
            case ArgumentsDelta(index, text):
                calls[index][1].append(text)
    return AnswerMessage(
        content="".join(texts) if texts or not calls else None,
        reasoning_content="".join(reasoning) if reasoning else msgspec.UNSET,
        tool_calls=[_call(begin, arguments) for begin, arguments in calls] if calls else msgspec.UNSET,
    )


def _call(begin: CallBegin, arguments: Sequence[str]) -> ToolCall:
    function = CalledFunction(name=begin.name, arguments="".join(arguments))
    return ToolCall(id=begin.id, type="function", function=function)


def _chunk(
    identity: Identity, choices: list[ChunkChoice], counts: Usage | msgspec.UnsetType | None
) -> ChatChunk:
    return ChatChunk(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.fingerprint,
        choices=choices,
        usage=counts,
    )


async def _stream(
    exchange: Exchange, choices: Choices, plan: Plan, identity: Identity, *, is_timed: bool
) -> None:
    await stream_answer(
        exchange,
        choices,
        lambda choice: _ChatChunks(identity, choice, plan, is_timed=is_timed),
        _chunk(identity, [], None) if plan.include_usage else None,
    )


def _document(choices: Choices, collected: list[Collected], identity: Identity) -> ChatCompletion:
    return ChatCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.fingerprint,
        choices=[
            ChatChoice(
                index=each.choice.index,
                message=_message(each.pieces),
                logprobs=_logprobs(each.tokens) if each.choice.wants_tokens else None,
                finish_reason=each.finish,
            )
            for each in collected
        ],
        usage=choices.usage,
        timings=collected[0].choice.timings,
    )


def _logprobs(tokens: Sequence[TokenText]) -> ChoiceLogprobs:
    return ChoiceLogprobs(
        [
            TokenLogprob(
                token.text,
                token.logprob,
                list(token.raw),
                [
                    TopLogprob(raw.decode("utf-8", "replace"), logprob, list(raw))
                    for raw, logprob in token.top
                ],
            )
            for token in tokens
        ]
    )
