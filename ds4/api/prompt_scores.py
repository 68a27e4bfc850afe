"""Log-probabilities of prompts, for `echo` with `logprobs`: what evaluation harnesses live on.

Owns: asking the worker for scores, and their form in an answer. Runs in: front ends. Source: the OpenAI
API reference of the older completions, where the first token of a prompt has no log-probability.

The prompts are scored before anything is generated from them, so that a stream can begin with its echo.
"""

import asyncio
import codecs
from collections.abc import Sequence

import msgspec

from ds4.api.choices import Job, refuse_too_many
from ds4.api.errors import BusyError, ClientGoneError, DrainingError
from ds4.api.exchange import Exchange
from ds4.api.state import ServedModel
from ds4.engine_client import Generation
from ds4.errors import RingFullError, WorkerError
from ds4.generation import GenerationRequest, SamplingParams, TokenEvent
from ds4.protocol.openai_completions import CompletionLogprobs, Prompt


async def score_prompts(exchange: Exchange, job: Job) -> list[list[TokenEvent]]:
    """For each prompt the scores of its tokens from the second on.

    Raises RequestError, ContextOverflowError, KeyLimitError, BusyError, DrainingError, RingUnavailableError, WorkerError,
    ClientGoneError.
    """
    state, engine = exchange.state, exchange.state.engine
    refuse_too_many(exchange, job)
    for prompt in job.prompts:
        job.plan.generation(len(prompt), state.max_context_tokens, 0, job.param)
    if engine.draining:
        raise DrainingError("the server is shutting down")
    exchange.take(len(job.prompts) * job.plan.num_choices, sum(map(len, job.prompts)))
    sampling = SamplingParams(temperature=0.0, num_logprobs=job.plan.sampling.num_logprobs)
    opened: list[Generation] = []

    def cancel() -> None:
        for generation in opened:
            generation.cancel()

    try:
        indices = [index for index, prompt in enumerate(job.prompts) if len(prompt) > 1]
        for index in indices:
            prompt = job.prompts[index]
            request = GenerationRequest(max_tokens=len(prompt) - 1, sampling=sampling, scores_prompt=True)
            request = exchange.of_tenant(request)
            opened.append(engine.generate(request, prompt, exchange.request_id, exchange.cache_salt))
        exchange.when_gone(cancel)
        found = await asyncio.gather(*map(_read, opened))
        if exchange.gone:
            raise ClientGoneError
    except RingFullError as error:
        raise BusyError(engine.turn_away()) from error
    except WorkerError:
        engine.metrics.add("ds4_request_errors_total")
        raise
    except ClientGoneError:
        engine.metrics.add("ds4_requests_cancelled_total", len(opened))
        raise
    finally:
        cancel()
    scores: list[list[TokenEvent]] = [[] for _ in job.prompts]
    for index, events in zip(indices, found, strict=True):
        scores[index] = events
    return scores


async def _read(generation: Generation) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while True:
        new, end = await generation.read()
        events += new
        if end is not None:
            return events


def prompt_logprobs(
    model: ServedModel, given: Prompt, ids: Sequence[int], scores: Sequence[TokenEvent]
) -> CompletionLogprobs:
    """Parallel lists, an entry for each token of the prompt; the first has nothing before it."""
    token_bytes = model.tokenizer.token_bytes
    pieces = [token_bytes(token_id) for token_id in ids]
    tokens = [_text(piece) for piece in pieces]
    top: list[dict[str, float] | None] = [None]
    for token, score in zip(tokens[1:], scores, strict=True):
        best = {_text(token_bytes(token_id)): logprob for token_id, logprob in score.top}
        best.setdefault(token, score.logprob)
        top.append(best)
    if isinstance(given, str) and ids and ids[0] == model.tokenizer.bos_id:
        pieces[0] = b""  # not in the text that is echoed
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None, *(score.logprob for score in scores)],
        top_logprobs=top,
        text_offset=_offsets(pieces),
    )


def joined(prompt: CompletionLogprobs | None, output: CompletionLogprobs) -> CompletionLogprobs:
    """Those of a prompt, and then those of what was generated."""
    if prompt is None:
        return output
    names = CompletionLogprobs.__struct_fields__
    lists = {name: getattr(prompt, name) + getattr(output, name) for name in names}
    return msgspec.convert(lists, CompletionLogprobs)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _offsets(pieces: Sequence[bytes]) -> list[int]:
    """Where each piece begins, in characters of the whole text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    num_characters = 0
    for piece in pieces:
        offsets.append(num_characters)
        num_characters += len(decoder.decode(piece))
    return offsets
