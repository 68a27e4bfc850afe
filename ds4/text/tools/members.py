"""Arguments that are written one by one, between tags, as the members of one JSON object.

Owns: `ObjectWriter`, `read_member`. Runs in: front ends. Source: this project; which values are text
and which are JSON follows the templates, which write strings bare and everything else as JSON.
"""

import ast
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from ds4.text.arriving import SPACE, ArrivingText, Emit, Markers, Waiting
from ds4.text.json_stream import decoded, is_json
from ds4.text.tool_calls import EventSink

_NAME: Final = re.compile(r"[^\s<>{}\[\]\"'=]*")
_MAX_NAME_CHARS: Final = 256
_encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode
_MAX_PYTHON_CHARS: Final = 1 << 16


def read_name(source: ArrivingText) -> Waiting[str]:
    """A name of a tool or parameter; empty where none stands here."""
    return (yield from source.take_run(_NAME, _MAX_NAME_CHARS)) or ""


def escaped(text: str) -> str:
    """The text as it stands inside a JSON string; the escapes of joined texts are the joined escapes."""
    return _encode(text)[1:-1].decode()


class ObjectWriter:
    """Writes one call's arguments. Owned by the parser of that call."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._separator = "{"

    def member(self, name: str) -> None:
        """A member begins; its value must follow."""
        self._emit(f'{self._separator}"{escaped(name)}": ')
        self._separator = ", "

    def close(self) -> None:
        """No further member follows."""
        self._emit("{}" if self._separator == "{" else "}")


class _Lines:
    """Passes text on without the one line break that ends it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""

    def __call__(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._emit(text[: len(text) - len(self._held)])


def read_member(
    source: ArrivingText,
    sink: EventSink,
    ends: Markers,
    *,
    types: frozenset[str],
    has_lines: bool = False,
    end_inside: str | None = None,
) -> Waiting[str | None]:
    """Pass one value on, up to an end marker, which is read and returned; None at the end of the stream.

    `types` as `EventSink.types` tells them: alone, `string` is text as it stands. `has_lines`: the format
    puts a line break before and after the value. `end_inside` is text that stands for the first end marker
    inside of a value.
    """
    if has_lines:
        yield from source.literal("\n")
    is_text = types == frozenset(("string",))
    kept: list[str] = []
    emit: Emit = kept.append
    if is_text:
        sink.arguments('"')
        emit = lambda text: sink.arguments(escaped(text))  # noqa: E731 - one of two
    if has_lines:
        emit = _Lines(emit)
    marks = ends if end_inside is None else Markers((*ends.texts, end_inside))
    while True:
        end = yield from source.until(marks, emit)
        if end is None or end != end_inside:
            break
        emit(ends.texts[0])
    if not is_text:
        text = "".join(kept)
        sink.arguments(text if end is None else _as_json(text, types))
    elif end is not None:
        sink.arguments('"')
    return end


def _as_json(text: str, types: frozenset[str]) -> str:
    """A bare value as JSON: itself where it is of a type that it may have, else as a string."""
    bare = text.strip(SPACE)
    if "string" not in types and not is_json(bare):
        bare = _from_python(bare)
    if is_json(bare) and ("string" not in types or _type_names(decoded(bare)) & types):
        return bare
    return f'"{escaped(text)}"'


def _from_python(text: str) -> str:
    """A Python literal as JSON, since some templates show objects so; else the text itself."""
    if len(text) > _MAX_PYTHON_CHARS:
        return text
    try:
        return _encode(ast.literal_eval(text)).decode()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, OverflowError):
        return text


def _type_names(value: Any) -> frozenset[str]:
    match value:
        case None:
            names: tuple[str, ...] = ("null",)
        case bool():
            names = ("boolean",)
        case int():
            names = ("integer", "number")
        case float():
            names = ("number",)
        case list():
            names = ("array",)
        case dict():
            names = ("object",)
        case _:
            names = ()
    return frozenset(names)
