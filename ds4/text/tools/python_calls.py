"""Tool calls written as Python: `[name(key="value", other=[1, True])]` between two markers.

Owns: `PythonCalls`. Runs in: front ends. Source: the chat templates of LFM2.

Nothing is run: the text is parsed, and only literals are taken. It is held back until the block is
complete, because a name with an open bracket is no call yet.
"""

import ast
import warnings
from collections.abc import Callable
from typing import Any, Final

import msgspec

from ds4.text.arriving import ArrivingText, Markers, Waiting
from ds4.text.tool_calls import EventSink
from ds4.text.tools.json_calls import begin_call

_encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode


class PythonCalls:
    """One family's markers. Immutable."""

    is_bare: Final = False

    def __init__(self, opener: str, closer: str) -> None:
        self.openers: Final = (opener,)
        self.markers: Final = (opener, closer)
        self._closers = Markers((closer,))

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """All calls of one block."""
        pieces: list[str] = []
        if (yield from source.until(self._closers, pieces.append)) is None or source.is_too_long:
            return False
        text = "".join(pieces).strip()
        # Models break lines inside of strings, which Python does not.
        calls = _parsed(text) or _parsed(text.replace("\n", "\\n"))
        for name, arguments in calls:
            if not begin_call(source, sink, name):
                return False
            sink.arguments(arguments)
            sink.end()
        return bool(calls)


def _parsed(text: str) -> list[tuple[str, str]]:
    """Names and arguments; empty where the text is anything but calls with literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes: they are the model's
            tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_call(node) for node in nodes]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, OverflowError):
        return []


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("unnamed arguments")
        arguments[keyword.arg] = _literal(keyword.value)
    return ast.unparse(node.func), _encode(arguments).decode()


def _literal(node: ast.expr) -> Any:
    """A literal, with JSON's names for three values among Python's."""
    match node:
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {
                ast.literal_eval(key): _literal(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    return ast.literal_eval(node)
