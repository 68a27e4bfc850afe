"""ds4/text/output.py: one stream of events, whatever the cuts; nothing that was written is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.text.tool_calls import CallBegin, tool_types
from tests.ds4.text.outputs import TOOLS, call, cuts, flat, format_of, moderately, parse, parse_every_way

HERMES = format_of("<tool_call> <think>")
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool_", "<think>", "</think>", "<", "{", "}", "[", "]", ",", ";"),
        *(
            '"',
            '"name"',
            '"arguments"',
            '"a"',
            ":",
            "ping",
            "\\",
            "\\u00",
            "12",
            "tru",
            "null",
            "\n",
            " ",
            "x",
        ),
        *('{"name": "ping", "arguments": {', '{"name": "ping", "arguments": {}}\n'),
    ]
)


def test_there_is_no_parser_where_there_can_be_nothing_but_text() -> None:
    assert format_of("").parser(rendered="", tools=None) is None
    assert format_of("<tool_call>").parser(rendered="", tools={}) is None


def test_text_without_tags_passes_unchanged() -> None:
    text = "\n 1 < 2 and <tool>, <tool_cal \n"
    assert parse_every_way(HERMES, text) == [("text", text)]


def test_text_is_held_back_only_while_it_may_become_a_tag() -> None:
    parser = HERMES.parser(rendered="", tools=tool_types(TOOLS))
    assert parser is not None
    pieces = ("Hello <tool", "s> and", " \n", "<tool_call", ">x")
    shown = [[text for _, text in flat(parser.push(piece))] for piece in pieces]
    assert shown == [["Hello"], [" <tools> and"], [], [], [" \n<tool_call>x"]]


def test_text_may_stand_before_between_and_after_calls() -> None:
    output = 'A \n<tool_call>{"name":"ping"}</tool_call> B <tool_call>{"name":"ping"}</tool_call>\nC'
    assert parse_every_way(HERMES, output) == [
        ("text", "A"),
        *call(0, "ping", "{}"),
        ("text", "B"),
        *call(1, "ping", "{}"),
        ("text", "C"),
    ]


@pytest.mark.parametrize(
    "output",
    [
        "a <tool_call>oops</tool_call> b",
        "a \n<tool_call>{}</tool_call>",
        'a <tool_call>{"name": 7}</tool_call>',
        'a <tool_call>{"name": "ping", "arguments"',
        'a <tool_call>{"name": "ping"; "arguments": {}}</tool_call>',
        "a <tool_call>",
        "a <tool_call>\n\n",
        "</tool_call> b",
    ],
)
def test_what_looks_like_a_call_and_is_none_is_text_to_the_last_character(output: str) -> None:
    assert parse_every_way(HERMES, output) == [("text", output)]


def test_a_call_is_found_after_one_that_was_none() -> None:
    output = '<tool_call>no <tool_call>{"name":"ping"}</tool_call>'
    assert parse_every_way(HERMES, output) == [("text", "<tool_call>no"), *call(0, "ping", "{}")]


def test_a_call_that_begins_too_late_is_text() -> None:
    output = '<tool_call>{"x": "' + "y" * 70_000 + '", "name": "ping"}</tool_call>'
    assert parse(HERMES, [output]) == parse(HERMES, cuts(output, 3)) == [("text", output)]


def test_what_is_held_back_has_a_bound() -> None:
    parser = HERMES.parser(rendered="", tools=tool_types(TOOLS))
    assert parser is not None
    parser.push('<tool_call>{"x": "')
    num_held = 0
    while not parser.push("y" * 1000):
        num_held += 1000
        assert num_held < 100_000


def test_only_the_first_call_counts_where_parallel_ones_are_not_wanted() -> None:
    output = 'A<tool_call>{"name":"ping"}</tool_call> B <tool_call>{"name":"ping"}</tool_call> C'
    assert parse_every_way(HERMES, output, is_parallel=False) == [("text", "A"), *call(0, "ping", "{}")]
    parser = HERMES.parser(rendered="", tools=tool_types(TOOLS), is_parallel=False)
    assert parser is not None
    done = []
    for piece in ('A<tool_call>{"name":"ping"', "}"):
        parser.push(piece)
        done.append((parser.is_done, parser.has_calls))
    assert done == [(False, False), (True, True)]


def test_ids_are_different() -> None:
    parser = HERMES.parser(rendered="", tools=tool_types(TOOLS))
    assert parser is not None
    events = parser.push('<tool_call>{"name":"ping"}\n{"name":"ping"}</tool_call>')
    ids = {event.id for event in events if isinstance(event, CallBegin)}
    assert len(ids) == 2
    assert all(len(each) > 20 and each.startswith("call_") for each in ids)


def test_finishing_twice_changes_nothing() -> None:
    parser = HERMES.parser(rendered="", tools=tool_types(TOOLS))
    assert parser is not None
    parser.push("x <tool")
    assert flat(parser.finish()) == [("text", " <tool")]
    assert parser.finish() == []
    assert parser.push("more") == []


@moderately
@given(st.lists(PIECES, max_size=40), st.booleans(), st.integers(0, 1 << 30))
def test_events_do_not_depend_on_how_the_output_is_cut(pieces: list[str], is_open: bool, seed: int) -> None:
    rendered = "<think>\n" if is_open else ""
    text = "".join(pieces)
    whole = parse(HERMES, [text], rendered=rendered)
    assert parse(HERMES, pieces, rendered=rendered) == whole
    assert parse(HERMES, cuts(text, seed), rendered=rendered) == whole
    assert parse(HERMES, list(text), rendered=rendered) == whole


@moderately
@given(st.lists(PIECES, max_size=40))
def test_every_letter_of_an_output_without_calls_comes_out(pieces: list[str]) -> None:
    text = "".join(pieces).lstrip("\n")
    events = parse(format_of("<tool_call>"), [text])
    if not any(event[0] == "begin" for event in events):
        assert "".join(event[1] for event in events) == text


@pytest.mark.parametrize("template", ["<tool_call>", "[TOOL_CALLS]", "ipython", "{{ messages }}"])
def test_a_call_that_the_limit_cuts_off_is_a_call_so_far_or_nothing(template: str) -> None:
    output_format = format_of(template)
    assert output_format.tools is not None
    head = (*output_format.tools.openers, "")[0]
    for length in range(1, 40):
        said = head + '{"name": "ping", "arguments": {"city": "Bonn"}}'[:length]
        parser = output_format.parser(rendered="", tools=tool_types(TOOLS), is_forced=True)
        assert parser is not None
        parser.feed(said)
        parser.end(is_cut=True)
        events = flat(parser.drain())
        begun = said.find("arguments") + len('arguments": ')
        if "arguments" in said and len(said) > begun:
            assert events == call(0, "ping", said[begun:])
        else:
            assert events == []


def test_what_may_be_an_answer_stays_one_when_it_is_cut_off() -> None:
    parser = format_of("{{ messages }}").parser(rendered="", tools=tool_types(TOOLS))
    assert parser is not None
    parser.feed('{"name": "Bo')
    parser.end(is_cut=True)
    assert flat(parser.drain()) == [("text", '{"name": "Bo')]
