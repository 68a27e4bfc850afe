"""The fields by which clients say what an answer has to look like, in every spelling they use.

Owns: which fields there are and what they may hold. Runs in: front ends. Source: `response_format` is
OpenAI's; `json_schema`, `grammar` and a schema inside json_object are llama-server's; `guided_*` and
`structured_outputs` are vLLM's. At most one of them may be given; none is ever taken without effect.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from ds4.errors import RequestError

StructureKind = Literal["json", "regex", "choice", "grammar"]
_FORMATS: Final = ("text", "json_object", "json_schema")
_OUTPUTS: Final = ("json", "regex", "choice", "grammar", "json_object")
_ANY_OBJECT: Final = {"type": "object"}


class Structure(msgspec.Struct, frozen=True):
    """What the answer has to match: a JSON schema, a regex, a JSON list of strings, GBNF or Lark.

    `param` is the field that says so. `thinking` and `calls` are grammar rules of what may stand before
    the answer, and of calls that may stand in its place.
    """

    kind: StructureKind
    text: str
    param: str
    thinking: str = ""
    calls: str = ""


class StructureFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body fields. Built by decoding only."""

    response_format: Any = None
    json_schema: Any = None
    grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


def structure_of(fields: StructureFields) -> Structure | None:
    """What the answer has to match, if anything. Raises RequestError naming the field."""
    readers: Mapping[str, Callable[[str, Any], Structure | None]] = {
        "response_format": _response_format,
        "json_schema": _schema,
        "grammar": _grammar,
        "guided_json": _schema,
        "guided_regex": _regex,
        "guided_choice": _choice,
        "guided_grammar": _grammar,
        "structured_outputs": _structured_outputs,
    }
    found = [
        structure
        for name, read in readers.items()
        if (value := getattr(fields, name)) is not None and (structure := read(name, value)) is not None
    ]
    if len(found) > 1:
        raise RequestError(
            f"{found[0].param} and {found[1].param} cannot be given together",
            param=found[1].param,
            code="invalid_value",
        )
    return found[0] if found else None


def _wrong(param: str, wanted: str, code: str = "invalid_type") -> RequestError:
    return RequestError(f"{param} must be {wanted}", param=param, code=code)


def _response_format(param: str, value: Any) -> Structure | None:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise _wrong(param, "an object with a type")
    kind = value["type"]
    if kind not in _FORMATS:
        raise RequestError(
            f"{param}.type {kind[:40]!r} is not supported; {', '.join(_FORMATS)} are",
            param=f"{param}.type",
            code="unsupported_parameter",
        )
    if kind == "text":
        return None
    where, holder = param, value
    if kind == "json_schema" and "json_schema" in value:
        where, holder = f"{param}.json_schema", value["json_schema"]
        if not isinstance(holder, dict):
            raise _wrong(where, "an object with a schema")
    schema = holder.get("schema")
    if schema is None:
        if kind == "json_schema":
            raise RequestError(
                f"{where}.schema is required", param=f"{where}.schema", code="missing_required_parameter"
            )
        where, schema = param, _ANY_OBJECT
    else:
        where = f"{where}.schema"
    return _schema(where, schema)


def _schema(param: str, value: Any) -> Structure:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise RequestError(f"{param} is no JSON: {error}", param=param, code="invalid_json") from None
    if not isinstance(value, dict | bool):
        raise _wrong(param, "a JSON schema, which is an object")
    return Structure("json", msgspec.json.encode(value).decode(), param)


def _text(param: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(param, "a string")
    return value


def _regex(param: str, value: Any) -> Structure | None:
    return Structure("regex", value, param) if _text(param, value) else None


def _grammar(param: str, value: Any) -> Structure | None:
    return Structure("grammar", value, param) if _text(param, value) else None


def _choice(param: str, value: Any) -> Structure | None:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _wrong(param, "a list of strings")
    if not value:
        return None
    if not any(value):
        raise _wrong(param, "a list in which something is not empty", "invalid_value")
    return Structure("choice", msgspec.json.encode(value).decode(), param)


def _structured_outputs(param: str, value: Any) -> Structure | None:
    if not isinstance(value, dict):
        raise _wrong(param, "an object")
    given = {name: each for name, each in value.items() if each is not None and each is not False}
    unknown = sorted(given.keys() - set(_OUTPUTS))
    if unknown:
        name = f"{param}.{unknown[0][:40]}"
        raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
    if given.pop("json_object", None) is not None:
        given["json"] = given.get("json", _ANY_OBJECT)
    inside = {
        "guided_json": given.get("json"),
        "guided_regex": given.get("regex"),
        "guided_choice": given.get("choice"),
        "guided_grammar": given.get("grammar"),
    }
    structure = structure_of(StructureFields(**inside))
    if structure is None:
        return None
    name = f"{param}.{structure.param.removeprefix('guided_')}"
    return msgspec.structs.replace(structure, param=name)
