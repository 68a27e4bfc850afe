"""ds4/text/tools/json_calls.py: calls that are JSON objects with name and arguments."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.text.tool_calls import tool_types
from tests.ds4.text.outputs import Flat, call, cuts, format_of, moderately, parse, parse_every_way

HERMES = format_of("<tool_call>")
TEMPLATES = {
    "<tool_call>": ("<tool_call>\n", "\n</tool_call>"),
    "<TOOLCALL>": ("<TOOLCALL>[", "]</TOOLCALL>"),
    "<|tool_call|>": ("<|tool_call|>[", "]"),
    "<|START_ACTION|>": ("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    "[TOOL_CALLS]": ("[TOOL_CALLS][", "]"),
    "functools[": (" functools[", "]"),
    "<|python_tag|>": ("<|python_tag|>", ""),
    "<|python_tag|> or bare": ("", ""),
    "ipython": ("", ""),
    "a template without tools": ("", ""),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON, max_size=4)


@pytest.mark.parametrize("template", TEMPLATES)
@moderately
@given(ARGUMENTS, st.sampled_from([None, 2]), st.booleans(), st.integers(0, 1 << 30))
def test_arguments_come_out_as_they_were_written(
    template: str, arguments: dict[str, object], indent: int | None, ascii_only: bool, seed: int
) -> None:
    before, after = TEMPLATES[template]
    text = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    output = before + '{"name": "ping", "arguments": ' + text + "}" + after
    assert parse(format_of(template), cuts(output, seed)) == call(0, "ping", text)
    assert parse(format_of(template), [output]) == call(0, "ping", text)


@pytest.mark.parametrize(
    ("template", "output"),
    [
        ("<tool_call>", '<tool_call>{"name":"a"}</tool_call>\n<tool_call>{"name":"b"}</tool_call>'),
        ("<tool_call>", '<tool_call>\n{"name":"a"}\n{"name":"b"}\n</tool_call>'),
        ("<tool_call>", '<tool_call>[{"name":"a"}, {"name":"b"}]</tool_call>\n'),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name":"a","id":"x"}, {"name":"b"}]'),
        ("<|python_tag|>", '<|python_tag|>{"name":"a"}; {"name":"b","parameters":{}}'),
        ("<|START_ACTION|>", '<|START_ACTION|>[{"tool_call_id":"0","tool_name":"a"},{"tool_name":"b"}]'),
    ],
)
def test_several_calls_are_counted(template: str, output: str) -> None:
    assert parse_every_way(format_of(template), output) == call(0, "a", "{}") + call(1, "b", "{}")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "ping"}', "{}"),
        ('{"name": "ping", "arguments": null}', "{}"),
        ('{"arguments": {"a": [1]}, "name": "ping"}', '{"a": [1]}'),
        ('{"type": "function", "name": "ping", "parameters": {"a":1}}', '{"a":1}'),
        ('{"name": "ping", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', '{"a": "\u00e9"}'),
        ('{"name": "ping", "arguments": {"a": 1}, "id": "call_1"}', '{"a": 1}'),
        ('{"name": "ping", "arguments": {"a": 1}}}', '{"a": 1}'),
        ('{"name": "ping", "arguments": {"text": "line\n\tline"}}', '{"text": "line\\n\\tline"}'),
    ],
)
def test_forms_that_models_write_are_understood(body: str, arguments: str) -> None:
    output = f"<tool_call>{body}</tool_call>"
    assert parse_every_way(HERMES, output) == call(0, "ping", arguments)
    if not body.endswith("}}}"):
        assert parse_every_way(format_of(""), body) == call(0, "ping", arguments)


def test_wrong_arguments_reach_the_client_as_they_stand() -> None:
    output = '<tool_call>{"name": "ping", "arguments": {"a": tru, "b": 1}}\n</tool_call> and on'
    assert parse_every_way(HERMES, output) == [*call(0, "ping", '{"a": tru, "b": 1}}'), ("text", "and on")]


@pytest.mark.parametrize("arguments", ['{"a": "tex', '{"a": 12', '{"a"', "{", '{"a": "\\u00', '{"a": [1, '])
def test_a_call_that_is_cut_off_keeps_what_there_was(arguments: str) -> None:
    events = parse_every_way(HERMES, '<tool_call>{"name": "ping", "arguments": ' + arguments)
    assert events[0] == ("begin", "0", "ping")
    shown = events[1][-1]
    assert arguments.startswith(shown) or shown == arguments
    assert events[-1] == ("end", "0")


@pytest.mark.parametrize("end", ["", ', "', ', "other": 1}', ", oops", "]"])
def test_a_bare_call_that_ends_badly_stays_one(end: str) -> None:
    events = parse_every_way(format_of("ipython"), '{"name": "ping", "arguments": {}' + end)
    assert events[:3] == call(0, "ping", "{}")


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = HERMES.parser(rendered="", tools=tool_types([{"name": "ping"}]))
    assert parser is not None
    parser.push('<tool_call>{"name": "ping", "arguments": {"a": "')
    for piece in ("some", " long", " text"):
        events = parser.push(piece)
        assert [event.text for event in events] == [piece]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "output",
    [
        '{"title": "x"}',
        '{"name": "unknown", "arguments": {}}',
        "[1, 2]",
        "{not json",
        '{"name": 5}',
        "[]",
        "{",
    ],
)
@pytest.mark.parametrize("template", ["", "<|python_tag|>"])
def test_json_that_names_no_tool_is_text(template: str, output: str) -> None:
    assert parse_every_way(format_of(template), output) == [("text", output)]


def test_json_that_is_no_call_is_not_held_back() -> None:
    parser = format_of("").parser(rendered="", tools=tool_types([{"name": "ping"}]))
    assert parser is not None
    assert parser.push('{"title": "') != []


def test_json_counts_as_a_call_only_where_the_output_begins() -> None:
    output = 'Call {"name": "ping", "arguments": {}}'
    assert parse_every_way(format_of(""), output) == [("text", output)]


def test_what_follows_a_call_is_text() -> None:
    expected: Flat = [*call(0, "ping", "{}"), ("text", "done")]
    assert (
        parse_every_way(format_of("<|python_tag|>"), '{"name": "ping", "parameters": {}}\ndone') == expected
    )
