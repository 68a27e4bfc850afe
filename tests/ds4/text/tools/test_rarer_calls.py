"""Families that one model line each writes: Apertus, Functionary 3.2, MiniCPM 5, Hunyuan, Command R+."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ds4.text.outputs import call, cuts, format_of, moderately, parse, parse_every_way
from tests.ds4.text.tools.test_json_calls import ARGUMENTS

APERTUS = format_of("<|tools_prefix|> <|inner_prefix|>")
FUNCTIONARY = format_of(">>>all")
MINICPM = format_of('<function name=" <param name="')
HUNYUAN = format_of("<arg_key{}> :opensource")
COMMAND = format_of("directly-answer Action:")


@moderately
@given(ARGUMENTS, st.integers(0, 1 << 30))
def test_json_arguments_come_out_as_they_were_written(arguments: dict[str, object], seed: int) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    for output_format, output in (
        (APERTUS, '<|tools_prefix|>[{"ping": ' + text + "}]<|tools_suffix|>"),
        (FUNCTIONARY, "ping\n" + text),
        (COMMAND, 'Action:\n```json\n[{"tool_name": "ping", "parameters": ' + text + "}]```\n"),
    ):
        assert parse(output_format, cuts(output, seed)) == call(0, "ping", text)


def test_apertus_calls_several_after_its_thoughts() -> None:
    output = '<|inner_prefix|>Hm.<|inner_suffix|>So.<|tools_prefix|>[{"ping": {}}, {"look": {"a": 1}}]<|tools_suffix|>'
    assert parse_every_way(APERTUS, output) == [
        ("reasoning", "Hm."),
        ("text", "So."),
        *call(0, "ping", "{}"),
        *call(1, "look", '{"a": 1}'),
    ]
    assert parse_every_way(APERTUS, '<|tools_prefix|>["ping"]') == [("text", '<|tools_prefix|>["ping"]')]


def test_functionary_speaks_to_everybody_and_to_tools() -> None:
    output = 'all\nLet me see.\n>>>get_weather\n{"city": "Bonn"}>>>ping\n{}'
    assert parse_every_way(FUNCTIONARY, output) == [
        ("text", "Let me see."),
        *call(0, "get_weather", '{"city": "Bonn"}'),
        *call(1, "ping", "{}"),
    ]
    assert parse_every_way(FUNCTIONARY, "nobody\n{}") == [("text", "nobody\n{}")]


def test_minicpm_hides_markup_in_sections_and_prints_like_python() -> None:
    output = (
        '<function name="get_weather"><param name="city"><![CDATA[<b>\n]]></param><param name="days">3</param>'
        '<param name="detail">True</param><param name="box">{\'a\': None}</param></function>\n'
        '<function name="ping"></function>'
    )
    assert parse_every_way(MINICPM, output) == [
        *call(0, "get_weather", '{"city": "<b>\\n", "days": 3, "detail": true, "box": {"a":null}}'),
        *call(1, "ping", "{}"),
    ]


def test_hunyuans_tags_have_a_suffix_and_a_section() -> None:
    output = (
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>ping<tool_sep>\n</tool_call>\n"
        "</tool_calls>"
    ).replace(">", ":opensource>")
    assert parse_every_way(HUNYUAN, output) == [
        *call(0, "get_weather", '{"city": "Bonn", "days": 3}'),
        *call(1, "ping", "{}"),
    ]


@pytest.mark.parametrize("name", ["directly-answer", "unknown"])
def test_an_action_that_is_no_tool_is_text(name: str) -> None:
    output = 'Action: ```json\n[{"tool_name": "' + name + '", "parameters": {}}]```'
    assert parse_every_way(COMMAND, output) == [("text", output)]
