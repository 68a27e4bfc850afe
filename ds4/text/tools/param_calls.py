"""Tool calls as `<function name="…">` elements with `<param name="…">` elements.

Owns: `ParamCalls`. Runs in: front ends. Source: the chat template of MiniCPM 5: texts that hold markup
stand in CDATA sections, other values as Python prints them.
"""

from typing import Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.tool_calls import EventSink
from ds4.text.tools.json_calls import begin_call
from ds4.text.tools.members import ObjectWriter, read_member, read_name

_FUNCTION: Final = '<function name="'
_PARAM: Final = '<param name="'
_MEMBERS: Final = Markers((_PARAM, "</function>"))
_ENDS: Final = Markers(("</param>",))
_CDATA: Final = "<![CDATA["
_CDATA_ENDS: Final = Markers(("]]></param>",))


class ParamCalls:
    """Elements without anything around them. Immutable."""

    openers: Final = (_FUNCTION,)
    markers: Final = (_FUNCTION, "</function>", _PARAM, "</param>")
    is_bare: Final = False

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """One call."""
        name = yield from read_name(source)
        if not (yield from source.literal('">')) or not begin_call(source, sink, name):
            return False
        arguments = ObjectWriter(sink.arguments)
        while True:
            yield from source.skip(SPACE)
            if (yield from source.marker(_MEMBERS)) != _PARAM:
                break
            key = yield from read_name(source)
            yield from source.literal('">')
            arguments.member(key)
            ends = _CDATA_ENDS if (yield from source.literal(_CDATA)) else _ENDS
            if (yield from read_member(source, sink, ends, types=sink.types(name, key))) is None:
                sink.end()
                return True
        arguments.close()
        sink.end()
        return True
