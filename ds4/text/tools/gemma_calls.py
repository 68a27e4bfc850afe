"""Tool calls in Gemma 4's notation: `<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`.

Owns: `GemmaCalls`. Runs in: front ends. Source: Gemma 4's chat template. Keys stand bare, texts between
two quote tokens with nothing escaped, everything else is as in JSON.
"""

import re
from typing import Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.json_stream import is_json
from ds4.text.tool_calls import EventSink
from ds4.text.tools.json_calls import begin_call, read_close
from ds4.text.tools.members import escaped, read_name

_OPENER: Final = "<|tool_call>"
_CLOSER: Final = "<tool_call|>"
_QUOTE: Final = '<|"|>'
_QUOTES: Final = Markers((_QUOTE,))
_CLOSERS: Final = Markers((_CLOSER,))
_KEY: Final = re.compile(r"[^:,{}\[\]<>\r\n]*")
_SCALAR: Final = re.compile(r"[^,{}\[\]<>\s]*")
_MAX_WORD_CHARS: Final = 4096
_MAX_DEPTH: Final = 64


class GemmaCalls:
    """Calls, each between its own two markers. Immutable."""

    openers: Final = (_OPENER,)
    markers: Final = (_OPENER, _CLOSER, _QUOTE)
    is_bare: Final = False

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """One call."""
        yield from source.skip(SPACE)
        yield from source.literal("call:")
        name = yield from read_name(source)
        if (yield from source.peek()) != "{" or not begin_call(source, sink, name):
            return False
        if not (yield from _value(source, sink, 0)):
            # Wrong, and shown as it stands: the client tells the model.
            yield from source.until(_CLOSERS, sink.arguments, trims=True)
        else:
            yield from read_close(source, _CLOSERS)
        sink.end()
        return True


def _value(source: ArrivingText, sink: EventSink, depth: int) -> Waiting[bool]:
    """Pass one value on as JSON. False where it turned out wrong; what was read was passed on."""
    if (yield from source.literal(_QUOTE)):
        sink.arguments('"')
        if (yield from source.until(_QUOTES, lambda text: sink.arguments(escaped(text)))) is None:
            return False
        sink.arguments('"')
        return True
    character = yield from source.peek()
    if depth < _MAX_DEPTH and character in ("{", "["):
        return (yield from _members(source, sink, "}" if character == "{" else "]", depth))
    word = yield from source.take_run(_SCALAR, _MAX_WORD_CHARS)
    if not word:
        return False
    sink.arguments({"None": "null", "True": "true", "False": "false"}.get(word, word))
    return is_json(word) or word in ("None", "True", "False")


def _members(source: ArrivingText, sink: EventSink, end: str, depth: int) -> Waiting[bool]:
    sink.arguments((yield from source.take()))
    is_first = True
    while True:
        yield from source.skip(SPACE + ",")
        if (yield from source.literal(end)):
            sink.arguments(end)
            return True
        if not (yield from source.peek()):
            return False
        if not is_first:
            sink.arguments(", ")
        is_first = False
        if end == "}":
            if (yield from source.literal(_QUOTE)):
                pieces: list[str] = []
                yield from source.until(_QUOTES, pieces.append)
                key: str | None = "".join(pieces)
            else:
                key = yield from source.take_run(_KEY, _MAX_WORD_CHARS)
            if not key or not (yield from source.literal(":")):
                sink.arguments(key or "")
                return False
            sink.arguments(f'"{escaped(key.strip(SPACE))}": ')
            yield from source.skip(SPACE)
        if not (yield from _value(source, sink, depth + 1)):
            return False
