"""Tool calls as elements in elements, every tag behind a marker: MiniMax M3.

Owns: `ElementCalls`. Runs in: front ends. Source: the chat template of MiniMax M3. An argument is an
element of its name; objects are elements of their keys, lists are `item` elements, all else is text.
"""

from typing import Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.tool_calls import EventSink
from ds4.text.tools.json_calls import begin_call
from ds4.text.tools.members import ObjectWriter, escaped, read_member, read_name

_MAX_DEPTH: Final = 64
_ITEM: Final = "item"
_UNKNOWN: Final[frozenset[str]] = frozenset()


class ElementCalls:
    """One block with `invoke` elements. Immutable. `space` stands before every tag."""

    is_bare: Final = False

    def __init__(self, space: str) -> None:
        self.openers: Final = (f"{space}<tool_call>",)
        self.markers: Final = (space, "<tool_call>", "</tool_call>")
        self._begin = f"{space}<"
        self._invoke = f'{space}<invoke name="'
        self._ends = Markers((f"{space}</",))
        self._closers = Markers((f"{space}</tool_call>",))

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """All calls of one block."""
        num_before = sink.num_calls
        while True:
            if sink.num_calls > num_before:
                source.mark()
            yield from source.skip(SPACE)
            if not (yield from source.literal(self._invoke)) or not (yield from self._call(source, sink)):
                break
        if sink.num_calls == num_before:
            return False
        source.rewind()
        yield from source.skip(SPACE)
        yield from source.marker(self._closers)
        return True

    def _call(self, source: ArrivingText, sink: EventSink) -> Waiting[bool]:
        name = yield from read_name(source)
        if not (yield from source.literal('">')) or not begin_call(source, sink, name):
            return False
        arguments = ObjectWriter(sink.arguments)
        yield from source.skip(SPACE)
        while (yield from self._child(source)):
            key = yield from self._open(source)
            arguments.member(key)
            if not (yield from self._element(source, sink, sink.types(name, key), 0)):
                sink.end()
                return True
            yield from source.skip(SPACE)
        arguments.close()
        yield from self._close(source)
        sink.end()
        return True

    def _child(self, source: ArrivingText) -> Waiting[bool]:
        """Whether an element begins here."""
        head = yield from source.peek(len(self._begin) + 1)
        return head.startswith(self._begin) and len(head) > len(self._begin) and head[-1] != "/"

    def _open(self, source: ArrivingText) -> Waiting[str]:
        yield from source.literal(self._begin)
        name = yield from read_name(source)
        yield from source.literal(">")
        return name

    def _close(self, source: ArrivingText) -> Waiting[None]:
        if (yield from source.marker(self._ends)) is not None:
            yield from read_name(source)
            yield from source.literal(">")

    def _element(
        self, source: ArrivingText, sink: EventSink, types: frozenset[str], depth: int
    ) -> Waiting[bool]:
        """Pass an element's content on as JSON, its end tag included. False at the end of the stream."""
        if depth == _MAX_DEPTH or not (yield from self._child(source)):
            if (yield from read_member(source, sink, self._ends, types=types)) is None:
                return False
            yield from read_name(source)
            yield from source.literal(">")
            return True
        closing = ""
        while (yield from self._child(source)):
            key = yield from self._open(source)
            if not closing:
                closing = "]" if key == _ITEM else "}"
                sink.arguments("[" if key == _ITEM else "{")
            else:
                sink.arguments(", ")
            if closing == "}":
                sink.arguments(f'"{escaped(key)}": ')
            if not (yield from self._element(source, sink, _UNKNOWN, depth + 1)):
                return False
            yield from source.skip(SPACE)
        sink.arguments(closing)
        yield from self._close(source)
        return True
