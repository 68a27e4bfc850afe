"""Running choices: tokens from the worker become text, log-probabilities and one ending.

Owns: what lies between a generation's tokens and a dialect's chunks; the same code serves streamed
and whole answers, so that both cut at the same character. Runs in: front ends.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.api.errors import BusyError, ClientGoneError, DrainingError
from ds4.api.exchange import Exchange
from ds4.engine_client import Generation
from ds4.errors import RequestError, RingError, RingFullError, WorkerError
from ds4.generation import FinishReason, GenerationEnd, TokenEvent
from ds4.protocol.common import Plan, Timings, Usage, timings, usage
from ds4.text.detokenizer import Detokenizer
from ds4.text.grammar import GrammarSource
from ds4.text.output import OutputParser
from ds4.text.stop import StopMatcher
from ds4.text.tool_calls import OutputEvent, TextDelta

_PIECE_IDS: Final = 1 << 14
_FINISH: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class TokenText(msgspec.Struct, frozen=True):
    """A token with its log-probability, ready to be shown."""

    raw: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int  # in characters of the generated text
    token_id: int
    top_ids: tuple[int, ...]

    @property
    def text(self) -> str:
        """The bytes as text; U+FFFD stands for parts of a character."""
        return self.raw.decode("utf-8", "replace")


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What arrived for one choice: text that may be shown, the tokens it came from, the ending.

    `events` is filled only where the output is parsed: reasoning and tool calls, and the text again. `tokens`
    is filled only where log-probabilities were asked for; a token is released with the first
    of its characters, so that both stay aligned when text is held back.
    """

    text: str
    tokens: tuple[TokenText, ...] = ()
    finish: str = ""
    events: tuple[OutputEvent, ...] = ()

    @property
    def output(self) -> tuple[OutputEvent, ...]:
        """The events, whether the output is parsed or is text alone."""
        return self.events or ((TextDelta(self.text),) if self.text else ())


class Parsing(msgspec.Struct, frozen=True):
    """How the output of a job is taken apart: a parser for each choice, and the control tokens it sees."""

    parser: Callable[[], OutputParser | None]
    shown_ids: frozenset[int]
    max_reasoning_tokens: int | None = None  # then `closing_ids` end the reasoning
    closing_ids: tuple[int, ...] = ()


class Job(msgspec.Struct, frozen=True):
    """What a request asks of the worker: prompts as ids, and the plan for each. `param` names the prompt."""

    prompts: list[NDArray[np.uint32]]
    plan: Plan
    matcher: StopMatcher | None
    param: str
    parsing: Parsing | None = None  # None: the output is text


def make_job(prompts: list[list[int]], plan: Plan, param: str, parsing: Parsing | None = None) -> Job:
    """The costly parts made once, off the loop for large bodies. Raises RequestError for the stops."""
    matcher = StopMatcher(plan.stops) if plan.stops else None
    return Job([_array(prompt) for prompt in prompts], plan, matcher, param, parsing)


def _array(ids: list[int]) -> NDArray[np.uint32]:
    """The ids as [num_tokens] uint32. In pieces: NumPy keeps the interpreter lock while it copies a list,
    and a million numbers would hold up the loop.
    """
    array = np.empty(len(ids), np.uint32)
    for start in range(0, len(ids), _PIECE_IDS):
        array[start : start + _PIECE_IDS] = ids[start : start + _PIECE_IDS]
    return array


async def with_grammar(exchange: Exchange, job: Job) -> Job:
    """The job with its structure compiled, where it has one. Raises RequestError, RingFullError."""
    structure = job.plan.structure
    if structure is None:
        return job
    source = GrammarSource(structure.kind, structure.text, structure.thinking, structure.calls)
    grammar = await exchange.state.grammars.compile(source, structure.param)
    return msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, grammar=grammar))


