"""ds4/text/tools/element_calls.py: arguments as elements in elements."""

from tests.ds4.text.outputs import call, format_of, parse_every_way

SPACE = "]<]minimax[>["
M3 = format_of(SPACE)


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>".replace("<", f"{SPACE}<")


def test_texts_objects_and_lists_come_back_as_what_the_schema_says() -> None:
    output = "So.\n" + block(
        '<invoke name="get_weather"><city>5 "x"\n</city><days>5</days><unit>null</unit>'
        "<box><a><item>1</item><item>b</item></a><c>true</c></box></invoke>\n"
        '<invoke name="ping"></invoke>'
    )
    assert parse_every_way(M3, output) == [
        ("text", "So."),
        *call(
            0,
            "get_weather",
            '{"city": "5 \\"x\\"\\n", "days": 5, "unit": null, "box": {"a": [1, "b"], "c": true}}',
        ),
        *call(1, "ping", "{}"),
    ]


def test_a_call_that_is_cut_off_shows_how_far_it_came() -> None:
    output = block('<invoke name="get_weather"><city>Bo').removesuffix(f"\n{SPACE}</tool_call>")
    assert parse_every_way(M3, output) == call(0, "get_weather", '{"city": "Bo')


def test_a_block_without_a_call_is_text() -> None:
    assert parse_every_way(M3, block("nothing")) == [("text", block("nothing"))]
