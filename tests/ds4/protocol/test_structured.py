"""The fields that ask for structure, as clients of three servers write them."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import RequestError
from ds4.protocol.structured import Structure, StructureFields, structure_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = msgspec.json.encode(SCHEMA).decode()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "schema", "json_schema", "json", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def _structure(**fields: Any) -> Structure | None:
    return structure_of(msgspec.convert(fields, StructureFields))


@pytest.mark.parametrize(
    ("field", "value", "kind", "text", "param"),
    [
        ("response_format", {"type": "json_object"}, "json", '{"type":"object"}', "response_format"),
        (
            "response_format",
            {"type": "json_object", "schema": SCHEMA},
            "json",
            TEXT,
            "response_format.schema",
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            "json",
            TEXT,
            "response_format.json_schema.schema",
        ),
        (
            "response_format",
            {"type": "json_schema", "schema": SCHEMA},
            "json",
            TEXT,
            "response_format.schema",
        ),
        ("json_schema", SCHEMA, "json", TEXT, "json_schema"),
        ("guided_json", SCHEMA, "json", TEXT, "guided_json"),
        ("guided_json", TEXT, "json", TEXT, "guided_json"),
        ("guided_json", True, "json", "true", "guided_json"),
        ("guided_regex", "a+", "regex", "a+", "guided_regex"),
        ("guided_choice", ["a", "b"], "choice", '["a","b"]', "guided_choice"),
        ("guided_grammar", "root ::= x", "grammar", "root ::= x", "guided_grammar"),
        ("grammar", "start: x", "grammar", "start: x", "grammar"),
        ("structured_outputs", {"json": SCHEMA, "regex": None}, "json", TEXT, "structured_outputs.json"),
        ("structured_outputs", {"regex": "a"}, "regex", "a", "structured_outputs.regex"),
        ("structured_outputs", {"choice": ["a"]}, "choice", '["a"]', "structured_outputs.choice"),
        ("structured_outputs", {"grammar": "g"}, "grammar", "g", "structured_outputs.grammar"),
        ("structured_outputs", {"json_object": True}, "json", '{"type":"object"}', "structured_outputs.json"),
    ],
)
def test_every_spelling_is_understood(field: str, value: Any, kind: Any, text: str, param: str) -> None:
    assert _structure(**{field: value}) == Structure(kind, text, param)


def test_what_asks_for_nothing_is_nothing() -> None:
    assert _structure() is None
    nothing = {
        "guided_choice": [],
        "guided_regex": "",
        "grammar": "",
        "structured_outputs": {"json_object": False},
    }
    assert _structure(response_format={"type": "text"}, **nothing) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"grammar": {}}, "grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"whitespace_pattern": "x", "json": {}}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"guided_regex": "a", "grammar": "b"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        _structure(**fields)
    assert caught.value.param == param


@given(name=st.sampled_from(StructureFields.__struct_fields__), value=JSON)
def test_anything_else_is_an_error_of_the_request(name: str, value: Any) -> None:
    with contextlib.suppress(RequestError):
        _structure(**{name: value})