class Choice:
    """One sequence of a request. Read by one task."""

    def __init__(
        self, index: int, prompt_index: int, generation: Generation | None, job: Job, exchange: Exchange
    ) -> None:
        tokenizer = exchange.state.model.tokenizer
        self.index = index
        self.prompt_index = prompt_index
        self.num_generated = 0
        self.num_cached_tokens = 0
        self.queue_s = 0.0
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.matched_stop: str | None = None
        self._exchange = exchange
        self._metrics = exchange.state.engine.metrics
        self._num_counted = 0  # tokens that the metrics know of
        self._generation = generation
        self._plan = job.plan
        self._tokenizer = tokenizer
        self.num_reasoning: int | None = None if job.parsing is None else 0
        self._parser = job.parsing.parser() if job.parsing is not None else None
        self._max_reasoning = job.parsing.max_reasoning_tokens if job.parsing is not None else None
        self._closing_ids = job.parsing.closing_ids if job.parsing is not None else ()
        shown = job.parsing.shown_ids if job.parsing is not None else frozenset()
        self._detokenizer = Detokenizer(tokenizer, shown=shown)
        self._matcher = job.matcher.fresh() if job.matcher is not None else None
        self.wants_tokens = job.plan.sampling.num_logprobs >= 0
        self._held: deque[TokenText] = deque()
        self._num_characters = 0  # detokenized, shown or not
        self._num_shown = 0
        self._started_s = time.monotonic()  # the loop's clock is too coarse on uvloop

    async def read(self) -> Piece:
        """The next piece that has something to show, counted; the last one has `finish`.

        Raises ClientGoneError, WorkerError.
        """
        if self._generation is None:  # max_tokens 0
            self._count_ending("length")
            return Piece("", finish="length")
        while True:
            events, end = await self._generation.read()
            piece = self._take(events, end)
            if self._max_reasoning is not None and self._must_close and not piece.finish:
                piece, end = await self._close_reasoning(piece)
            self._count_tokens()
            if piece.finish and end is None:
                end = await self._drain()
            if end is not None:
                # After a resumption the cache may also have held output.
                self.num_cached_tokens = min(end.num_cached_tokens, self._generation.num_prompt_tokens)
                self.queue_s = end.queue_ms / 1000
            if piece.text or piece.finish or piece.tokens or piece.events:
                if self._exchange.gone:
                    raise ClientGoneError
                if piece.finish:
                    self._count_ending(piece.finish)
                return piece

    @property
    def _must_close(self) -> bool:
        """Whether the reasoning has used its tokens up, and there is room to say so and for an answer."""
        return (
            self._max_reasoning is not None
            and self.num_reasoning is not None
            and self.num_reasoning >= self._max_reasoning
            and self._parser is not None
            and self._parser.is_reasoning
            and self._generation is not None
            and self.num_generated + len(self._closing_ids) < self._generation.request.max_tokens
        )

    async def _close_reasoning(self, piece: Piece) -> tuple[Piece, GenerationEnd | None]:
        """Go on as if the model had ended its reasoning itself right here."""
        assert self._generation is not None
        end = await self._generation.continue_with(self.num_generated, self._closing_ids)
        self._max_reasoning = None
        closing = self._take([TokenEvent(token_id) for token_id in self._closing_ids], end)
        joined = Piece(
            piece.text + closing.text,
            piece.tokens + closing.tokens,
            closing.finish,
            piece.events + closing.events,
        )
        return joined, end

    def cancel(self) -> None:
        """Stop generating."""
        if self._generation is not None:
            self._generation.cancel()

    @property
    def timings(self) -> Timings:
        """Times of this choice so far."""
        num_prompt = self._generation.num_prompt_tokens if self._generation is not None else 0
        until_first_s = max(0.0, self.first_token_s - self._started_s)
        queue_s = min(self.queue_s, until_first_s)
        return timings(
            num_prompt,
            self.num_cached_tokens,
            queue_s,
            until_first_s - queue_s,
            self.num_generated,
            max(0.0, self.last_token_s - self.first_token_s),
        )

    @property
    def usage(self) -> Usage:
        """Counts of this choice so far. What came out of the cache is known at the end only."""
        num_prompt = self._generation.num_prompt_tokens if self._generation is not None else 0
        return usage(num_prompt, self.num_generated, self.num_cached_tokens, self.num_reasoning)

    async def _drain(self) -> GenerationEnd:
        """The worker's last word on a sequence that a stop string ended here."""
        assert self._generation is not None
        self._generation.cancel()
        end: GenerationEnd | None = None
        while end is None:
            _, end = await self._generation.read()
        return end

    def _count_tokens(self) -> None:
        num_new = self.num_generated - self._num_counted
        if not num_new:
            return
        self._num_counted = self.num_generated
        now_s = time.monotonic()
        self._metrics.add("ds4_generation_tokens_total", num_new)
        self._exchange.used(num_new)
        if not self.first_token_s:
            self.first_token_s = self.last_token_s = now_s
            self._metrics.observe("ds4_time_to_first_token_seconds", now_s - self._exchange.arrived_s)
            num_new -= 1
        if num_new:
            between_s = (now_s - self.last_token_s) / num_new
            self._metrics.observe("ds4_inter_token_latency_seconds", between_s, num_new)
        self.last_token_s = now_s

    def _count_ending(self, finish: str) -> None:
        self._metrics.add("ds4_request_success_total", label=finish)
        self._metrics.observe("ds4_request_generation_tokens", self.num_generated)
        whole_s = time.monotonic() - self._exchange.arrived_s
        self._metrics.observe("ds4_e2e_request_latency_seconds", whole_s)

    def _take(self, events: Sequence[TokenEvent], end: GenerationEnd | None) -> Piece:
        texts: list[str] = []
        finish = ""
        by_text = False
        matcher, parser, push = self._matcher, self._parser, self._detokenizer.push
        for event in events:
            self.num_generated += 1
            if parser is not None and parser.is_reasoning:
                self.num_reasoning = (self.num_reasoning or 0) + 1
            text = push(event.token_id)
            if self.wants_tokens:
                self._held.append(self._token(event))
            self._num_characters += len(text)
            if matcher is not None and self.num_generated > self._plan.min_tokens:
                text, matched = matcher.push(text)
                if matched is not None:
                    finish, by_text = "stop", True
                    self.matched_stop = matched
                    text = text + matched if self._plan.include_stop else text
            texts.append(text)
            if parser is not None:
                parser.feed(text)
                if parser.is_done and not finish:
                    finish = "stop"
            if finish:
                break
            if self._max_reasoning is not None and self._must_close:
                end = None  # the rest is taken back
                break
        if end is not None and not finish:
            finish = _FINISH.get(end.reason, "stop")
            if matcher is not None:
                texts.append(matcher.finish())
                if parser is not None:
                    parser.feed(texts[-1])
        shown = "".join(texts)
        tokens: tuple[TokenText, ...] = ()
        if self.wants_tokens:
            self._num_shown += len(shown)
            tokens = self._release(everything=finish != "" and not by_text)
        if parser is None:
            return Piece(shown, tokens, finish)
        return self._parsed(parser, tokens, finish)

    @staticmethod
    def _parsed(parser: OutputParser, tokens: tuple[TokenText, ...], finish: str) -> Piece:
        if finish:
            parser.end(is_cut=finish == "length")
            if finish == "stop" and parser.has_calls:
                finish = "tool_calls"
        events = tuple(parser.drain())
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        return Piece(text, tokens, finish, events)

    def _token(self, event: TokenEvent) -> TokenText:
        token_bytes = self._tokenizer.token_bytes
        return TokenText(
            token_bytes(event.token_id),
            event.logprob,
            tuple((token_bytes(token_id), logprob) for token_id, logprob in event.top),
            self._num_characters,
            event.token_id,
            tuple(token_id for token_id, _ in event.top),
        )

    def _release(self, *, everything: bool) -> tuple[TokenText, ...]:
        """The tokens whose text has begun to show. A stop string takes its own tokens with it."""
        out: list[TokenText] = []
        while self._held and (everything or self._held[0].offset < self._num_shown):
            out.append(self._held.popleft())
        return tuple(out)


