"""What an answer has to look like, written as a grammar: from a schema, regex, list or grammar of a client.

Owns: `GrammarSource` and the translation into llguidance's Lark dialect, the one form that crosses the
ring. Runs in: front ends, almost always in their checking process (ds4/text/grammar_check.py), since
translating what is hostile takes long. Source: llguidance's syntax and JSON Schema documentation.

White space in JSON is at most a space, or a new line and its indentation: a model that may add white
space for ever at some point does.
"""

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from ds4.errors import RequestError

_WHITE_SPACE: Final = r"[ ]|\n[ \t]{0,24}"
_DIRECTIVE: Final = re.compile(r"\A\s*%llguidance[ \t]*(\{[^\n]*\})?[ \t]*(?:\n|\Z)")
_NO_IDS: Final[Mapping[str, int]] = MappingProxyType({})
# Keywords whose members are schemas under names of the client's choice, and those that hold no schema.
_NAMES: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
_GBNF_RULE: Final = re.compile(r"^\s*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)

# For translating and compiling one source: time of a processor, and on the clock of a busy machine.
MAX_CHECK_CPU_S: Final = 1.0
MAX_CHECK_S: Final = 10.0

Kind = Literal["json", "regex", "choice", "grammar"]


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """What a client gave: a JSON schema, a regex, a JSON list of strings, or GBNF or Lark, as text.

    `thinking`: rules of what may stand before that, from `thinking_rules`; empty: nothing may. `calls`: a
    grammar in Lark, which may be met instead.
    """

    kind: Kind
    text: str
    thinking: str = ""
    calls: str = ""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The grammar for the worker, or why there is none; `problem` goes on after the field's name."""

    grammar: str = ""
    problem: str = ""
    code: str = ""


JSON_OBJECT: Final = GrammarSource("json", '{"type":"object"}')


def grammar_of(source: GrammarSource) -> str:
    """The grammar for the worker. Raises RequestError where the source is malformed."""
    if source.kind == "grammar":
        options, text = _lark(source.text)
        rule = f"%lark {{\n{text}\n}}"
    else:
        options, text, rule = {}, "", _rule(source.kind, source.text)
    head = "%llguidance " + json.dumps(options)
    if source.thinking or source.calls:
        lines = [head, f"start: {'thinking ' if source.thinking else ''}answer"]
        if source.calls:
            lines += ["answer: text | calls", f"text: {rule}", f"calls: %lark {{\n{source.calls}\n}}"]
        else:
            lines.append(f"answer: {rule}")
        return "\n".join([*lines, source.thinking, ""])
    return f"{head}\n{text or f'start: {rule}'}\n"


def _rule(kind: Kind, text: str) -> str:
    if kind == "json":
        return json_rule(json.loads(text))
    if kind == "choice":
        return " | ".join(map(literal, json.loads(text)))
    from llguidance import regex_to_lark  # in the checking process only

    # Digits, word characters and white space of ASCII, as elsewhere where regexes guide models.
    return f"/{regex_to_lark(text, 'dws')}/"


def thinking_rules(
    opening: str, closing: str, *, is_open: bool, control_ids: Mapping[str, int] = _NO_IDS
) -> str:
    """Rules for reasoning before the answer: it has to end if it `is_open`, else there may be some."""
    ends = marker(closing, control_ids)
    body = f"thought {ends}" if closing in control_ids else "thought"
    stop = "" if closing in control_ids else f"[suffix={ends}]"
    rest = f"{body} /[ \\n]{{1,4}}/?"
    begin = rest if is_open else f"({marker(opening, control_ids)} {rest})?"
    return f"thinking: {begin}\nthought{stop}: /(.|\\n)*/"


def harmony_rules(*, has_calls: bool, control_ids: Mapping[str, int]) -> str:
    """The same for gpt-oss: maybe an analysis, then the head of the final message unless a call follows."""

    def part(*texts: str) -> str:
        return " ".join(marker(text, control_ids) for text in texts)

    analysis = f"{part('<|channel|>', 'analysis', '<|message|>')} thought {part('<|end|>', '<|start|>', 'assistant')}"
    final = "" if has_calls else part("<|channel|>", "final", "<|message|>")
    return f"thinking: ({analysis})? {final}\nthought: /(.|\\n)*/"


def marker(text: str, control_ids: Mapping[str, int] = _NO_IDS) -> str:
    """A marker of the model's format as it stands in a rule: the one token, where it is a control token."""
    return f"<[{control_ids[text]}]>" if text in control_ids else literal(text)


def literal(text: str) -> str:
    """`text` itself, as it stands in a rule."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Any) -> str:
    """JSON that is valid under `schema`, as it stands in a rule. Raises RequestError if it is no schema."""
    if not isinstance(schema, dict | bool):
        raise RequestError("a JSON schema is an object", code="invalid_json_schema")
    if schema is False:
        raise RequestError("the JSON schema allows nothing", code="invalid_json_schema")
    options = {"whitespace_pattern": _WHITE_SPACE, "whitespace_flexible": True, "lenient": False}
    plain = {} if schema is True else _without_neutral(schema)
    # On one line: a new line would end the rule.
    return "%json " + json.dumps({**plain, "x-guidance": options}, ensure_ascii=False)


def _without_neutral(schema: Any) -> Any:
    """The schema without keywords at values that mean nothing, which llguidance refuses by name."""
    if isinstance(schema, list):
        return [_without_neutral(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMES and isinstance(value, dict):
            kept[key] = {name: _without_neutral(each) for name, each in value.items()}
        elif key in _VALUES:
            kept[key] = value
        elif not (key == "uniqueItems" and value is False):
            kept[key] = _without_neutral(value)
    return kept


def _lark(text: str) -> tuple[dict[str, Any], str]:
    """The options and rules of a grammar in GBNF or Lark."""
    if _GBNF_RULE.search(text):
        from llguidance import gbnf_to_lark  # in the checking process only

        try:
            text = gbnf_to_lark.gbnf_to_lark(text)
        except RecursionError:
            raise RequestError("the grammar is nested too deeply", code="invalid_grammar") from None
        except Exception as error:  # noqa: BLE001 - it raises bare exceptions
            raise RequestError(f"the grammar is no valid GBNF: {error}", code="invalid_grammar") from None
    options: dict[str, Any] = {}
    found = _DIRECTIVE.match(text)
    if found is not None:
        text = text[found.end() :]
        try:
            options = json.loads(found[1] or "{}")
        except ValueError:
            raise RequestError("%llguidance needs JSON on its line", code="invalid_grammar") from None
    return options, text


def choice_source(choices: Sequence[str]) -> GrammarSource:
    """One of `choices`, exactly."""
    return GrammarSource("choice", json.dumps(list(choices), ensure_ascii=False))


def json_source(schema: Any) -> GrammarSource:
    """JSON that is valid under `schema`."""
    return GrammarSource("json", json.dumps(schema, ensure_ascii=False))
