"""ds4/text/tools/members.py through the formats that use it: arguments that stand between tags."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.text.tool_calls import tool_types
from tests.ds4.text.outputs import TOOLS, call, cuts, format_of, moderately, parse, parse_every_way, tool

BAR = "\uff5c"
DSML = f"{BAR}DSML{BAR}"


def qwen(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def seed_oss(key: str, value: str) -> str:
    return f"<parameter={key}>{value}</parameter>\n"


def glm(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


def minimax(key: str, value: str) -> str:
    return f'<parameter name="{key}">{value}</parameter>\n'


QWEN = "<tool_call> <function= <parameter="
SEED = "<seed:tool_call> <function= <parameter="
FORMS = {
    "qwen": (QWEN, "<tool_call>\n<function=get_weather>\n", qwen, "</function>\n</tool_call>"),
    "qwen without the outer tag": (QWEN, "<function=get_weather>\n", qwen, "</function>\n</tool_call>"),
    "seed": (SEED, "<seed:tool_call>\n<function=get_weather>\n", seed_oss, "</function>\n</seed:tool_call>"),
    "glm": ("<arg_key>", "<tool_call>get_weather\n", glm, "</tool_call>"),
    "minimax": (
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="get_weather">\n',
        minimax,
        "</invoke>\n</minimax:tool_call>",
    ),
}
# A value's own line breaks are kept, except the one at each end that a format writes itself; a tag in a
# value ends it.
TEXT = st.text().filter(lambda text: "</" not in text and "<parameter" not in text)


@pytest.mark.parametrize("form", FORMS)
@moderately
@given(TEXT, st.integers(), st.booleans(), st.dictionaries(TEXT, TEXT, max_size=3), st.integers(0, 1 << 30))
def test_values_become_what_their_schema_says(
    form: str, city: str, days: int, detail: bool, box: dict[str, str], seed: int
) -> None:
    template, before, member, after = FORMS[form]
    if form == "seed":
        city = city.strip("\n")
    output = before + member("city", city) + member("days", str(days)) + member("detail", json.dumps(detail))
    output += member("box", json.dumps(box)) + after
    events = parse(format_of(template), cuts(output, seed))
    assert events == parse(format_of(template), [output])
    assert [event[0] for event in events] == ["begin", "arguments", "end"]
    assert json.loads(events[1][-1]) == {"city": city, "days": days, "detail": detail, "box": box}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("city", "12", '"12"'),
        ("city", "", '""'),
        ("city", 'a "b" \\ c', '"a \\"b\\" \\\\ c"'),
        ("unit", "null", "null"),
        ("unit", "12", '"12"'),
        ("days", "not a number", '"not a number"'),
        ("detail", "True", "true"),
        ("box", "{'a': [1, None]}", '{"a":[1,null]}'),
        ("box", "{'a': open}", "\"{'a': open}\""),
        ("unheard_of", "12", "12"),
        ("unheard_of", "twelve", '"twelve"'),
        ("unheard_of", '"quoted"', '"quoted"'),
    ],
)
def test_a_value_is_text_unless_it_may_be_something_else(form: str, key: str, value: str, shown: str) -> None:
    template, before, member, after = FORMS[form]
    output = before + member(key, value) + after
    assert parse_every_way(format_of(template), output) == call(0, "get_weather", f'{{"{key}": {shown}}}')


@pytest.mark.parametrize("form", FORMS)
def test_a_call_without_arguments_has_an_empty_object(form: str) -> None:
    template, before, _, after = FORMS[form]
    output = "Hm.\n" + (before + after + "\n") * 2
    expected = [("text", "Hm."), *call(0, "get_weather", "{}"), *call(1, "get_weather", "{}")]
    assert parse_every_way(format_of(template), output) == expected


@pytest.mark.parametrize("form", FORMS)
def test_text_values_are_streamed_while_they_are_written(form: str) -> None:
    template, before, member, _ = FORMS[form]
    parser = format_of(template).parser(rendered="", tools=tool_types(TOOLS))
    assert parser is not None
    parser.push(before + member("city", "@").split("@")[0] + "I")
    assert [event.text for event in parser.push('s "t')] == ['s \\"t']  # type: ignore[union-attr]


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_is_cut_off_is_ended(form: str) -> None:
    template, before, member, _ = FORMS[form]
    output = before + member("city", "Bonn") + member("days", "12@").split("@")[0]
    expected = call(0, "get_weather", '{"city": "Bonn", "days": 12')
    assert parse_every_way(format_of(template), output) == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_is_cut_off_is_text(form: str) -> None:
    template, before, _, _ = FORMS[form]
    bare = before.rstrip()
    for length in range(1, len(bare) - 1):
        assert parse(format_of(template), [bare[:length]]) == [("text", bare[:length])]


def test_a_missing_end_tag_of_a_parameter_is_mended() -> None:
    output = "<tool_call><function=ping><parameter=a>\n1\n<parameter=b>\n2\n</function></tool_call>"
    assert parse_every_way(format_of(QWEN), output) == call(0, "ping", '{"a": 1, "b": 2}')


def dsml(prefix: str) -> str:
    return (
        f'<{prefix}tool_calls>\n<{prefix}invoke name="get_weather">\n'
        f'<{prefix}parameter name="city" string="true">Bonn & <b>\n</{prefix}parameter>\n'
        f'<{prefix}parameter name="days" string="false">[1, 2]</{prefix}parameter>\n'
        f'</{prefix}invoke>\n<{prefix}invoke name="ping">\n\n</{prefix}invoke>\n</{prefix}tool_calls>'
    )


@pytest.mark.parametrize("prefix", [DSML, f"DSML{BAR}", ""])
def test_dsml_is_read_in_its_three_spellings(prefix: str) -> None:
    expected = [
        ("text", "Checking."),
        *call(0, "get_weather", '{"city": "Bonn & <b>\\n", "days": [1, 2]}'),
        *call(1, "ping", "{}"),
    ]
    assert parse_every_way(format_of(DSML), "Checking.\n\n" + dsml(prefix)) == expected


def test_dsml_may_quote_its_own_end_tag() -> None:
    output = dsml(DSML).replace("Bonn", f"x&lt;/{DSML}parameter>&lt;y")
    arguments = parse_every_way(format_of(DSML), output)[1][-1]
    assert json.loads(arguments)["city"] == f"x</{DSML}parameter>&lt;y & <b>\n"


def test_dsml_without_its_outer_end_is_a_call() -> None:
    output = dsml(DSML).removesuffix(f"\n</{DSML}tool_calls>")
    assert parse_every_way(format_of(DSML), output)[-3:] == call(1, "ping", "{}")


def test_dsml_without_a_call_is_text() -> None:
    output = f"<{DSML}tool_calls>\nnothing\n</{DSML}tool_calls>"
    assert parse_every_way(format_of(DSML), output) == [("text", output)]


@moderately
@given(st.text(), st.integers(0, 1 << 30))
def test_any_text_survives_dsml(text: str, seed: int) -> None:
    written = text.replace(f"</{DSML}parameter>", f"&lt;/{DSML}parameter>")
    output = f'<{DSML}tool_calls><{DSML}invoke name="f"><{DSML}parameter name="a" string="true">{written}'
    output += f"</{DSML}parameter></{DSML}invoke></{DSML}tool_calls>"
    events = parse(format_of(DSML), cuts(output, seed), tools=[tool("f", a="integer")])
    assert json.loads(events[1][-1]) == {"a": text}