class Choices:
    """All sequences of one request. Owned by the task that answers it."""

    def __init__(self, choices: list[Choice], num_prompt_tokens: int) -> None:
        self.all = choices
        self.num_prompt_tokens = num_prompt_tokens

    def __len__(self) -> int:
        return len(self.all)

    def cancel(self) -> None:
        """Stop all of them."""
        for choice in self.all:
            choice.cancel()

    @property
    def usage(self) -> Usage:
        """Exact counts. A prompt is counted once, however many choices it has."""
        return usage(
            self.num_prompt_tokens,
            sum(choice.num_generated for choice in self.all),
            sum({choice.prompt_index: choice.num_cached_tokens for choice in reversed(self.all)}.values()),
            self._num_reasoning,
        )

    @property
    def _num_reasoning(self) -> int | None:
        counts = [choice.num_reasoning for choice in self.all if choice.num_reasoning is not None]
        return sum(counts) if counts else None


def refuse_too_many(exchange: Exchange, job: Job) -> None:
    """Raises RequestError for more sequences than can run at once."""
    num_prompts, num_choices, most = (
        len(job.prompts),
        job.plan.num_choices,
        exchange.state.engine.max_generations,
    )
    if num_prompts * num_choices > most:
        raise RequestError(
            f"{num_prompts} prompts with n={num_choices} are more sequences than this server runs at once "
            f"for one request ({most})",
            param="n" if num_choices > 1 else job.param,
            code="invalid_value",
        )


