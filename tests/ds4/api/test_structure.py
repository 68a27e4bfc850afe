"""Structured output through the routes: what the worker is asked for, and what clients are told."""

from pathlib import Path
from typing import Any

import pytest

from ds4.errors import ErrorCode
from ds4.generation import FinishReason, GenerationEnd, GenerationRequest
from ds4.text.grammar import JSON_OBJECT, grammar_of
from tests.support import schemas
from tests.support.front_rig import Front, run, running_front

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]
MESSAGES = [{"role": "user", "content": "hello"}]
CALL = '{"name": "look", "arguments": {"at": "x"}}'


def asked(front: Front) -> GenerationRequest:
    """The latest request that reached the worker."""
    assert front.worker is not None
    return front.worker.requests[-1].request


def with_front(tmp_path: Path, scenario: Any, script: Any = "hello") -> None:
    async def inside() -> None:
        async with running_front(tmp_path, script) as front:
            await scenario(front)

    run(inside)


def test_a_schema_reaches_the_worker_as_a_grammar_on_every_route(tmp_path: Path) -> None:
    schema = schemas.PERSON

    async def scenario(front: Front) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for path, body in (
            ("/v1/chat/completions", {"messages": MESSAGES, "response_format": wanted}),
            ("/v1/completions", {"prompt": "hello", "response_format": wanted}),
            ("/v1/completions", {"prompt": ["hello", "he"], "guided_json": schema, "n": 2}),
            (
                "/v1/responses",
                {
                    "input": "hello",
                    "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
                },
            ),
        ):
            answer = await front.client.post(path, json={"model": "m", **body})
            assert answer.status_code == 200, answer.text
            assert asked(front).grammar == schemas.grammar(schema)
            assert set(front.state.model.vocabulary.end_ids) <= set(asked(front).stop_token_ids)

    with_front(tmp_path, scenario)


def test_requests_without_structure_carry_no_grammar(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert (await front.chat(max_tokens=60, response_format={"type": "text"})).status_code == 200
        assert asked(front).grammar == ""

    with_front(tmp_path, scenario)


def test_ignore_eos_holds_the_end_back_as_long_as_the_grammar_lets_it(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert (await front.chat(max_tokens=60, guided_regex="a+", ignore_eos=True)).status_code == 200
        assert set(front.state.model.vocabulary.end_ids) <= set(asked(front).stop_token_ids)
        assert asked(front).min_tokens == asked(front).max_tokens == 60

    with_front(tmp_path, scenario)


def test_a_stream_is_as_the_whole_answer(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        events = await front.events(max_tokens=60, response_format={"type": "json_object"})
        assert asked(front).grammar == grammar_of(JSON_OBJECT)
        chunks = [each for each in events if each != "[DONE]"]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == '{"a": 1}'
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    with_front(tmp_path, scenario, '{"a": 1}')


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json", "unsupported_parameter"),
        ({"guided_regex": "(a"}, "guided_regex", "invalid_grammar"),
        ({"grammar": "root ::= nothing"}, "grammar", "invalid_grammar"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "grammar_too_large"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "unsupported_parameter"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "invalid_value",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "unsupported_parameter",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_and_never_free_text(
    tmp_path: Path, fields: dict[str, Any], param: str, code: str
) -> None:
    async def scenario(front: Front) -> None:
        answer = await front.chat(max_tokens=60, **fields)
        assert answer.status_code == 400
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
        assert front.worker is not None
        assert not front.worker.requests

    with_front(tmp_path, scenario)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_is_a_grammar_and_its_answer_a_call(tmp_path: Path, choice: Any) -> None:
    async def scenario(front: Front) -> None:
        answer = await front.chat(max_tokens=60, tools=TOOLS, tool_choice=choice)
        assert "arguments_0: %json" in asked(front).grammar
        assert ("call){0,15}" in asked(front).grammar) is (
            choice == "required"
        )  # a named tool is called once
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": '{"at": "x"}'}
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"

    with_front(tmp_path, scenario, CALL)


def test_a_forced_call_can_end_even_if_the_end_is_to_be_ignored(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        await front.chat(max_tokens=60, tools=TOOLS, tool_choice="required", ignore_eos=True)
        assert set(front.state.model.vocabulary.end_ids) <= set(asked(front).stop_token_ids)

    with_front(tmp_path, scenario, CALL)


def test_a_call_may_stand_in_the_place_of_a_structured_answer(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await front.chat(max_tokens=60, tools=TOOLS, guided_json={"const": 1})
        assert answer.json()["choices"][0]["message"]["tool_calls"]
        assert "answer: text | calls" in asked(front).grammar

    with_front(tmp_path, scenario, CALL)


def test_a_grammar_that_fails_in_the_worker_is_an_error_and_no_answer(tmp_path: Path) -> None:
    end = GenerationEnd(FinishReason.ERROR, int(ErrorCode.GRAMMAR), "the grammar cannot go on")

    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.failure = end
        answer = await front.chat(max_tokens=60, guided_regex="a+")
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "grammar_failed"

    with_front(tmp_path, scenario)
