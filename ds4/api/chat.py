"""`POST /v1/chat/completions`.

Owns: the route. Runs in: front ends. Source: the OpenAI API reference.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from ds4.api.answers import Collected, Identity, collect_answer, stream_answer
from ds4.api.choices import Choice, Choices, Job, Piece, TokenText, make_job, open_choices
from ds4.api.exchange import Exchange
from ds4.api.sse import MARK, FrameTemplate, event
from ds4.api.state import ServedModel
from ds4.protocol.common import Plan
from ds4.protocol.openai_chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TopLogprob,
    decode_chat,
    plan_chat,
    template_kwargs,
    template_messages,
)

_EMPTY: Final = Delta()
_PARAM: Final = "messages"


async def chat_completions(exchange: Exchange) -> None:
    """The route."""
    model = exchange.state.model
    request, job = await exchange.prepare(lambda body: _prepare(model, body))
    with open_choices(exchange, job) as choices:
        identity = Identity(exchange, "chatcmpl-", request.model)
        if job.plan.stream:
            await _stream(exchange, choices, job.plan, identity)
        else:
            await exchange.reply(_document(choices, await collect_answer(choices), identity))


def _prepare(model: ServedModel, body: bytes) -> tuple[ChatRequest, Job]:
    request = decode_chat(body)
    return request, chat_job(model, request, _PARAM)


def chat_job(model: ServedModel, request: ChatRequest, param: str) -> Job:
    """What a conversation asks of the worker. Raises RequestError.

    For every dialect: the others bring their requests into the form of this one. `param` is where
    their conversation is.
    """
    plan = plan_chat(request, model.defaults, model.vocabulary)
    return make_job([chat_prompt(model, request, param)], plan, param)


def chat_prompt(model: ServedModel, request: ChatRequest, param: str) -> list[int]:
    """The token ids of a conversation. Raises RequestError."""
    rendered = model.template.render(
        template_messages(request.messages),
        add_generation_prompt=request.add_generation_prompt is not False,
        kwargs=template_kwargs(request),
    )
    model.refuse_absurd(rendered, param)
    return model.tokenizer.encode_rendered(rendered)


class _ChatChunks:
    """The frames of one choice."""

    def __init__(self, identity: Identity, index: int, plan: Plan) -> None:
        self._identity = identity
        self._index = index
        self._null_usage = plan.include_usage
        self._template = FrameTemplate(self._chunk(Delta(content=MARK)))

    def _chunk(
        self, delta: Delta, logprobs: ChoiceLogprobs | None = None, finish: str | None = None
    ) -> ChatChunk:
        return _chunk(
            self._identity,
            [ChunkChoice(index=self._index, delta=delta, logprobs=logprobs, finish_reason=finish)],
            null_usage=self._null_usage,
        )

    def opening(self) -> bytes:
        """The role."""
        return event(self._chunk(Delta(role="assistant", content="")))

    def piece(self, piece: Piece) -> bytes:
        """Text, with its tokens where they were asked for."""
        if not piece.tokens:
            return self._template.frame(piece.text)
        return event(self._chunk(Delta(content=piece.text), _logprobs(piece.tokens)))

    def ending(self, choice: Choice, finish: str) -> bytes:
        """The finish reason, and the times."""
        chunk = self._chunk(_EMPTY, finish=finish)
        return event(msgspec.structs.replace(chunk, timings=choice.timings))


def _chunk(identity: Identity, choices: list[ChunkChoice], *, null_usage: bool) -> ChatChunk:
    return ChatChunk(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.fingerprint,
        choices=choices,
        usage=None if null_usage else msgspec.UNSET,
    )


async def _stream(exchange: Exchange, choices: Choices, plan: Plan, identity: Identity) -> None:
    def usage_frame() -> bytes:
        chunk = _chunk(identity, [], null_usage=True)
        return event(msgspec.structs.replace(chunk, usage=choices.usage))

    await stream_answer(
        exchange,
        choices,
        lambda choice: _ChatChunks(identity, choice.index, plan),
        usage_frame if plan.include_usage else None,
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
                message=AnswerMessage(content=each.text),
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
