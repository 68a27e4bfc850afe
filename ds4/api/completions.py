"""`POST /v1/completions`.

Owns: the route. Runs in: front ends. Source: the OpenAI API reference.

A prompt given as text is raw: what spells a control token is one, as in llama-server and vLLM, since
clients that render a template themselves post its markers here.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.api.answers import Collected, Counts, Identity, collect_answer, stream_answer
from ds4.api.choices import Choice, Choices, Job, Piece, TokenText, make_job, open_choices, with_grammar
from ds4.api.exchange import Exchange
from ds4.api.fill_in import fill_in_ids
from ds4.api.prompt_scores import joined, prompt_logprobs, score_prompts
from ds4.api.sse import MARK, FrameTemplate, event
from ds4.api.state import ServedModel
from ds4.errors import RequestError
from ds4.protocol.common import Plan, Usage
from ds4.protocol.openai_completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Prompt,
    decode_completion,
    plan_completion,
    prompts_of,
    scores_prompt,
)

_PARAM: Final = "prompt"


async def completions(exchange: Exchange) -> None:
    """The route."""
    model = exchange.state.model
    request, job = await exchange.prepare(lambda body: _prepare(model, body))
    job = await with_grammar(exchange, job)
    echoes = _echoes(model, request, job.prompts)
    if scores_prompt(request):
        scores = await score_prompts(exchange, job)
        given = prompts_of(request, model.vocabulary.size)
        echoes = [
            Echo(echo.text, prompt_logprobs(model, prompt, ids.tolist(), found))
            for echo, prompt, ids, found in zip(echoes, given, job.prompts, scores, strict=True)
        ]
    with open_choices(exchange, job) as choices:
        identity = Identity(exchange, "cmpl-", request.model)
        if job.plan.stream:
            await _stream(exchange, choices, job.plan, identity, echoes)
        else:
            collected = _best(await collect_answer(choices), request.num_wanted, job.plan.num_choices)
            await exchange.reply(_document(choices, collected, identity, echoes, shown=_shows(request)))


def _prepare(model: ServedModel, body: bytes) -> tuple[CompletionRequest, Job]:
    request = decode_completion(body)
    plan = plan_completion(request, model.defaults, model.vocabulary)
    add_special = request.add_special_tokens is not False
    prompts = prompts_of(request, model.vocabulary.size)
    ids = [prompt_ids(model, prompt, add_special=add_special) for prompt in prompts]
    if request.suffix:
        ids = [fill_in_ids(model, each, request.suffix) for each in ids]
    return request, make_job(ids, plan, _PARAM)


def prompt_ids(model: ServedModel, prompt: Prompt, *, add_special: bool) -> list[int]:
    """The ids of one prompt; an empty one is BOS. Raises RequestError where there is no BOS."""
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        model.refuse_absurd(prompt, _PARAM)
        ids = tokenizer.encode(prompt, add_special=add_special, parse_special=True)
    else:
        ids = prompt
    if ids:
        return ids
    if tokenizer.bos_id is None:
        raise RequestError(
            "the prompt is empty and this model has no token to begin with", param=_PARAM, code="empty_prompt"
        )
    return [tokenizer.bos_id]


class Echo(msgspec.Struct, frozen=True):
    """What goes before a prompt's text: the prompt as the client gave it, with its log-probabilities."""

    text: str
    logprobs: CompletionLogprobs | None = None


def _echoes(model: ServedModel, request: CompletionRequest, prompts: list[NDArray[np.uint32]]) -> list[Echo]:
    if not request.echo:
        return [Echo("")] * len(prompts)
    given = prompts_of(request, model.vocabulary.size)
    decode = model.tokenizer.decode
    return [Echo(each if isinstance(each, str) else decode(each, special=True)) for each in given]


def _shows(request: CompletionRequest) -> bool:
    """Whether the answer has log-probabilities: they are also made where only the best are wanted."""
    return request.logprobs is not None and request.logprobs is not False


def _best(collected: list[Collected], num_wanted: int, num_made: int) -> list[Collected]:
    """For each prompt the choices whose tokens were likeliest, those first; all, where no more were made."""
    if num_made == num_wanted:
        return collected

    def likelihood(each: Collected) -> float:
        logprobs = [token.logprob for token in each.tokens]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")

    out: list[Collected] = []
    for first in range(0, len(collected), num_made):
        out += sorted(collected[first : first + num_made], key=likelihood, reverse=True)[:num_wanted]
    return out


class _CompletionChunks:
    """The frames of one choice."""

    def __init__(self, identity: Identity, choice: Choice, plan: Plan, echo: Echo) -> None:
        self._identity = identity
        self._index = choice.index
        self._counts = Counts(choice, plan)
        self._echo = echo
        self._template = FrameTemplate(self._chunk(MARK))

    def _chunk(
        self, text: str, logprobs: CompletionLogprobs | None = None, finish: str | None = None
    ) -> Completion:
        return _completion(
            self._identity,
            [CompletionChoice(index=self._index, text=text, logprobs=logprobs, finish_reason=finish)],
            self._counts.usage,
        )

    def opening(self) -> bytes:
        """The echoed prompt."""
        if self._echo.logprobs is not None or (self._echo.text and self._counts.change):
            return event(self._chunk(self._echo.text, self._echo.logprobs))
        return self._template.frame(self._echo.text) if self._echo.text else b""

    def piece(self, piece: Piece) -> bytes:
        """Text, with its tokens where they were asked for."""
        if not piece.tokens and not self._counts.change:
            return self._template.frame(piece.text)
        logprobs = _logprobs(piece.tokens, len(self._echo.text)) if piece.tokens else None
        return event(self._chunk(piece.text, logprobs))

    def ending(self, choice: Choice, finish: str) -> bytes:
        """The finish reason, and the times."""
        return event(msgspec.structs.replace(self._chunk("", finish=finish), timings=choice.timings))


def _completion(
    identity: Identity, choices: list[CompletionChoice], counts: Usage | msgspec.UnsetType | None
) -> Completion:
    return Completion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.fingerprint,
        choices=choices,
        usage=counts,
    )


async def _stream(
    exchange: Exchange, choices: Choices, plan: Plan, identity: Identity, echoes: list[Echo]
) -> None:
    await stream_answer(
        exchange,
        choices,
        lambda choice: _CompletionChunks(identity, choice, plan, echoes[choice.prompt_index]),
        _completion(identity, [], None) if plan.include_usage else None,
    )


def _document(
    choices: Choices, collected: list[Collected], identity: Identity, echoes: list[Echo], *, shown: bool
) -> Completion:
    answers = []
    for index, each in enumerate(collected):
        echo = echoes[each.choice.prompt_index]
        logprobs = None
        if shown:
            logprobs = joined(echo.logprobs, _logprobs(each.tokens, len(echo.text)))
        answers.append(
            CompletionChoice(
                index=index,
                text=echo.text + each.text,
                logprobs=logprobs,
                finish_reason=each.finish,
            )
        )
    document = _completion(identity, answers, choices.usage)
    return msgspec.structs.replace(document, timings=collected[0].choice.timings)


def _logprobs(tokens: Sequence[TokenText], start: int) -> CompletionLogprobs:
    """Parallel lists; a position's best tokens include the chosen one, as OpenAI's do."""
    top: list[dict[str, float] | None] = []
    for token in tokens:
        best = {raw.decode("utf-8", "replace"): logprob for raw, logprob in token.top}
        best.setdefault(token.text, token.logprob)
        top.append(best)
    return CompletionLogprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=top,
        text_offset=[start + token.offset for token in tokens],
    )
