"""`POST /v1/responses`, `/v1/responses/input_tokens`, and what is stored of it: GET, DELETE, input items, cancel.

Owns: these routes. Runs in: front ends. Source: the OpenAI API reference. A response is stored before
its last event goes out, so that the next request can go on from it at whichever front end.
"""

import bisect
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from ds4.api.answers import collect_answer, stream_frames
from ds4.api.choices import Choice, Choices, Job, Piece, open_choices, with_grammar
from ds4.api.documents import document
from ds4.api.errors import Failure, NotFoundError
from ds4.api.exchange import Exchange
from ds4.api.item_ids import ItemIds, output_items, resolved, stored_items
from ds4.api.keys import ANYBODY, Tenant
from ds4.api.response_items import ItemBuilder
from ds4.api.response_store import Stored, StoreError
from ds4.api.sse import named_event
from ds4.api.state import OFF_LOOP_BYTES, FrontState, ServedModel
from ds4.api.turns import extensions, turn_job
from ds4.errors import ContextOverflowError, RequestError
from ds4.protocol import openai_responses_output as out
from ds4.protocol.openai_responses import (
    Item,
    Reasoning,
    ResponsesRequest,
    TextConfig,
    TextFormat,
    chat_fields,
    decode_responses,
    input_items,
)

_log = logging.getLogger(__name__)

_PARAM: Final = "input"
_MAX_PAGE: Final = 100
_encode: Final = msgspec.json.Encoder().encode


async def responses(exchange: Exchange) -> None:
    """The route."""
    request, more = await exchange.prepare(_decoded)
    ids = ItemIds()
    items, job = await _prepare(exchange, request, more, ids)
    job = await with_grammar(exchange, job)
    with open_choices(exchange, job) as choices:
        answer = _Answer(exchange, request, items, job, choices, ids)
        if job.plan.stream:
            await stream_frames(
                exchange, choices, lambda choice: _ResponseEvents(answer), answer.last, answer.failed
            )
        else:
            (whole,) = await collect_answer(choices)
            for piece in whole.pieces:
                answer.builder.take(piece.output, piece.tokens)
            answer.ended(whole.finish)
            await exchange.reply(await answer.stored())


async def response_input_tokens(exchange: Exchange) -> None:
    """How long a prompt is, with the conversation before it; never reaches the worker."""
    body = await exchange.body()
    request, more = await exchange.state.compute(len(body), lambda: _decoded(body))
    _, job = await _prepare(exchange, request, more, ItemIds())
    await exchange.reply(out.InputTokens(input_tokens=len(job.prompts[0])))


def _decoded(body: bytes) -> tuple[ResponsesRequest, dict[str, Any]]:
    """The request, and what it has of chat's fields besides."""
    request = decode_responses(body)
    return request, extensions(body, ResponsesRequest, ("messages", "timings_per_token"))


async def _prepare(
    exchange: Exchange, request: ResponsesRequest, more: Mapping[str, Any], ids: ItemIds
) -> tuple[list[Item], Job]:
    """The items of this turn, and what they ask of the worker. Raises RequestError, StoreError."""
    state = exchange.state
    _check_store(state, request)
    history = await _history(state, request.previous_response_id, exchange.tenant.name)
    given = await resolved(state.store, input_items(request), exchange.tenant.name)
    limit = state.max_context_tokens

    def work() -> tuple[list[Item], Job]:
        items = [_with_id(item, ids) for item in given]
        return items, _fitting_job(state.model, request, more, [*history, *items], limit)

    # How long a body is says little here: the history may be long.
    is_short = not history and isinstance(request.input, str)
    return await state.compute(len(request.input) if is_short else OFF_LOOP_BYTES, work)


def _check_store(state: FrontState, request: ResponsesRequest) -> None:
    if state.store.is_on:
        return
    for param, asked in (("store", request.store), ("previous_response_id", request.previous_response_id)):
        if asked:
            message = f"{param}: this server stores no responses (--response-store-mib is 0)"
            raise RequestError(message, param=param, code="unsupported_parameter")


