"""ds4/text/output_format.py: the template tells the family; every family keeps the same promises."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.text.output_format import find_output_format
from ds4.text.tools.element_calls import ElementCalls
from ds4.text.tools.gemma_calls import GemmaCalls
from ds4.text.tools.invoke_calls import InvokeCalls
from ds4.text.tools.json_calls import JsonCalls
from ds4.text.tools.keyed_calls import KeyedCalls
from ds4.text.tools.marked_calls import LlamaCalls, MarkedCalls, MistralCalls
from ds4.text.tools.param_calls import ParamCalls
from ds4.text.tools.python_calls import PythonCalls
from ds4.text.tools.recipient_calls import RecipientCalls
from ds4.text.tools.tagged_calls import ArgumentTagCalls, FunctionTagCalls
from tests.ds4.text.outputs import call, cuts, format_of, moderately, parse

TEMPLATES = {
    "{{ '<tool_call>' + call|tojson }}": (JsonCalls, "<tool_call>"),
    "<tool_call>{'name': …}</tool_call> … <|tool_call_begin|>": (MarkedCalls, "<|tool_call_begin|>"),
    "<tool_call>\n<function=f>\n<parameter=p>": (FunctionTagCalls, "<tool_call>"),
    "<seed:tool_call>\n<function=f>\n<parameter=p>": (FunctionTagCalls, "<seed:tool_call>"),
    "<tool_call>f<arg_key>": (ArgumentTagCalls, "<tool_call>"),
    "[TOOL_CALLS]": (MistralCalls, "[TOOL_CALLS]"),
    "<\uff5ctool\u2581call\u2581begin\uff5c>": (MarkedCalls, "<\uff5ctool\u2581call\u2581begin\uff5c>"),
    "{% set token = '\uff5cDSML\uff5c' %}": (InvokeCalls, "<\uff5cDSML\uff5ctool_calls>"),
    "<minimax:tool_call>": (InvokeCalls, "<minimax:tool_call>"),
    "<tool_calls>[": (JsonCalls, "<tool_calls>"),
    "<|tool_call_start|>": (PythonCalls, "<|tool_call_start|>"),
    "<|tool_list_start|>": (PythonCalls, "<|tool_call_start|>"),
    '<|tool_call>call:{{ name }}<tool_call|> <|"|>': (GemmaCalls, '<|"|>'),
    "<|tools_prefix|>": (KeyedCalls, "<|tools_suffix|>"),
    "'>>>all\\n'": (RecipientCalls, ">>>"),
    "directly-answer Action:": (JsonCalls, "Action: ```json"),
    "'role': 'function call'": (JsonCalls, "<|message_sep|>"),
    "<|tool_call:begin|> <|tool_call:name|>": (MarkedCalls, "<|tool_call:name|>"),
    "'<arg_key{}>'.format(':opensource')": (ArgumentTagCalls, "<tool_sep:opensource>"),
    '<function name=" <param name="': (ParamCalls, '<param name="'),
    "]<]minimax[>[": (ElementCalls, "]<]minimax[>["),
    "Environment: ipython": (LlamaCalls, "<|python_tag|>"),
    "{{ messages }}": (JsonCalls, None),
}
SOUP = [
    *("<", ">", "</", "{", "}", "[", "]", '"', ":", ",", "\n", " ", "x", "1", "ping", "get_weather", "null"),
    *(
        '{"name": "ping", "arguments": {',
        '"city": "a"',
        '"parameters"',
        "function",
        "```",
        "json",
        "</think>",
    ),
    *('<invoke name="', 'ping">', '<parameter name="', 'city">', "</parameter>", "</invoke>"),
    *("call:ping{", "n:1", '<|"|>', "]<]minimax[>[", '<invoke name="ping">', "<item>", "</item>", "\nping\n"),
    *('"ping": {', "all\n", '<param name="city">', "<![CDATA[", "]]>", "</param>", "call1"),
    *("<function=ping>", "<parameter=days>", "</function>", "<arg_value>", "</arg_value>", "</arg_key>"),
    *(" to=functions.ping", "analysis", "final", "assistant", ' string="true">', "[ARGS]"),
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_shows_how_its_model_writes_calls(template: str) -> None:
    family, marker = TEMPLATES[template]
    output_format = format_of(template)
    assert isinstance(output_format.tools, family)
    assert marker is None or marker in output_format.markers


def test_the_markers_of_calls_and_reasoning_are_shown() -> None:
    markers = format_of("<think> [TOOL_CALLS]").markers
    assert {"<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"} <= set(markers)
    assert "<|channel|>" in format_of("<|channel|> <|message|>").markers


@pytest.mark.parametrize("template", [*TEMPLATES, "<|channel|> <|message|>"])
@moderately
@given(st.data(), st.integers(0, 1 << 30))
def test_no_family_cares_how_its_output_is_cut(template: str, data: st.DataObject, seed: int) -> None:
    output_format = format_of(template + " <think>")
    soup = st.lists(st.sampled_from([*SOUP, *output_format.markers * 3]), max_size=30)
    pieces = data.draw(soup)
    text = "".join(pieces)
    whole = parse(output_format, [text])
    assert parse(output_format, pieces) == whole
    assert parse(output_format, cuts(text, seed)) == whole
    assert parse(output_format, list(text)) == whole
    begun = [event[1] for event in whole if event[0] == "begin"]
    assert begun == [event[1] for event in whole if event[0] == "end"] == list(map(str, range(len(begun))))
    marks_text = isinstance(output_format.tools, RecipientCalls)  # with a marker that is no text
    if not begun and not marks_text and output_format.harmony is None and "think>" not in text:
        assert "".join(event[1] for event in whole) == text


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_output_of_openers_alone_is_read_quickly_enough(template: str) -> None:
    output_format = format_of(template)
    assert output_format.tools is not None
    for opener in output_format.tools.openers:
        text = opener * (50_000 // len(opener))
        assert parse(output_format, [text]) == [("text", text)]
        text = (opener + '{"a') * (30_000 // len(opener))
        assert re.sub(r"\s", "", parse(output_format, cuts(text, 5))[0][-1]) == re.sub(r"\s", "", text)


def test_an_unknown_format_takes_plain_json() -> None:
    assert parse(format_of("{{ messages }}"), ['{"name": "ping"}']) == call(0, "ping", "{}")


def test_a_template_without_tools_takes_plain_json_and_its_familys_calls() -> None:
    output_format = find_output_format("<tool_call>", lambda text: False, takes_tools=False)
    plain = '{"name": "ping"}'
    assert parse(output_format, [plain]) == call(0, "ping", "{}")
    assert parse(output_format, [f"<tool_call>{plain}</tool_call>"]) == call(0, "ping", "{}")
