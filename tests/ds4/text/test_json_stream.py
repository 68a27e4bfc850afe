"""ds4/text/json_stream.py: JSON passes as it is written, as far as it is JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.text.arriving import ArrivingText
from ds4.text.json_stream import decoded, is_json, json_value
from tests.ds4.text.outputs import cuts, moderately
from tests.ds4.text.tools.test_json_calls import JSON


def passed(pieces: list[str]) -> tuple[bool, str, str]:
    """(whether it was a value, what was passed on, what is left of the text)."""
    source = ArrivingText()
    out: list[str] = []
    run = json_value(source, out.append)
    result: bool | None = None
    for piece in [*pieces, None]:
        if piece is None:
            source.end()
        else:
            source.push(piece)
        try:
            next(run)
        except StopIteration as stop:
            result = stop.value
            break
    assert result is not None
    rest = "".join(pieces).removeprefix("".join(out))
    return result, "".join(out), rest


@moderately
@given(JSON, st.sampled_from([None, 1]), st.booleans(), st.integers(0, 1 << 30))
def test_any_value_passes_unchanged(value: object, indent: int | None, ascii_only: bool, seed: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert passed(cuts(text, seed)) == (True, text, "")


@pytest.mark.parametrize(
    ("text", "whole", "shown"),
    [
        ("[1] x", True, "[1]"),
        ('{"a": }', False, '{"a": '),
        ("[1,]", False, "[1,"),
        ('{"a" 1}', False, '{"a" '),
        ("{a: 1}", False, "{"),
        ("01", False, "01"),
        ("-", False, "-"),
        ("nul", False, "nul"),
        ("NaN", False, "NaN"),
        ('"\\x"', False, '"'),
        ('"\\u12g4"', False, '"'),
        ('"open', False, '"open'),
        ("", False, ""),
        ("]", False, ""),
        ("[" * 400, False, "[" * 257),
        ("1" * 5000, False, ""),
    ],
)
def test_only_json_is_json(text: str, whole: bool, shown: str) -> None:
    for seed in range(5):
        assert passed(cuts(text, seed))[:2] == (whole, shown)
    assert is_json(text) is (whole and shown == text)


def test_control_characters_in_strings_become_escapes() -> None:
    _, text, _ = passed(['{"a": "x\ny\t\x00'])
    assert text == '{"a": "x\\ny\\t\\u0000'


@given(st.text(alphabet='{}[]",:\\ 0123456789.eE+-truefalsn\n', max_size=40), st.integers(0, 1 << 30))
@moderately
def test_what_passes_does_not_depend_on_the_cuts(text: str, seed: int) -> None:
    whole = passed([text])
    assert passed(cuts(text, seed))[:2] == whole[:2]
    if whole[0]:
        assert is_json(whole[1])


def test_what_python_cannot_hold_is_nothing() -> None:
    assert decoded('{"a": 1}') == {"a": 1}
    assert decoded("{") is None
    assert not is_json('"\ud800"')
