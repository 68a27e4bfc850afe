"""Grammars for answers that have to be tool calls: the form is the model's own, the arguments are exact.

Owns: `grammar_for_tools`, `CallLayout`. Runs in: front ends. Source: the forms are those that the parsers
of ds4/text/tools read, as the families' chat templates show them.

A family without a layout here is asked for bare JSON, which `JsonCalls` reads without a marker.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ds4.text.grammar import json_rule, literal, marker
from ds4.text.tool_calls import ToolFormat
from ds4.text.tools.json_calls import JsonCalls
from ds4.text.tools.marked_calls import LlamaCalls, MarkedCalls, MistralCalls

# A weak model that may always call once more does.
_MAX_CALLS: Final = 16
_NAME: Final = "\0"
_ANY_OBJECT: Final = {"type": "object"}
_MAX_DEPTH: Final = 32
_COMPOSING: Final = frozenset(
    (
        "$ref",
        "$dynamicRef",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "patternProperties",
        "unevaluatedProperties",
    )
)


class CallLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The text around the calls of an answer and around each one's arguments.

    Each is a sequence of parts; a part that is a control token of the vocabulary stands for that token.
    A zero character stands for the name of the tool, which is escaped where it is in a longer part.
    """

    begin: tuple[str, ...] = ()
    before: tuple[str, ...]
    after: tuple[str, ...]
    between: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    allows_several: bool = True


_JSON: Final = ('{"name": "' + _NAME + '", "arguments": ', "}")
PLAIN: Final = CallLayout(before=(_JSON[0],), after=(_JSON[1],), between=("\n",))


HARMONY: Final = CallLayout(
    before=("<|channel|>", "commentary to=functions.", _NAME, " ", "<|constrain|>", "json", "<|message|>"),
    after=(),
    allows_several=False,  # each would have to begin as a message of its own
)


def layout_of(family: ToolFormat | None) -> CallLayout | None:
    """How this family writes calls; None where its arguments are no JSON."""
    if isinstance(family, MistralCalls):
        return CallLayout(
            begin=("[TOOL_CALLS]", "["), before=(_JSON[0],), after=(_JSON[1],), between=(", ",), end=("]",)
        )
    if isinstance(family, LlamaCalls):
        return CallLayout(
            before=('{"name": "' + _NAME + '", "parameters": ',), after=("}",), allows_several=False
        )
    if isinstance(family, MarkedCalls):
        opening, closing, begin, middle, end = family.markers
        return CallLayout(begin=(opening,), before=(begin, _NAME, middle), after=(end,), end=(closing,))
    if isinstance(family, JsonCalls):
        if not family.openers:
            return PLAIN
        closer = family.markers[len(family.openers) :][:1]
        if not closer:
            return CallLayout(
                begin=(family.openers[0], "["),
                before=(_JSON[0],),
                after=(_JSON[1],),
                between=(", ",),
                end=("]",),
            )
        return CallLayout(
            before=(family.openers[0], "\n" + _JSON[0]), after=(_JSON[1] + "\n", *closer), between=("\n",)
        )
    return None


def _closed(schema: Any, depth: int = 0) -> Any:
    """The schema with objects closed that name their properties and leave open whether there are others.

    A weak model would invent some, and whoever has to make the call knows none of them. What a schema is
    composed of stays open: closed parts exclude each other.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or _COMPOSING & schema.keys():
        return schema
    out = dict(schema)
    if isinstance(properties := out.get("properties"), Mapping):
        out["properties"] = {name: _closed(each, depth + 1) for name, each in properties.items()}
        out.setdefault("additionalProperties", False)
    if isinstance(out.get("items"), Mapping):
        out["items"] = _closed(out["items"], depth + 1)
    return out


def grammar_for_tools(
    tools: Sequence[Mapping[str, Any]],
    choice: str | None,
    layout: CallLayout,
    *,
    is_parallel: bool = True,
    control_ids: Mapping[str, int],
) -> str:
    """An answer that is nothing but calls of `tools`, which are in the form of OpenAI's API; in Lark.

    `choice`: the name of the one tool that may be called; None: any of them. `control_ids`: control
    tokens by text. Raises RequestError for parameters that are no schema.
    """
    functions = [tool["function"] for tool in tools if choice in (None, tool["function"]["name"])]

    def part(text: str, name: str) -> str:
        if _NAME not in text:
            return marker(text, control_ids)
        return literal(name if text == _NAME else text.replace(_NAME, literal(name)[1:-1]))

    def parts(texts: Sequence[str], name: str = "") -> str:
        return " ".join(part(text, name) for text in texts)

    lines: list[str] = []
    for index, function in enumerate(functions):
        before, after = (parts(texts, function["name"]) for texts in (layout.before, layout.after))
        lines.append(f"call_{index}: {before} arguments_{index} {after}")
        lines.append(f"arguments_{index}: {json_rule(_closed(function.get('parameters') or _ANY_OBJECT))}")
    several = is_parallel and layout.allows_several
    more = f" ({parts(layout.between)} call){{0,{_MAX_CALLS - 1}}}" if several else ""
    head = [
        f"start: {parts(layout.begin)} call{more} {parts(layout.end)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    return "\n".join(head + lines)
