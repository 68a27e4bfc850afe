"""ds4/text/tools/python_calls.py: calls that look like Python."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ds4.text.outputs import call, cuts, format_of, moderately, parse, parse_every_way
from tests.ds4.text.tools.test_json_calls import JSON

LFM = format_of("<|tool_call_start|>")


def block(text: str) -> str:
    return f"<|tool_call_start|>{text}<|tool_call_end|>"


@moderately
@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}_", fullmatch=True), JSON, max_size=3), st.integers(0, 99))
def test_literals_become_json(arguments: dict[str, object], seed: int) -> None:
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    begin, *rest, end = parse(LFM, cuts(block(f"[ping({text})]"), seed))
    assert (begin, end) == (("begin", "0", "ping"), ("end", "0"))
    assert json.loads(rest[0][-1]) == arguments


def test_several_calls_may_stand_in_one_block() -> None:
    output = "So: " + block('[ping(a=true, b={"x": null}), get_weather(city="Bonn")]') + "\nDone."
    assert parse_every_way(LFM, output) == [
        ("text", "So:"),
        *call(0, "ping", '{"a":true,"b":{"x":null}}'),
        *call(1, "get_weather", '{"city":"Bonn"}'),
        ("text", "Done."),
    ]


def test_a_line_break_inside_of_a_string_is_meant() -> None:
    assert parse_every_way(LFM, block('[ping(a="x\ny")]')) == call(0, "ping", '{"a":"x\\ny"}')


@pytest.mark.parametrize(
    "text",
    ["", "[]", "nothing", "[ping]", "[ping(1)]", "[ping(a=b)]", "[ping(**{})]", "[ping(a=1+2j", "(" * 3000],
)
def test_anything_else_is_text(text: str) -> None:
    assert parse_every_way(LFM, block(text)) == [("text", block(text))]


def test_nothing_is_run() -> None:
    output = block('[ping(a=__import__("os").getcwd())]')
    assert parse_every_way(LFM, output) == [("text", output)]


def test_a_block_that_never_ends_is_text() -> None:
    output = "<|tool_call_start|>[ping(a=1)]"
    assert parse_every_way(LFM, output) == [("text", output)]
