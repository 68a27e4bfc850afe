"""Bodies that are small or legal and mean a lot of work: each is answered, none is a server error."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.front_rig import Front, with_front

_MESSAGES: Final = [{"role": "user", "content": "hello"}]
_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize")


def _body(**fields: Any) -> str:
    return json.dumps({"messages": _MESSAGES, "max_tokens": 1, **fields})


def _raw(field: str) -> str:
    """A body with a value that no encoder writes."""
    return _body(x="@").replace('"@"', field)


def _nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


def _format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


BOMBS: Final[dict[str, Callable[[], str]]] = {
    "nested lists": lambda: "[" * 200_000,
    "nested objects": lambda: '{"a":' * 100_000,
    "nested and closed": lambda: _raw("[" * 50_000 + "]" * 50_000),
    "nested content": lambda: _body(messages=[{"role": "user", "content": "@"}]).replace(
        '"@"', "[" * 5000 + "]" * 5000
    ),
    "a number of a million digits": lambda: _raw("9" * 1_000_000),
    "a huge exponent": lambda: _raw("1e999999999"),
    "max_tokens of a million digits": lambda: _body(max_tokens="@").replace('"@"', "9" * 1_000_000),
    "a hundred thousand keys": lambda: _raw("{" + ",".join(f'"k{i}":{i}' for i in range(100_000)) + "}"),
    "the same key ten thousand times": lambda: "{" + ",".join(['"messages":[]'] * 10_000) + "}",
    "ten thousand messages": lambda: _body(messages=_MESSAGES * 10_000),
    "ten thousand empty parts": lambda: _body(
        messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 10_000}]
    ),
    "ten thousand stop strings": lambda: _body(stop=["x" * 100] * 10_000),
    "one long stop string": lambda: _body(stop=["ab" * 500_000]),
    "a hundred thousand biases": lambda: _body(logit_bias={str(number): 1 for number in range(100_000)}),
    "ten thousand tools": lambda: _body(
        tools=[{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(10_000)]
    ),
    "a schema of a million leaves": lambda: _body(
        response_format=_format({"$ref": "#/$defs/a19", "$defs": _doubling(19)})
    ),
    "a schema of ten thousand leaves": lambda: _body(response_format=_format(_nested_schema(12))),
    "a schema that is only itself": lambda: _body(response_format=_format({"$ref": "#"})),
    "a pattern that explodes": lambda: _body(
        response_format=_format({"type": "string", "pattern": "^(((a{1,99}){1,99}){1,99}){1,99}$"})
    ),
    "counts without end": lambda: _body(
        response_format=_format({"type": "array", "minItems": 10**9, "items": {"type": "integer"}})
    ),
    "a million escapes": lambda: _body(messages=[{"role": "user", "content": "@"}]).replace(
        "@", "\\ud83d\\ude00" * 80_000
    ),
    "lone surrogates": lambda: _body(messages=[{"role": "user", "content": "@"}]).replace("@", "\\ud83d"),
}


def _doubling(depth: int) -> dict[str, Any]:
    """Definitions each of which is the one before it twice."""
    found: dict[str, Any] = {"a0": {"type": "integer"}}
    for level in range(1, depth + 1):
        ref = {"$ref": f"#/$defs/a{level - 1}"}
        found[f"a{level}"] = {"type": "object", "properties": {"x": ref, "y": ref}, "required": ["x", "y"]}
    return found


def test_bodies_that_mean_much_work_are_answered_and_nothing_breaks(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        statuses: dict[str, int] = {}
        for name, make in BOMBS.items():
            raw = make().encode()
            paths = _PATHS if name.startswith("nested") else _PATHS[:1]
            answers = await asyncio.gather(
                *(
                    front.client.post(path, content=raw, headers={"content-type": "application/json"})
                    for path in paths
                )
            )
            for answer in answers:
                assert answer.status_code < 500, (name, answer.text[:300])
                assert answer.status_code == 200 or "error" in answer.json(), name
            statuses[name] = answers[0].status_code
        assert statuses["nested lists"] == 400
        assert statuses["max_tokens of a million digits"] == 400
        assert (await front.chat(max_tokens=1)).status_code == 200, "the server still serves"

    with_front(tmp_path, scenario, max_body_bytes=32 << 20)


@pytest.mark.parametrize("path", ["/health/live", "/v1/models"])
def test_a_flood_of_small_requests_on_one_connection_is_answered_in_order(tmp_path: Path, path: str) -> None:
    async def scenario(front: Front) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() * 500)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        said = await reader.read()
        writer.close()
        assert said.count(b"HTTP/1.1 200 ") == 501

    with_front(tmp_path, scenario, None)
