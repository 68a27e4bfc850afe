"""`GET /openapi.json`: what every route takes and answers, made from the wire structs themselves.

Owns: the table of routes for readers and fuzzers. Runs in: front ends; made with the first request for
it. Source: OpenAPI 3.1. A test compares the table with the routes that are served.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ds4 import __version__
from ds4.api.documents import document
from ds4.api.models import ModelCard, ModelList
from ds4.protocol import anthropic_messages as anthropic
from ds4.protocol import llama_completion as native
from ds4.protocol import openai_chat as chat
from ds4.protocol import openai_completions as completions
from ds4.protocol import openai_responses as responses
from ds4.protocol import openai_responses_output as responses_output
from ds4.protocol import server_status, tokens
from ds4.protocol.common import ErrorBody

_PARAMETER: Final = re.compile(r"\{(\w+)(?::path)?\}")
_TEXTS: Final = {
    400: "The request cannot be served as it is.",
    401: "No valid key.",
    404: "Not there.",
    413: "The body is too large.",
    429: "The server is at capacity; Retry-After says when to come back.",
    500: "The model failed on this request.",
    503: "No worker can take a request now.",
    529: "No worker can take a request now.",
}
_GENERATES: Final = (400, 401, 413, 429, 500, 503)
_COMPUTES: Final = (400, 401, 413, 503)
_ANTHROPIC: Final = (400, 401, 413, 429, 500, 529)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. `events` is the form of a stream's events, `text` that of plain text."""

    path: str
    method: str
    summary: str
    body: Any = None
    answer: Any = None
    events: Any = None
    text: str = ""
    errors: tuple[int, ...] = (401,)
    error: Any = ErrorBody
    query: tuple[tuple[str, Any], ...] = ()
    is_open: bool = False


def _generating(path: str, summary: str, body: Any, answer: Any, events: Any) -> Operation:
    return Operation(
        path=path,
        method="post",
        summary=summary,
        body=body,
        answer=answer,
        events=events,
        errors=_GENERATES,
    )


def _reading(path: str, summary: str, answer: Any, *errors: int, **more: Any) -> Operation:
    return Operation(path=path, method="get", summary=summary, answer=answer, errors=(401, *errors), **more)


def _computing(path: str, summary: str, body: Any, answer: Any) -> Operation:
    return Operation(path=path, method="post", summary=summary, body=body, answer=answer, errors=_COMPUTES)


