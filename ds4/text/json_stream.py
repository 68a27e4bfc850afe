"""JSON that is still arriving, passed on exactly as it is written while it is checked.

Owns: `json_value`. Runs in: front ends. Source: RFC 8259.

One mistake of models is mended on the way: control characters inside strings (line breaks above all)
become escapes.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from ds4.text.arriving import SPACE, ArrivingText, Emit, Waiting

_MAX_DEPTH: Final = 256
_MAX_SCALAR_CHARS: Final = 4096
_PLAIN: Final = re.compile(r'[^"\\]+')
_BLANK: Final = re.compile(r"[ \t\r\n]+")
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]*")
_IS_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")
_CONTROL: Final = {code: f"\\u{code:04x}" for code in range(0x20)} | {9: "\\t", 10: "\\n", 13: "\\r"}
_HAS_CONTROL: Final = re.compile(r"[\x00-\x1f]")

_decode: Final[Callable[[str], Any]] = msgspec.json.Decoder().decode


def json_value(source: ArrivingText, emit: Emit) -> Waiting[bool]:
    """Pass one value on, without the white space after it. False where it turned out wrong.

    Everything that was read was passed on.
    """
    open_brackets: list[str] = []
    while True:
        # A value stands here, or the end of an array that has just begun.
        character = yield from _next(source, emit)
        is_complete = True
        if character == '"':
            if not (yield from json_string(source, emit)):
                return False
        elif character in ("{", "["):
            emit((yield from source.take()))
            open_brackets.append("}" if character == "{" else "]")
            if len(open_brackets) > _MAX_DEPTH:
                return False
            character = yield from _next(source, emit)
            is_complete = character == open_brackets[-1]
            if is_complete:
                emit((yield from source.take()))
                open_brackets.pop()
        elif not (yield from _scalar(source, emit)):
            return False
        while is_complete:
            if not open_brackets:
                return True
            character = yield from _next(source, emit)
            if character == open_brackets[-1]:
                emit((yield from source.take()))
                open_brackets.pop()
            elif character == ",":
                emit((yield from source.take()))
                is_complete = False
            else:
                return False
        if open_brackets[-1] == "}" and not (yield from _key(source, emit)):
            return False


def _next(source: ArrivingText, emit: Emit) -> Waiting[str]:
    """Pass white space on; the character after it stays unread."""
    while True:
        if blank := source.available(_BLANK):
            emit(blank)
        character = yield from source.peek()
        if not character or character not in SPACE:
            return character


def _key(source: ArrivingText, emit: Emit) -> Waiting[bool]:
    if (yield from _next(source, emit)) != '"' or not (yield from json_string(source, emit)):
        return False
    if (yield from _next(source, emit)) != ":":
        return False
    emit((yield from source.take()))
    return True


def json_string(source: ArrivingText, emit: Emit) -> Waiting[bool]:
    """Pass a string on, with its quotation marks. False where it never ends or is wrong."""
    emit((yield from source.take()))
    while True:
        if plain := source.available(_PLAIN):
            emit(plain.translate(_CONTROL) if _HAS_CONTROL.search(plain) else plain)
        character = yield from source.peek()
        if character == '"':
            emit((yield from source.take()))
            return True
        if character == "\\":
            escape = yield from source.peek(2)
            if escape[1:] == "u":
                escape = yield from source.peek(6)
                if _HEX.fullmatch(escape[2:]) is None:
                    return False
            elif len(escape) < 2 or escape[1] not in '"\\/bfnrt':
                return False
            emit((yield from source.take(len(escape))))
        elif not character:
            return False


def _scalar(source: ArrivingText, emit: Emit) -> Waiting[bool]:
    start = yield from source.peek()
    if not start or _SCALAR.fullmatch(start) is None:
        return False
    text = yield from source.take_run(_SCALAR, _MAX_SCALAR_CHARS)
    if text is None:
        return False
    emit(text)
    return _IS_SCALAR.fullmatch(text) is not None


def decoded(text: str) -> Any:
    """The value of a JSON text that `json_value` passed on; None for what Python cannot hold."""
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def is_json(text: str) -> bool:
    """Whether this is one JSON value."""
    try:
        _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True
