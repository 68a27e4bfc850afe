"""ds4/text/harmony.py: messages with channels."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ds4.text.outputs import call, cuts, format_of, moderately, parse, parse_every_way
from tests.ds4.text.tools.test_json_calls import ARGUMENTS

HARMONY = format_of("<|channel|> <|message|>")
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|>"


@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
def test_channels_tell_reasoning_from_the_answer(end: str) -> None:
    output = f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>So.\n{end}"
    assert parse_every_way(HARMONY, output) == [("reasoning", "hm"), ("text", "So.\n")]


@pytest.mark.parametrize(
    "header",
    [
        "<|start|>assistant<|channel|>commentary to=functions.ping <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.ping<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.ping<|message|>",
        "<|channel|>commentary to=ping<|message|>",
    ],
)
@moderately
@given(ARGUMENTS, st.integers(0, 1 << 30))
def test_a_message_to_a_function_is_a_call(header: str, arguments: dict[str, object], seed: int) -> None:
    text = json.dumps(arguments)
    expected = [("reasoning", "hm"), *call(0, "ping", text)]
    assert parse(HARMONY, cuts(ANALYSIS + header + text, seed)) == expected
    assert parse(HARMONY, [ANALYSIS + header + text + "<|call|>"]) == expected


def test_several_calls_are_counted() -> None:
    one = "<|channel|>commentary to=functions.ping<|message|>"
    output = f"{one}{{}}<|call|><|start|>assistant{one}<|call|>"
    assert parse_every_way(HARMONY, output) == call(0, "ping", "{}") + call(1, "ping", "{}")


def test_the_prompt_may_end_inside_of_a_header() -> None:
    output = " to=functions.ping<|channel|>commentary json<|message|>{}"
    assert parse_every_way(HARMONY, output) == call(0, "ping", "{}")
    assert parse_every_way(HARMONY, " to or not to") == [("text", " to or not to")]


def test_a_message_to_something_unknown_is_text() -> None:
    output = "<|channel|>commentary to=assistant<|message|>x<|end|>"
    assert parse_every_way(HARMONY, output) == [("text", "x")]


def test_commentary_without_a_recipient_is_text() -> None:
    output = "<|channel|>commentary<|message|>I shall look.<|end|>"
    assert parse_every_way(HARMONY, output) == [("text", "I shall look.")]


def test_text_without_any_header_is_the_answer() -> None:
    assert parse_every_way(HARMONY, " So. < done") == [("text", " So. < done")]
    assert parse_every_way(HARMONY, "So." + ANALYSIS) == [("text", "So."), ("reasoning", "hm")]


def test_a_header_that_is_cut_off_shows_nothing() -> None:
    assert parse_every_way(HARMONY, ANALYSIS + "<|start|>assist") == [("reasoning", "hm")]


def test_without_tools_there_are_no_calls() -> None:
    output = "<|channel|>commentary to=functions.ping<|message|>{}<|call|>"
    assert parse_every_way(HARMONY, output, tools=None) == [("text", "{}")]
