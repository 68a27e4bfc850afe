"""Tool calls as a JSON list of objects whose one key is the name: `[{"look": {"far": true}}, …]`.

Owns: `KeyedCalls`. Runs in: front ends. Source: the chat template of Apertus.
"""

from typing import Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.json_stream import decoded, json_string
from ds4.text.tool_calls import EventSink
from ds4.text.tools.json_calls import begin_call, pass_arguments, read_close


class KeyedCalls:
    """One family's markers. Immutable."""

    is_bare: Final = False

    def __init__(self, opener: str, closer: str) -> None:
        self.openers: Final = (opener,)
        self.markers: Final = (opener, closer)
        self._closers = Markers((closer,))

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """All calls of one block."""
        num_before = sink.num_calls
        yield from source.skip(SPACE + "[")
        while (yield from self._call(source, sink)):
            source.mark()
            yield from source.skip(SPACE + ",")
        if sink.num_calls == num_before:
            return False
        source.rewind()
        yield from source.skip(SPACE + "]")
        yield from read_close(source, self._closers)
        return True

    def _call(self, source: ArrivingText, sink: EventSink) -> Waiting[bool]:
        if not (yield from source.literal("{")):
            return False
        yield from source.skip(SPACE)
        pieces: list[str] = []
        if (yield from source.peek()) != '"' or not (yield from json_string(source, pieces.append)):
            return False
        yield from source.skip(SPACE)
        if not (yield from source.literal(":")):
            return False
        yield from source.skip(SPACE)
        name = decoded("".join(pieces))
        if (yield from source.peek()) != "{" or not begin_call(source, sink, name):
            return False
        if (yield from pass_arguments(source, sink, self._closers)):
            yield from source.skip(SPACE)
            yield from source.literal("}")
        sink.end()
        return True
