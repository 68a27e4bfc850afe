"""ds4/text/tools/gemma_calls.py: bare keys, texts between quote tokens."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ds4.text.outputs import call, cuts, format_of, moderately, parse, parse_every_way
from tests.ds4.text.tools.test_json_calls import JSON

GEMMA = format_of('<|tool_call>call: <tool_call|> <|"|> <|channel>thought')


def notation(value: Any) -> str:
    """A value as Gemma's template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{notation(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(notation, value)) + "]"
    return json.dumps(value)


def block(text: str) -> str:
    return f"<|tool_call>call:{text}<tool_call|>"


def keyed(value: Any) -> Any:
    """The value with keys that need no quotes."""
    if isinstance(value, dict):
        return {f"key_{index}": keyed(each) for index, each in enumerate(value.values())}
    return [keyed(each) for each in value] if isinstance(value, list) else value


@moderately
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), JSON, max_size=3), st.integers(0, 99))
def test_every_value_comes_back(arguments: dict[str, Any], seed: int) -> None:
    wanted = {key: keyed(value) for key, value in arguments.items()}
    begin, arrived, end = parse(GEMMA, cuts(block("ping" + notation(wanted)), seed))
    assert (begin, end) == (("begin", "0", "ping"), ("end", "0"))
    assert json.loads(arrived[-1]) == wanted


def test_calls_follow_each_other_and_reasoning_stands_before() -> None:
    output = (
        "<|channel>thought\nHm.\n<channel|>" + block('get_weather{city:<|"|>"B"\n<|"|>}') + block("ping{}")
    )
    assert parse_every_way(GEMMA, output) == [
        ("reasoning", "Hm."),
        *call(0, "get_weather", '{"city": "\\"B\\"\\n"}'),
        *call(1, "ping", "{}"),
    ]


@pytest.mark.parametrize("wrong", ["{a:}", "{a:tru}", '{<|"|>a<|"|>}', '{a:<|"|>x', "{:1}", "{a:[1"])
def test_wrong_notation_is_a_call_that_shows_it(wrong: str) -> None:
    events = parse_every_way(GEMMA, block("ping" + wrong))
    assert (events[0], events[-1]) == (("begin", "0", "ping"), ("end", "0"))
    with pytest.raises(ValueError, match=r"."):
        json.loads(events[1][-1])


@pytest.mark.parametrize("text", ["<|tool_call>call:ping", "<|tool_call>{}", "<|tool_call>x y{}"])
def test_what_is_no_call_is_text(text: str) -> None:
    assert parse_every_way(GEMMA, text) == [("text", text)]