@contextlib.contextmanager
def open_choices(exchange: Exchange, job: Job) -> Iterator[Choices]:
    """Hand every choice of every prompt to the worker: all, or none.

    Whatever still runs when the block is left, or when the client goes away, is cancelled. Raises
    RequestError, ContextOverflowError, KeyLimitError, BusyError, DrainingError, RingUnavailableError.
    """
    state, engine = exchange.state, exchange.state.engine
    prompts, plan, param = job.prompts, job.plan, job.param
    refuse_too_many(exchange, job)
    limit = state.max_context_tokens
    requests = [
        (index, prompt, plan.generation(len(prompt), limit, choice, param))
        for index, prompt in enumerate(prompts)
        for choice in range(plan.num_choices)
    ]
    if engine.draining:
        raise DrainingError("the server is shutting down")
    exchange.take(len(requests), sum(map(len, prompts)))
    opened: list[Choice] = []
    choices = Choices(opened, sum(map(len, prompts)))
    try:
        try:
            for prompt_index, prompt, request in requests:
                generation = None
                if request.max_tokens > 0:
                    request = exchange.of_tenant(request)
                    generation = engine.generate(request, prompt, exchange.request_id, exchange.cache_salt)
                opened.append(Choice(len(opened), prompt_index, generation, job, exchange))
        except RingError:
            exchange.untake()
            raise
        engine.metrics.add("ds4_prompt_tokens_total", choices.num_prompt_tokens)
        for prompt in prompts:
            engine.metrics.observe("ds4_request_prompt_tokens", len(prompt))
        exchange.prepared()
        exchange.when_gone(choices.cancel)
        yield choices
    except RingFullError as error:
        raise BusyError(engine.turn_away()) from error
    except WorkerError:
        engine.metrics.add("ds4_request_errors_total")
        raise
    except ClientGoneError:
        engine.metrics.add("ds4_requests_cancelled_total", len(opened))
        raise
    finally:
        choices.cancel()


async def each_choice(choices: Choices, work: Callable[[Choice], Awaitable[None]]) -> None:
    """`work` for every choice at the same time; the first error ends all of them and is raised.

    Also one choice has a task of its own: the request's is many awaits deep, and each token would pass them.
    """
    tasks = [asyncio.ensure_future(work(choice)) for choice in choices.all]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
