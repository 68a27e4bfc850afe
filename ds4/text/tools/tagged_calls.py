"""Tool calls whose arguments stand between tags: Qwen3-Coder's and Seed's, GLM's.

Owns: `FunctionTagCalls`, `ArgumentTagCalls`. Runs in: front ends. Source: the chat templates of these
models. `<function=name>` holds `<parameter=key>` elements, each value on lines of its own;
`<tool_call>name` holds pairs of `<arg_key>` and `<arg_value>`.
"""

from typing import Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.tool_calls import EventSink
from ds4.text.tools.json_calls import begin_call, read_close
from ds4.text.tools.members import ObjectWriter, read_member, read_name

_FUNCTION: Final = "<function="
_PARAMETER: Final = "<parameter="


class FunctionTagCalls:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`. Immutable."""

    is_bare: Final = False

    def __init__(self, opener: str, closer: str) -> None:
        self.openers: Final = (opener, _FUNCTION)  # models leave the outer one out
        self.markers: Final = (opener, closer)
        self._members = Markers((_PARAMETER, "</function>"))
        # A missing end tag is the most frequent mistake.
        self._ends = Markers(("</parameter>", _PARAMETER, "</function>"))
        self._closers = Markers((closer,))

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """All `<function=` elements up to the outer end tag."""
        if opener != _FUNCTION:
            yield from source.skip(SPACE)
            if not (yield from source.literal(_FUNCTION)):
                return False
        if not (yield from self._call(source, sink)):
            return False
        while True:
            source.mark()
            yield from source.skip(SPACE)
            if not (yield from source.literal(_FUNCTION)) or not (yield from self._call(source, sink)):
                break
        source.rewind()
        yield from read_close(source, self._closers)
        return True

    def _call(self, source: ArrivingText, sink: EventSink) -> Waiting[bool]:
        name = yield from read_name(source)
        if not (yield from source.literal(">")) or not begin_call(source, sink, name):
            return False
        arguments = ObjectWriter(sink.arguments)
        yield from source.skip(SPACE)
        tag = yield from source.marker(self._members)
        while tag == _PARAMETER:
            key = yield from read_name(source)
            yield from source.literal(">")
            arguments.member(key)
            tag = yield from read_member(
                source, sink, self._ends, types=sink.types(name, key), has_lines=True
            )
            if tag is None:
                sink.end()
                return True
            if tag == "</parameter>":
                yield from source.skip(SPACE)
                tag = yield from source.marker(self._members)
        arguments.close()
        sink.end()
        return True


class ArgumentTagCalls:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`. Immutable."""

    is_bare: Final = False

    def __init__(self, opener: str = "<tool_call>", closer: str = "</tool_call>") -> None:
        self.openers: Final = (opener,)
        self.markers: Final = (opener, closer, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
        self._members = Markers(("<arg_key>", closer))
        self._ends = Markers(("</arg_value>", closer))
        self._closer = closer

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """One call."""
        yield from source.skip(SPACE)
        name = yield from read_name(source)
        yield from source.skip(SPACE)
        tag = yield from source.marker(self._members)
        if tag is None or not begin_call(source, sink, name):
            return False
        arguments = ObjectWriter(sink.arguments)
        while tag == "<arg_key>":
            yield from source.skip(SPACE)
            key = yield from read_name(source)
            yield from source.skip(SPACE)
            yield from source.literal("</arg_key>")
            yield from source.skip(SPACE)
            yield from source.literal("<arg_value>")
            arguments.member(key)
            tag = yield from read_member(source, sink, self._ends, types=sink.types(name, key))
            if tag is None:
                sink.end()
                return True
            if tag == "</arg_value>":
                yield from source.skip(SPACE)
                tag = yield from source.marker(self._members)
        arguments.close()
        sink.end()
        return True