_PAGE: Final[tuple[tuple[str, Any], ...]] = (
    ("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    ("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    ("after", {"type": "string"}),
)
_CHAT: Final = ("A chat completion", chat.ChatRequest, chat.ChatCompletion, chat.ChatChunk)
_COMPLETION: Final = (
    "A text completion",
    completions.CompletionRequest,
    completions.Completion,
    completions.Completion,
)
# With `response_fields` there is no more of them than what was asked for.
_NATIVE_ANSWER: Final = dict[str, Any] | list[dict[str, Any]]
_RESPONSE: Final = (
    "A response",
    responses.ResponsesRequest,
    responses_output.Response,
    responses_output.StreamEvent,
)
_CHAT_COUNT: Final = ("How many tokens a chat's prompt has", chat.ChatRequest, tokens.TokenCount)
_RESPONSE_COUNT: Final = (
    "How many tokens a response's prompt has",
    responses.ResponsesRequest,
    responses_output.InputTokens,
)
_ENDING: Final = (chat.ChatChunk, completions.Completion)  # events of streams that end with [DONE]
_STORED: Final = "/v1/responses/{id}"

OPERATIONS: Final[Sequence[Operation]] = (
    _generating("/v1/chat/completions", *_CHAT),
    _generating("/chat/completions", *_CHAT),
    _generating("/v1/completions", *_COMPLETION),
    _generating("/completions", *_COMPLETION),
    _generating("/v1/responses", *_RESPONSE),
    _generating("/responses", *_RESPONSE),
    _computing("/v1/chat/completions/input_tokens", *_CHAT_COUNT),
    _computing("/chat/completions/input_tokens", *_CHAT_COUNT),
    _computing("/v1/responses/input_tokens", *_RESPONSE_COUNT),
    _computing("/responses/input_tokens", *_RESPONSE_COUNT),
    _reading(_STORED, "A stored response", responses_output.Response, 400, 404, 503),
    Operation(
        path=_STORED,
        method="delete",
        summary="Forget a stored response",
        answer=responses_output.Deleted,
        errors=(401, 404, 503),
    ),
    _reading(
        _STORED + "/input_items",
        "What a stored response was asked with",
        responses_output.InputItemList,
        400,
        404,
        503,
        query=_PAGE,
    ),
    Operation(
        path=_STORED + "/cancel",
        method="post",
        summary="Refused: nothing runs in the background",
        errors=(400, 401, 404, 503),
    ),
    Operation(
        path="/v1/messages",
        method="post",
        summary="A message",
        body=anthropic.MessagesRequest,
        answer=anthropic.Message,
        events=anthropic.StreamEvent,
        errors=_ANTHROPIC,
        error=anthropic.ErrorBody,
    ),
    Operation(
        path="/v1/messages/count_tokens",
        method="post",
        summary="How many tokens a message's prompt has",
        body=anthropic.CountRequest,
        answer=tokens.TokenCount,
        errors=_ANTHROPIC,
        error=anthropic.ErrorBody,
    ),
    _generating(
        "/completion",
        "A completion in llama-server's dialect",
        native.NativeRequest,
        _NATIVE_ANSWER,
        dict[str, Any],
    ),
    _generating(
        "/infill",
        "What belongs between two texts, in llama-server's dialect",
        native.InfillRequest,
        _NATIVE_ANSWER,
        dict[str, Any],
    ),
    _computing("/tokenize", "Text to ids", tokens.TokenizeRequest, tokens.TokenizeAnswer),
    _computing("/detokenize", "Ids to text", tokens.DetokenizeRequest, tokens.DetokenizeAnswer),
    _computing("/apply-template", "Messages to a prompt", chat.ChatRequest, tokens.TemplateAnswer),
    _reading("/tokenizer_info", "The special tokens and the template", tokens.TokenizerInfo),
    _reading("/v1/models", "Every name of the model", ModelList),
    _reading("/models", "Every name of the model", ModelList),
    _reading("/v1/models/{name}", "One name of the model", ModelCard, 404),
    _reading("/models/{name}", "One name of the model", ModelCard, 404),
    _reading("/health", "Whether a request would be served", server_status.Health, 503, is_open=True),
    _reading("/v1/health", "Whether a request would be served", server_status.Health, 503, is_open=True),
    _reading("/health/ready", "Whether a request would be served", server_status.Health, 503, is_open=True),
    _reading("/health/live", "Whether this process answers", server_status.Health, is_open=True),
    _reading("/metrics", "Counters in Prometheus' text format", None, text="text/plain"),
    _reading("/slots", "Every slot of the ring", server_status.Slots),
    _reading("/props", "The settings in force, and the model", server_status.Props),
    _reading("/version", "What runs here", server_status.Version),
    _reading("/openapi.json", "This document", dict[str, Any]),
)


class OpenApi:
    """The route."""

    def __init__(self) -> None:
        self._document: dict[str, Any] | None = None

    async def get(self, request: Request) -> Response:
        """The document."""
        if self._document is None:
            self._document = openapi()
        return document(self._document)


def openapi() -> dict[str, Any]:
    """The whole document."""
    kinds = [
        kind
        for operation in OPERATIONS
        for kind in (operation.body, operation.answer, operation.events, operation.error)
        if kind is not None
    ]
    unique = list({id(kind): kind for kind in kinds}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    components["TokenizeRequest"]["anyOf"] = [
        {"required": [name], "properties": {name: {"type": "string"}}} for name in ("content", "prompt")
    ]
    by_kind = {id(kind): schema for kind, schema in zip(unique, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ds4-server", "version": __version__},
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, schemas: dict[int, Any]) -> dict[str, Any]:
    words = re.sub(r"\W+", "_", operation.path).strip("_")
    out: dict[str, Any] = {"operationId": f"{operation.method}_{words}", "summary": operation.summary}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(operation.path)
    ] + [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query]
    if parameters:
        out["parameters"] = parameters
    if operation.body is not None:
        out["requestBody"] = {"required": True, "content": _json(schemas[id(operation.body)])}
    if operation.is_open:
        out["security"] = []
    answers: dict[str, Any] = {}
    if operation.answer is not None or operation.text:
        content = _json(schemas[id(operation.answer)]) if operation.answer is not None else {}
        if operation.text:
            content[operation.text] = {"schema": {"type": "string"}}
        if operation.events is not None:
            content["text/event-stream"] = {
                "schema": _event(schemas[id(operation.events)], ends=operation.events in _ENDING)
            }
        answers["200"] = {"description": "Done.", "content": content}
    for status in operation.errors:
        if not (operation.is_open and status == 401):
            content = _json(schemas[id(operation.error)])
            answers[str(status)] = {"description": _TEXTS[status], "content": content}
    out["responses"] = answers
    return out


def _event(schema: Any, *, ends: bool) -> dict[str, Any]:
    """An event as OpenAPI describes one; `ends`: the last is the text [DONE]."""
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    data = {"anyOf": [chunk, {"const": "[DONE]"}]} if ends else chunk
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
