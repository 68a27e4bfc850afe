"""ds4/text/reasoning.py: reasoning apart from the answer, whoever opened it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.text.reasoning import find_think_tags
from tests.ds4.text.outputs import Flat, call, cuts, format_of, moderately, parse, parse_every_way

THINK = format_of("<think> <tool_call>")
OPENED = "<|im_start|>assistant\n<think>\n"


def split(reasoning: str, text: str) -> Flat:
    rows: Flat = [("reasoning", reasoning), ("text", text)]
    return [row for row in rows if row[1]]


@pytest.mark.parametrize(
    ("rendered", "output"),
    [
        ("", "<think>\nwhy\nnot\n</think>\n\nSo."),
        ("", "\n<think>why\nnot</think>So."),
        (OPENED, "why\nnot\n</think>\n\nSo."),
        (OPENED, "\nwhy\nnot \n </think>\nSo."),
    ],
)
@pytest.mark.parametrize("has_tools", [False, True])
def test_reasoning_comes_before_the_answer(rendered: str, output: str, has_tools: bool) -> None:
    tools = [{"name": "ping"}] if has_tools else None
    assert parse_every_way(THINK, output, rendered=rendered, tools=tools) == split("why\nnot", "So.")


@pytest.mark.parametrize(
    ("rendered", "output", "expected"),
    [
        ("", "So.", split("", "So.")),
        ("", "The tag <think> opens, </think> closes.", split("", "The tag <think> opens, </think> closes.")),
        ("", "<thin", split("", "<thin")),
        ("", "", []),
        (OPENED, "never ends </thin", split("never ends </thin", "")),
        (OPENED, "</think>\n\nSo.", split("", "So.")),
        ("<think>\n\n</think>\n\n", "So.", split("", "So.")),
        ("<think>\n\n</think>\n\n", "</think>\n\nSo.", split("", "So.")),
        ("", "<think></think>", []),
        (OPENED, "a</think>b</think>c", split("a", "b</think>c")),
    ],
)
def test_tags_count_only_where_they_make_sense(rendered: str, output: str, expected: Flat) -> None:
    assert parse_every_way(THINK, output, rendered=rendered, tools=None) == expected


def test_white_space_of_an_answer_without_reasoning_is_kept() -> None:
    assert parse_every_way(THINK, " \n x \n", tools=None) == [("text", " \n x \n")]


def test_the_parser_knows_when_it_is_inside() -> None:
    parser = THINK.parser(rendered=OPENED)
    assert parser is not None
    states = [parser.is_reasoning]
    for piece in ("hm", "</thi", "nk>", "So"):
        parser.push(piece)
        states.append(parser.is_reasoning)
    assert states == [True, True, True, False, False]


def test_calls_follow_reasoning() -> None:
    output = 'hm\n</think>\n\n<tool_call>\n{"name": "ping"}\n</tool_call>'
    assert parse_every_way(THINK, output, rendered=OPENED) == [("reasoning", "hm"), *call(0, "ping", "{}")]


def test_a_call_inside_reasoning_that_went_on_is_reasoning() -> None:
    output = 'hm <tool_call>{"name": "ping"}</tool_call> no.</think>So.'
    assert parse_every_way(THINK, output, rendered=OPENED) == split(output.split("</think>")[0], "So.")


def test_a_call_at_the_end_of_reasoning_that_never_ended_is_one() -> None:
    block = '<tool_call>{"name": "ping"}</tool_call>'
    output = f"or <tool_call>? {block}\n{block}\n"
    assert parse_every_way(THINK, output, rendered=OPENED) == [
        ("reasoning", output),
        *call(0, "ping", "{}"),
        *call(1, "ping", "{}"),
    ]
    only_one = parse_every_way(THINK, output, rendered=OPENED, is_parallel=False)
    assert only_one == [("reasoning", output), *call(0, "ping", "{}")]


@pytest.mark.parametrize(
    "output",
    [
        'or <tool_call>{"name": "ping"}</tool_call> or not',
        'or <tool_call>{"name": "ping", "arguments": {"a": ',
        'or <tool_call>{"name": "ping", "arguments": {"a": tru}}</tool_call>',
        "<tool_call>" * 40,
    ],
)
def test_a_call_that_was_only_thought_about_is_none(output: str) -> None:
    assert parse_every_way(THINK, output, rendered=OPENED) == [("reasoning", output)]


@moderately
@given(st.text(), st.text(), st.integers(0, 1 << 30))
def test_any_reasoning_and_any_answer_come_out(reasoning: str, answer: str, seed: int) -> None:
    reasoning = reasoning.replace("</think>", "").strip(" \t\r\n")
    answer = answer.lstrip("\r\n")
    output = f"<think>\n{reasoning}\n</think>\n\n{answer}"
    assert parse(THINK, cuts(output, seed), tools=None) == split(reasoning, answer)


def test_tags_are_found_in_the_template_or_else_in_the_vocabulary() -> None:
    assert find_think_tags("… </think> …", lambda text: False) is not None
    tags = find_think_tags("[THINK]", lambda text: False)
    assert tags is not None
    assert tags.close == "[/THINK]"
    assert find_think_tags("", lambda text: text in ("<think>", "</think>")) is not None
    assert find_think_tags("", lambda text: text == "<think>") is None


@pytest.mark.parametrize(
    ("rendered", "closed"),
    [
        ("<|assistant|><think>\n", "<|assistant|><think>\n\n</think>\n\n"),
        ("<|assistant|>", "<|assistant|><think>\n\n</think>\n\n"),
        ("<|assistant|></think>", "<|assistant|></think>"),
    ],
)
def test_a_prompt_can_be_closed_to_reasoning(rendered: str, closed: str) -> None:
    tags = find_think_tags("<think>", lambda text: False)
    assert tags is not None
    assert tags.without_reasoning(rendered) == closed
    assert not tags.is_open(closed)
