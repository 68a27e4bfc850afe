"""`POST /completion` and `POST /infill`, as llama-server has them.

Owns: these routes. Runs in: front ends. Source: llama-server's README. Its streams end with the event
that has `stop`, without `[DONE]`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ds4.api.answers import Collected, collect_answer, stream_frames
from ds4.api.choices import Choice, Job, Piece, TokenText, make_job, open_choices, with_grammar
from ds4.api.errors import Failure
from ds4.api.exchange import Exchange
from ds4.api.fill_in import fill_in_ids
from ds4.api.sse import event
from ds4.api.state import ServedModel
from ds4.errors import RequestError
from ds4.protocol.common import Plan
from ds4.protocol.llama_completion import (
    GenerationSettings,
    NativeChunk,
    NativeCompletion,
    NativeFields,
    NativeProbability,
    NativeTop,
    Prompt,
    decode_infill,
    decode_native,
    native_prompts,
    plan_native,
    selected,
)


async def native_completion(exchange: Exchange) -> None:
    """`/completion`."""
    model = exchange.state.model
    await _answer(exchange, await exchange.prepare(lambda body: _prepare(model, body)))


async def infill(exchange: Exchange) -> None:
    """`/infill`."""
    model = exchange.state.model
    await _answer(exchange, await exchange.prepare(lambda body: _prepare_infill(model, body)))


class _Asked(msgspec.Struct, frozen=True):
    """A request that was read: its job, and what the answer repeats."""

    fields: NativeFields
    job: Job
    prompts: list[str]
    num_tokens: list[int]
    is_list: bool
    model: str


def _prepare(model: ServedModel, body: bytes) -> _Asked:
    request = decode_native(body)
    plan = plan_native(request, model.defaults, model.vocabulary)
    prompts, is_list = native_prompts(request.prompt, model.vocabulary.size)
    return _asked(model, request, plan, [_ids(model, prompt) for prompt in prompts], is_list=is_list)


def _prepare_infill(model: ServedModel, body: bytes) -> _Asked:
    request = decode_infill(body)
    plan = plan_native(request, model.defaults, model.vocabulary)
    for text, param in (
        *((extra.text + extra.filename, "input_extra") for extra in request.input_extra),
        (request.input_prefix, "input_prefix"),
        (request.prompt, "prompt"),
    ):
        model.refuse_absurd(text, param)
    # A file may hold what spells a control token; what is to go on from it is the client's own.
    before = model.tokenizer.encode(request.input_prefix, add_special=True, parse_special=False)
    before += model.tokenizer.encode(request.prompt, add_special=False, parse_special=True)
    files = [(extra.filename, extra.text) for extra in request.input_extra]
    ids = fill_in_ids(model, before, request.input_suffix, "input_suffix", files)
    return _asked(model, request, plan, [ids], is_list=False)


def _asked(
    model: ServedModel, fields: NativeFields, plan: Plan, ids: list[list[int]], *, is_list: bool
) -> _Asked:
    prompts = [model.tokenizer.decode(each, special=True) for each in ids]
    counts = [len(each) for each in ids]
    job = make_job(ids, plan, "prompt")
    return _Asked(fields, job, prompts, counts, is_list, fields.model or model.names[0])


def _ids(model: ServedModel, prompt: Prompt) -> list[int]:
    """Texts become ids, what spells a control token is one; an empty prompt is BOS. Raises RequestError."""
    tokenizer = model.tokenizer
    ids: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, str):
            model.refuse_absurd(part, "prompt")
            ids += tokenizer.encode(part, add_special=index == 0, parse_special=True)
        else:
            ids.append(part)
    if ids:
        return ids
    if tokenizer.bos_id is None:
        raise RequestError(
            "the prompt is empty and this model has no token to begin with",
            param="prompt",
            code="empty_prompt",
        )
    return [tokenizer.bos_id]


async def _answer(exchange: Exchange, asked: _Asked) -> None:
    job = await with_grammar(exchange, asked.job)
    with open_choices(exchange, job) as choices:
        if job.plan.stream:

            async def last() -> bytes:
                return b""

            await stream_frames(exchange, choices, lambda choice: _Chunks(asked, choice), last, _failed)
            return
        answers = [_document(asked, each) for each in await collect_answer(choices)]
        await exchange.reply(answers if asked.is_list or len(answers) > 1 else answers[0])


def _failed(told: Failure) -> bytes:
    return event(told.body)


def _document(asked: _Asked, collected: Collected) -> dict[str, Any] | NativeCompletion:
    document = _completion(
        asked, collected.choice, collected.finish, collected.text, collected.tokens, "\n" in collected.text
    )
    paths = asked.fields.response_fields
    return selected(msgspec.to_builtins(document), paths) if paths else document


class _Chunks:
    """The frames of one choice."""

    def __init__(self, asked: _Asked, choice: Choice) -> None:
        self._asked = asked
        self._choice = choice
        self._has_new_line = False

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, piece: Piece) -> bytes:
        """Text with its tokens."""
        self._has_new_line |= "\n" in piece.text
        asked, choice = self._asked, self._choice
        return event(
            NativeChunk(
                index=choice.index,
                content=piece.text,
                tokens=[token.token_id for token in piece.tokens],
                tokens_predicted=choice.num_generated,
                tokens_evaluated=asked.num_tokens[choice.prompt_index],
                timings=choice.timings if asked.fields.timings_per_token else msgspec.UNSET,
                completion_probabilities=_probabilities(asked, piece.tokens),
            )
        )

    def ending(self, choice: Choice, finish: str) -> bytes:
        """All that is known at the end, but for the text."""
        return event(_completion(self._asked, choice, finish, "", (), self._has_new_line))


def _completion(
    asked: _Asked,
    choice: Choice,
    finish: str,
    text: str,
    tokens: Sequence[TokenText],
    has_new_line: bool,
) -> NativeCompletion:
    num_prompt = asked.num_tokens[choice.prompt_index]
    stop_type: Literal["eos", "limit", "word"] = "limit" if finish == "length" else "eos"
    shows_ids = asked.fields.return_tokens
    return NativeCompletion(
        index=choice.index,
        content=text,
        tokens=[token.token_id for token in tokens] if shows_ids else [],
        model=asked.model,
        tokens_predicted=choice.num_generated,
        tokens_evaluated=num_prompt,
        generation_settings=_settings(asked),
        prompt=asked.prompts[choice.prompt_index],
        has_new_line=has_new_line,
        stop_type=stop_type if choice.matched_stop is None else "word",
        stopping_word=choice.matched_stop or "",
        tokens_cached=num_prompt + choice.num_generated,
        timings=choice.timings,
        completion_probabilities=_probabilities(asked, tokens),
    )


def _settings(asked: _Asked) -> GenerationSettings:
    plan, sampling = asked.job.plan, asked.job.plan.sampling
    limit = -1 if plan.max_tokens is None else plan.max_tokens
    return GenerationSettings(
        n_predict=limit,
        max_tokens=limit,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repeat_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=list(sampling.logit_bias),
        stop=list(plan.stops),
        n_probs=asked.fields.n_probs or 0,
        ignore_eos=bool(asked.fields.ignore_eos),
        stream=plan.stream,
    )


def _probabilities(asked: _Asked, tokens: Sequence[TokenText]) -> list[NativeProbability] | msgspec.UnsetType:
    if not asked.fields.n_probs:
        return msgspec.UNSET
    return [
        NativeProbability(
            id=token.token_id,
            token=token.text,
            bytes=list(token.raw),
            logprob=token.logprob,
            top_logprobs=[
                NativeTop(id=token_id, token=raw.decode("utf-8", "replace"), bytes=list(raw), logprob=logprob)
                for token_id, (raw, logprob) in zip(token.top_ids, token.top, strict=True)
            ],
        )
        for token in tokens
    ]
