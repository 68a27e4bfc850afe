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
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`. Immutable.

    `suffix` ends every tag's name. Hunyuan has one, a separator after the name and a section around all.
    """

    is_bare: Final = False

    def __init__(self, suffix: str = "") -> None:
        opener, closer = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
        self._key, self._key_end = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
        self._value, self._value_end = f"<arg_value{suffix}>", f"</arg_value{suffix}>"
        self._separator = f"<tool_sep{suffix}>"
        self._call_open = opener
        section = (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>") if suffix else ()
        self.openers: Final = (*section[:1], opener)
        tags = (self._key, self._key_end, self._value, self._value_end)
        self.markers: Final = (opener, closer, *tags, *((self._separator, *section) if suffix else ()))
        self._members = Markers((self._key, closer))
        self._ends = Markers((self._value_end, closer))
        self._section_close = Markers(section[1:])

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """One call, and what closes the section after the last one."""
        yield from source.skip(SPACE)
        if opener != self._call_open:
            if not (yield from source.literal(self._call_open)):
                return False
            yield from source.skip(SPACE)
        if not (yield from self._call(source, sink)):
            return False
        if self._section_close.texts:
            yield from read_close(source, self._section_close)
        return True

    def _call(self, source: ArrivingText, sink: EventSink) -> Waiting[bool]:
        name = yield from read_name(source)
        yield from source.literal(self._separator)
        yield from source.skip(SPACE)
        tag = yield from source.marker(self._members)
        if tag is None or not begin_call(source, sink, name):
            return False
        arguments = ObjectWriter(sink.arguments)
        while tag == self._key:
            yield from source.skip(SPACE)
            key = yield from read_name(source)
            yield from source.skip(SPACE)
            yield from source.literal(self._key_end)
            yield from source.skip(SPACE)
            yield from source.literal(self._value)
            arguments.member(key)
            tag = yield from read_member(source, sink, self._ends, types=sink.types(name, key))
            if tag is None:
                sink.end()
                return True
            if tag == self._value_end:
                yield from source.skip(SPACE)
                tag = yield from source.marker(self._members)
        arguments.close()
        sink.end()
        return True
