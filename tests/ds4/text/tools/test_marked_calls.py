"""ds4/text/tools/marked_calls.py: markers tell the name, JSON arguments follow."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ds4.text.outputs import call, cuts, format_of, moderately, parse, parse_every_way
from tests.ds4.text.tools.test_json_calls import ARGUMENTS

CALLS, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEP = "<\uff5ctool\u2581sep\uff5c>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    "<|tool_call_end|><|tool_calls_section_end|>",
)

FORMS = {
    "DeepSeek V3.1": (CALL, CALLS + CALL + "ping" + SEP, CALL_END + CALLS_END),
    "DeepSeek V3 and R1": (
        CALL,
        CALLS + CALL + "function" + SEP + "ping\n```json\n",
        "\n```" + CALL_END + CALLS_END,
    ),
    "DeepSeek without a section": (CALL, CALL + "ping" + SEP, CALL_END),
    "Kimi": ("<|tool_call_begin|>", KIMI[0] + "ping:0<|tool_call_argument_begin|>", KIMI[1]),
    "Solar": (
        "<|tool_call:begin|> <|tool_call:name|>",
        "<|tool_calls|><|tool_call:begin|>call-1<|tool_call:name|>ping<|tool_call:args|>",
        "<|tool_call:end|><|calls|>",
    ),
    "Mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]ping[ARGS]", ""),
    "Mistral with ids": ("[TOOL_CALLS]", "[TOOL_CALLS]ping[CALL_ID]abcdef123[ARGS]", ""),
    "Llama": ("<|python_tag|>", "<function=ping>", "</function>"),
}


@pytest.mark.parametrize("form", FORMS)
@moderately
@given(ARGUMENTS, st.sampled_from([None, 2]), st.integers(0, 1 << 30))
def test_arguments_come_out_as_they_were_written(
    form: str, arguments: dict[str, object], indent: int | None, seed: int
) -> None:
    template, before, after = FORMS[form]
    text = json.dumps(arguments, indent=indent, ensure_ascii=False)
    output = before + text + after
    assert parse(format_of(template), cuts(output, seed)) == call(0, "ping", text)
    assert parse(format_of(template), [output]) == call(0, "ping", text)


@pytest.mark.parametrize("form", FORMS)
def test_several_calls_are_counted_and_text_may_stand_around_them(form: str) -> None:
    template, before, after = FORMS[form]
    output = "Well.\n\n" + (before + "{}" + after + "\n") * 2 + "So."
    expected = [("text", "Well."), *call(0, "ping", "{}"), *call(1, "ping", "{}"), ("text", "So.")]
    assert parse_every_way(format_of(template), output) == expected


def test_a_section_holds_several_calls() -> None:
    output = (
        CALLS
        + CALL
        + "a"
        + SEP
        + "{}"
        + CALL_END
        + "\n"
        + CALL
        + "b"
        + SEP
        + '{"x":1}'
        + CALL_END
        + CALLS_END
    )
    assert parse_every_way(format_of(CALL), output) == call(0, "a", "{}") + call(1, "b", '{"x":1}')


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arguments", ["", "[1]", "text"])
def test_markers_without_an_object_are_text(form: str, arguments: str) -> None:
    template, before, after = FORMS[form]
    output = before + arguments + after
    assert parse_every_way(format_of(template), output) == [("text", output)]


@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_is_cut_off_is_text(form: str) -> None:
    template, before, _ = FORMS[form]
    for length in range(1, len(before) + 1):
        assert parse(format_of(template), [before[:length]]) == [("text", before[:length])]


@pytest.mark.parametrize("form", FORMS)
def test_wrong_arguments_reach_the_client_as_they_stand(form: str) -> None:
    template, before, after = FORMS[form]
    events = parse_every_way(format_of(template), before + '{"a": tru}' + after)
    assert events[0] == ("begin", "0", "ping")
    assert events[1][-1].startswith('{"a": tru}')
