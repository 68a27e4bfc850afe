"""Tool calls written as JSON objects with name and arguments, between markers or without any.

Owns: `JsonCalls`, `BareOr`, and what all families share: how a call begins and how its JSON arguments pass.
Runs in: front ends. Source: the chat templates of Hermes and Qwen (`<tool_call>`), Llama 3
(`<|python_tag|>` or nothing), Mistral (`[TOOL_CALLS]`), Granite, Phi, Cohere.
"""

import re
from typing import Any, Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.json_stream import decoded, json_string, json_value
from ds4.text.tool_calls import EventSink, ToolFormat

_NAMES: Final = frozenset({"name", "tool_name", "function"})
_ARGUMENTS: Final = frozenset({"arguments", "parameters", "args"})
_ENVELOPE: Final = _NAMES | _ARGUMENTS | {"type", "id", "tool_call_id"}
# Models close more brackets than they opened; before a closing marker that means nothing.
_REST: Final = re.compile(r"[ \t\r\n}\]]*")
_MAX_REST_CHARS: Final = 64


def begin_call(source: ArrivingText, sink: EventSink, name: str, *, known_only: bool = False) -> bool:
    """Begin a call, unless that is out of question; the text that was held back for it may go."""
    if not name or source.is_too_long or (known_only and name not in sink.tools):
        return False
    source.forget_mark()
    sink.begin(name)
    return True


def pass_arguments(source: ArrivingText, sink: EventSink, ends: Markers) -> Waiting[bool]:
    """Pass the arguments of a call that has begun. False where they are wrong JSON.

    Then they go out as they stand, up to an end marker, which is read: clients show it to the model.
    """
    if (yield from json_value(source, sink.arguments)):
        return True
    yield from source.until(ends, sink.arguments, trims=True)
    return False


def read_close(source: ArrivingText, closers: Markers) -> Waiting[None]:
    """Read the marker that closes a block, if it is there, and surplus brackets before it."""
    source.mark()
    rest = yield from source.take_run(_REST, _MAX_REST_CHARS)
    is_close = rest is not None and (yield from source.marker(closers)) is not None
    if is_close or not (yield from source.peek()):
        source.forget_mark()
    else:
        source.rewind()


class JsonCalls:
    """One family's markers. Immutable.

    `is_bare`: a whole output may be calls without a marker. Then the name must be that of a tool, since
    anything may begin with a bracket; `known_only` asks the same of calls with a marker.
    """

    def __init__(
        self,
        openers: tuple[str, ...],
        closers: tuple[str, ...] = (),
        *,
        is_bare: bool = False,
        known_only: bool = False,
    ) -> None:
        self.openers: Final = openers
        self.markers: Final = openers + closers
        self.is_bare: Final = is_bare
        self._known_only = known_only
        self._closers = Markers(closers)
        self._ends = Markers(closers or openers)

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """One object, a list of them, or several after each other."""
        known_only = self._known_only or not opener
        between = SPACE if self._closers.texts else SPACE + ",;"
        yield from source.skip(SPACE)
        is_list = yield from source.literal("[")
        if is_list:
            between = SPACE + ","
            yield from source.skip(SPACE)
        if not (yield from self._call(source, sink, known_only=known_only)):
            return False
        while True:
            source.mark()
            yield from source.skip(between)
            if (yield from source.peek()) != "{":
                break
            if not (yield from self._call(source, sink, known_only=known_only)):
                break
        source.rewind()
        if is_list:
            yield from source.skip(SPACE)
            yield from source.literal("]")
        yield from read_close(source, self._closers)
        return True

    def _call(self, source: ArrivingText, sink: EventSink, *, known_only: bool) -> Waiting[bool]:
        """One object. False where it is no call: the caller goes back to its mark."""
        name: str | None = None
        kept = "{}"
        has_begun = False
        is_right = yield from source.literal("{")
        while is_right:
            yield from source.skip(SPACE)
            if (yield from source.literal("}")):
                break
            key = yield from _key(source)
            if known_only and not has_begun and key not in _ENVELOPE:
                return False  # some other JSON, which need not be held back to its end
            is_object = key in _ARGUMENTS and (yield from source.peek()) == "{"
            if is_object and name is not None and not has_begun:
                if not begin_call(source, sink, name, known_only=known_only):
                    return False
                has_begun = True
                is_right = yield from pass_arguments(source, sink, self._ends)
            else:
                pieces: list[str] = []
                is_right = key is not None and (yield from json_value(source, pieces.append))
                text = "".join(pieces)
                if key in _NAMES and name is None:
                    value = decoded(text)
                    name = value if isinstance(value, str) else None
                    if known_only and name not in sink.tools:
                        return False
                elif key in _ARGUMENTS:
                    kept = _object_text(text)
            yield from source.skip(SPACE + ",")
        if not has_begun:
            if not is_right or name is None or not begin_call(source, sink, name, known_only=known_only):
                return False
            sink.arguments(kept)
        sink.end()
        return True


class BareOr:
    """A family's calls, and bare JSON where the output begins. Immutable."""

    is_bare: Final = True

    def __init__(self, family: ToolFormat, bare: JsonCalls) -> None:
        self.openers: Final = family.openers
        self.markers: Final = family.markers
        self._family = family
        self._bare = bare

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """What the opener announces."""
        return (yield from (self._family if opener else self._bare).calls(source, sink, opener))


def _key(source: ArrivingText) -> Waiting[str | None]:
    """The key of the next member, read up to its value; None where none stands here."""
    pieces: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from json_string(source, pieces.append)):
        return None
    yield from source.skip(SPACE)
    if not (yield from source.literal(":")):
        return None
    yield from source.skip(SPACE)
    key = decoded("".join(pieces))
    return key if isinstance(key, str) else None


def _object_text(text: str) -> str:
    """Arguments as the text of an object; some models write that text as a JSON string."""
    value: Any = decoded(text)
    if isinstance(value, str) and isinstance(decoded(value), dict):
        return value
    return "{}" if value is None else text
