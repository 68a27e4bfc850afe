"""Tool calls of which markers tell the name and where the JSON arguments begin.

Owns: `MarkedCalls`, `MistralCalls`, `LlamaCalls`. Runs in: front ends. Source: the chat templates of
DeepSeek V3 and R1, Kimi K2, Solar, Mistral, Llama 3 and Functionary 3.1.
"""

import re
from typing import Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.tool_calls import EventSink
from ds4.text.tools.json_calls import JsonCalls, begin_call, pass_arguments, read_close
from ds4.text.tools.members import read_name

_FENCE: Final = "```"
_KIMI_ID: Final = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")


class MarkedCalls:
    """Calls, each with its own markers, in a section that has two more. Immutable.

    `name_open`: the marker before the name, where an id stands first.
    """

    is_bare: Final = False

    def __init__(
        self, section: tuple[str, str], call_open: str, middle: str, call_close: str, *, name_open: str = ""
    ) -> None:
        self.openers: Final = (section[0], call_open)
        self.markers: Final = (*section, call_open, middle, call_close, *filter(None, (name_open,)))
        self._name_open = name_open
        self._open = call_open
        self._middle = middle
        self._ends = Markers((call_close, section[1]))
        self._close = Markers((call_close,))
        self._section_close = Markers((section[1],))

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """All calls of a section."""
        if opener != self._open:
            yield from source.skip(SPACE)
            if not (yield from source.literal(self._open)):
                return False
        if not (yield from self._call(source, sink)):
            return False
        while True:
            source.mark()
            yield from source.skip(SPACE)
            if not (yield from source.literal(self._open)) or not (yield from self._call(source, sink)):
                break
        source.rewind()
        yield from read_close(source, self._section_close)
        return True

    def _call(self, source: ArrivingText, sink: EventSink) -> Waiting[bool]:
        yield from source.skip(SPACE)
        name = yield from read_name(source)
        if self._name_open:
            if not (yield from source.literal(self._name_open)):
                return False
            name = yield from read_name(source)
        yield from source.skip(SPACE)
        if not (yield from source.literal(self._middle)):
            return False
        yield from source.skip(SPACE)
        if (yield from source.peek()) != "{":  # DeepSeek V3 and R1: the type, then the name, then a fence
            name = yield from read_name(source)
            yield from source.skip(SPACE)
            yield from source.literal(_FENCE)
            yield from source.literal("json")
            yield from source.skip(SPACE)
            if (yield from source.peek()) != "{":
                return False
        match = _KIMI_ID.fullmatch(name)
        if match is None or not begin_call(source, sink, match.group(1)):
            return False
        if (yield from pass_arguments(source, sink, self._ends)):
            source.mark()
            yield from source.skip(SPACE)
            yield from source.literal(_FENCE)
            yield from source.skip(SPACE)
            if (yield from source.marker(self._close)) is None:
                source.rewind()
        sink.end()
        return True


class MistralCalls:
    """`[TOOL_CALLS]` with a JSON list of calls, or with name, `[ARGS]`, arguments. Immutable."""

    openers: Final = ("[TOOL_CALLS]",)
    markers: Final = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    is_bare: Final = False

    def __init__(self) -> None:
        self._list = JsonCalls(self.openers)
        self._ends = Markers(self.openers)

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """A list of calls, or one call: each further one has its own opener."""
        yield from source.skip(SPACE)
        if (yield from source.peek()) in ("[", "{"):
            return (yield from self._list.calls(source, sink, opener))
        name = yield from read_name(source)
        yield from source.skip(SPACE)
        if (yield from source.literal("[CALL_ID]")):
            yield from source.skip(SPACE)
            yield from read_name(source)
            yield from source.skip(SPACE)
        yield from source.literal("[ARGS]")
        yield from source.skip(SPACE)
        if (yield from source.peek()) != "{" or not begin_call(source, sink, name):
            return False
        yield from pass_arguments(source, sink, self._ends)
        sink.end()
        return True


class LlamaCalls:
    """JSON with or without `<|python_tag|>`, or `<function=name>` around the arguments. Immutable."""

    openers: Final = ("<|python_tag|>", "<function=")
    markers: Final = ("<|python_tag|>",)
    is_bare: Final = True

    def __init__(self) -> None:
        self._objects = JsonCalls(self.openers)
        self._ends = Markers(("</function>",))

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """What the opener announces."""
        if opener != "<function=":
            return (yield from self._objects.calls(source, sink, opener))
        name = yield from read_name(source)
        if not (yield from source.literal(">")):
            return False
        yield from source.skip(SPACE)
        if (yield from source.peek()) != "{" or not begin_call(source, sink, name):
            return False
        if (yield from pass_arguments(source, sink, self._ends)):
            yield from read_close(source, self._ends)
        sink.end()
        return True
