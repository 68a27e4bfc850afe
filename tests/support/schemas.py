"""JSON schemas whose every instance is short, for tests of structured output with random models.

Owns: nothing; functions of their arguments. Runs in: tests. A random model would fill an unbounded
string until its tokens run out, so everything here has an end.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import jsonschema

from ds4.text.grammar import grammar_of, json_source

PERSON: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 7, None]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "paid": {"type": "boolean"}},
            "required": ["zip", "paid"],
            "additionalProperties": False,
        }
    },
}
CHOICE: Final[Mapping[str, Any]] = {
    "anyOf": [
        {"const": "yes"},
        {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False},
        {
            "type": "object",
            "properties": {"é\n": {"enum": [1.5, -2]}},
            "required": ["é\n"],
            "additionalProperties": False,
        },
    ]
}
ALL: Final = (PERSON, CHOICE)


def grammar(schema: Mapping[str, Any]) -> str:
    """The schema as the worker gets it."""
    return grammar_of(json_source(schema))


def check(text: str, schema: Mapping[str, Any]) -> None:
    """Fails unless `text` is JSON that is valid under `schema`."""
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