async def _history(state: FrontState, previous: str | None, owner: str) -> list[Item]:
    """All items before this turn. Raises RequestError, StoreError."""
    if not previous:
        return []
    turns = await state.store.conversation(previous, owner=owner)
    if turns is None:
        raise RequestError(
            f"the previous response {previous[:80]!r}, or one before it, is not stored here",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [item for turn in turns for item in (*stored_items(turn.input), *output_items(turn.response))]


def _fitting_job(
    model: ServedModel, request: ResponsesRequest, more: Mapping[str, Any], items: Sequence[Item], limit: int
) -> Job:
    """The job; with `truncation` auto, of as much of the conversation's end as fits.

    Raises RequestError, ContextOverflowError.
    """

    def job(cut: int) -> Job:
        rules = [item for item in items[:cut] if item.get("role") in ("system", "developer")]
        return turn_job(model, {**more, **chat_fields(request, [*rules, *items[cut:]])}, _PARAM)

    if request.truncation != "auto":
        return job(0)

    def fits(cut: int) -> bool:
        try:
            return len(job(cut).prompts[0]) < limit
        except ContextOverflowError:
            return False

    cuts = [0, *(index for index, item in enumerate(items) if index and item.get("role") == "user")]
    least = 0 if fits(0) else bisect.bisect_left(cuts, True, key=fits)
    return job(cuts[min(least, len(cuts) - 1)])


def _with_id(item: Item, ids: ItemIds) -> Item:
    if isinstance(item.get("id"), str):
        return item
    prefixes = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
    return {**item, "id": ids.new(prefixes.get(str(item.get("type")), "item_"))}


def _now() -> int:
    return int(datetime.now(UTC).timestamp())


class _Answer:
    """One response from its first state to its last. Owned by the task that answers."""

    def __init__(
        self,
        exchange: Exchange,
        request: ResponsesRequest,
        items: list[Item],
        job: Job,
        choices: Choices,
        ids: ItemIds,
    ) -> None:
        state = exchange.state
        self.builder = ItemBuilder(
            ids, summarises=request.summarises, keeps_opaque=request.wants_opaque_reasoning
        )
        self._store = state.store
        self._owner = exchange.tenant.name
        self._items = items
        self._choices = choices
        reasoning = request.reasoning or Reasoning()
        text = request.text or TextConfig()
        self.response = out.Response(
            id=ids.response,
            created_at=_now(),
            status="in_progress",
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=request.model or state.model.names[0],
            output=[],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            prompt_cache_key=request.prompt_cache_key,
            reasoning=reasoning,
            safety_identifier=request.safety_identifier,
            store=request.store is not False and state.store.is_on,
            temperature=job.plan.sampling.temperature,
            text=text
            if text.format is not None
            else msgspec.structs.replace(text, format=TextFormat(type="text")),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=job.plan.sampling.top_p,
            truncation=request.truncation or "disabled",
            user=request.user,
            metadata=request.metadata or {},
        )

    def opening(self) -> list[out.StreamEvent]:
        """The first two events."""
        return [
            out.Created(sequence_number=self.builder.number(), response=self.response),
            out.InProgress(sequence_number=self.builder.number(), response=self.response),
        ]

    def ended(self, finish: str) -> list[out.StreamEvent]:
        """The last items' events; the response is in its last state."""
        is_complete = finish != "length"
        events = self.builder.end(is_complete=is_complete)
        counts = self._choices.usage
        details = counts.completion_tokens_details
        self.response = msgspec.structs.replace(
            self.response,
            completed_at=_now() if is_complete else None,
            status="completed" if is_complete else "incomplete",
            incomplete_details=None if is_complete else out.IncompleteDetails("max_output_tokens"),
            output=self.builder.items,
            usage=out.ResponseUsage(
                input_tokens=counts.prompt_tokens,
                input_tokens_details=out.InputDetails(counts.prompt_tokens_details.cached_tokens),
                output_tokens=counts.completion_tokens,
                output_tokens_details=out.OutputDetails(
                    details.reasoning_tokens if details is not msgspec.UNSET else 0
                ),
                total_tokens=counts.total_tokens,
            ),
        )
        return events

    async def stored(self) -> out.Response:
        """The response, after it was stored where it shall be."""
        if self.response.store:
            response, items = self.response, self._items
            try:
                stored = Stored(_encode(response), _encode(items), response.previous_response_id)
                await self._store.put(response.id, stored, owner=self._owner)
            except StoreError as error:  # the answer is there all the same, and says that it is not kept
                _log.warning("a response could not be stored: %s", error)
                self.response = msgspec.structs.replace(response, store=False)
        return self.response

    async def last(self) -> bytes:
        """The last event."""
        response = await self.stored()
        kind = out.Completed if response.status == "completed" else out.Incomplete
        return named_event(kind(sequence_number=self.builder.number(), response=response))

    def failed(self, told: Failure) -> bytes:
        """The last event of a stream that failed."""
        detail = told.body.error
        error = out.ResponseError(detail.code or detail.type, detail.message)
        response = msgspec.structs.replace(self.response, status="failed", error=error, store=False)
        return named_event(out.Failed(sequence_number=self.builder.number(), response=response))


class _ResponseEvents:
    """The frames of one response."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer

    def opening(self) -> bytes:
        """The response as it begins."""
        return _frames(self._answer.opening())

    def piece(self, piece: Piece) -> bytes:
        """Items and what they are made of."""
        return _frames(self._answer.builder.take(piece.output, piece.tokens))

    def ending(self, choice: Choice, finish: str) -> bytes:
        """The end of the last item."""
        return _frames(self._answer.ended(finish))


def _frames(events: Sequence[out.StreamEvent]) -> bytes:
    return b"".join(map(named_event, events))


def _owner(request: Request) -> str:
    tenant: Tenant = request.scope.get("ds4.tenant", ANYBODY)
    return tenant.name


class StoredResponses:
    """The routes of what was stored. What is another tenant's is not there."""

    def __init__(self, state: FrontState) -> None:
        self._state = state

    async def _found(self, request: Request) -> Stored:
        response_id = str(request.path_params["id"])
        store = self._state.store
        found = await store.get(response_id, owner=_owner(request)) if store.is_on else None
        if found is None:
            raise _not_found(response_id)
        return found

    async def by_method(self, request: Request) -> HttpResponse:
        """GET or DELETE: one route, so that others are told both."""
        return await (self._delete(request) if request.method == "DELETE" else self._retrieve(request))

    async def _retrieve(self, request: Request) -> HttpResponse:
        found = await self._found(request)
        if request.query_params.get("stream") == "true":
            raise RequestError(
                "stream: a stored response is whole; only one in the background could be streamed again",
                param="stream",
                code="unsupported_parameter",
            )
        return HttpResponse(found.response, media_type="application/json")

    async def _delete(self, request: Request) -> HttpResponse:
        response_id = str(request.path_params["id"])
        store = self._state.store
        if not (store.is_on and await store.delete(response_id, owner=_owner(request))):
            raise _not_found(response_id)
        return document(out.Deleted(id=response_id))

    async def cancel(self, request: Request) -> HttpResponse:
        """Nothing runs in the background, so nothing can be cancelled. Raises RequestError."""
        await self._found(request)
        raise RequestError(
            "the response is complete: only one that runs in the background can be cancelled, and this "
            "server answers in the foreground; closing the connection cancels",
            param="id",
            code="invalid_value",
        )

    async def input_items(self, request: Request) -> HttpResponse:
        """A page of the items that a response was asked with. Raises NotFoundError."""
        items = stored_items((await self._found(request)).input)
        query = request.query_params
        if query.get("order", "desc") == "desc":
            items.reverse()
        elif query["order"] != "asc":
            raise _bad_query("order", "must be asc or desc")
        limit = query.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= _MAX_PAGE):
            raise _bad_query("limit", f"must be between 1 and {_MAX_PAGE}")
        start = 0
        if (after := query.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise _bad_query("after", "is none of these items")
            start = ids.index(after) + 1
        page = items[start : start + int(limit)]
        return document(
            out.InputItemList(
                data=page,
                first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None,
                has_more=start + len(page) < len(items),
            )
        )


def _bad_query(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")


def _not_found(response_id: str) -> NotFoundError:
    message = f"the response {response_id[:80]!r} is not stored here"
    return NotFoundError(message, param="id", code="response_not_found")
