"""ds4/api/openapi.py: the document names every route, and what the routes answer is what it says."""

import functools
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from starlette.routing import Route

from ds4.api.app import create_app
from ds4.api.openapi import openapi
from ds4.api.state import FrontState
from ds4.config import Settings
from tests.ds4.api.test_messages import parse_named
from tests.support.front_rig import Front, parse_events, with_front
from tests.support.tiny_model import write_tiny_model

_USER = {"role": "user", "content": "hello"}


@functools.cache
def _document() -> dict[str, Any]:
    return openapi()


def _validator(schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": _document()["components"]})


def test_every_route_is_in_the_document_and_nothing_else(tmp_path: Path) -> None:
    settings = Settings(shared_dir=str(tmp_path / "ring"))
    state = FrontState.build(settings, write_tiny_model(tmp_path / "tiny.gguf"))
    served = {
        (re.sub(r":path}", "}", route.path), method.lower())
        for route in create_app(settings, state=state).routes
        if isinstance(route, Route)
        for method in (route.methods or ())
        if method != "HEAD"
    }
    documented = {(path, method) for path, methods in _document()["paths"].items() for method in methods}
    assert documented == served


def test_every_schema_is_valid_and_every_reference_leads_somewhere() -> None:
    document = _document()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = set(re.findall(r"#/components/schemas/([^\"]+)", msgspec.json.encode(document).decode()))
    assert names <= set(document["components"]["schemas"])
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids)


def _check(response: httpx.Response, path: str, status: int = 200) -> None:
    """The answer is one that the document announces for this path."""
    assert response.status_code == status, response.text
    method = response.request.method.lower()
    content = _document()["paths"][path][method]["responses"][str(status)]["content"]
    kind = response.headers["content-type"].partition(";")[0]
    if kind == "text/event-stream":
        is_named = response.content.startswith(b"event: ")
        events = parse_named(response.content) if is_named else parse_events(response.content)
        data = content[kind]["schema"]["properties"]["data"]
        chunk, *end = data.get("anyOf", [data])
        assert end == ([{"const": events[-1]}] if events[-1] == "[DONE]" else [])
        for event in events:
            if event != "[DONE]":
                _validator(chunk["contentSchema"]).validate(event)
    elif kind == "application/json":
        _validator(content[kind]["schema"]).validate(response.json())
    else:
        assert kind in content


_POSTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [_USER], "logprobs": True, "top_logprobs": 2}),
    (
        "/v1/chat/completions",
        {"messages": [_USER], "stream": True, "stream_options": {"include_usage": True}},
    ),
    ("/v1/completions", {"prompt": "hello", "logprobs": 2}),
    ("/v1/completions", {"prompt": "hello", "stream": True}),
    ("/v1/responses", {"input": "hello", "include": ["message.output_text.logprobs"]}),
    ("/v1/responses", {"input": "hello", "stream": True}),
    ("/v1/messages", {"messages": [_USER], "max_tokens": 9}),
    ("/v1/messages", {"messages": [_USER], "max_tokens": 9, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": [_USER]}),
    ("/v1/chat/completions/input_tokens", {"messages": [_USER]}),
    ("/v1/responses/input_tokens", {"input": "hello"}),
    ("/tokenize", {"content": "hello", "with_pieces": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/apply-template", {"messages": [_USER]}),
]


def test_answers_are_what_the_document_says(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        get, post = front.client.get, front.client.post
        for path, body in _POSTS:
            _check(await post(path, json=body), path)
            _check(await post(path, content=b"{"), path, 400)
        for path in ("/v1/models", "/health", "/health/live", "/slots", "/props", "/version", "/metrics"):
            _check(await get(path), path)
        _check(await get(f"/v1/models/{front.state.model.names[0]}"), "/v1/models/{name}")
        _check(await get("/v1/models/none"), "/v1/models/{name}", 404)
        document = await get("/openapi.json")
        _check(document, "/openapi.json")
        assert document.json() == _document()
        one = "/v1/responses/{id}"
        at = one.format(id=(await post("/v1/responses", json={"input": "x"})).json()["id"])
        _check(await get(at), one)
        _check(await get(at + "/input_items"), one + "/input_items")
        _check(await post(at + "/cancel"), one + "/cancel", 400)
        _check(await front.client.delete(at), one)
        _check(await get(at), one, 404)

    with_front(tmp_path, scenario)


_CALL = '{"name": "look", "arguments": {"at": "x"}}'
_SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
_FLAT = {"type": "function", "name": "look", "parameters": _SCHEMA}
_CHAT_TOOL = {"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_what_the_document_says(tmp_path: Path, stream: bool) -> None:
    async def scenario(front: Front) -> None:
        messages = {"messages": [_USER], "max_tokens": 90, "stream": stream}
        for path, body in (
            ("/v1/chat/completions", {**messages, "tools": [_CHAT_TOOL]}),
            ("/v1/messages", {**messages, "tools": [{"name": "look", "input_schema": _SCHEMA}]}),
            ("/v1/responses", {"input": "hello", "stream": stream, "tools": [_FLAT]}),
        ):
            response = await front.client.post(path, json=body)
            assert b"look" in response.content
            _check(response, path)

    with_front(tmp_path, scenario, script=_CALL)


def test_refusals_are_what_the_document_says(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        for path, body in _POSTS:
            status = 200 if "token" in path or "template" in path else 529 if "messages" in path else 503
            _check(await front.client.post(path, json=body), path, status)
        _check(await front.client.get("/health"), "/health", 503)

    with_front(tmp_path, scenario, script=None)
