"""Harmony, gpt-oss's format: an output of several messages, each with a channel.

Owns: `HarmonyReader`. Runs in: front ends. Source: OpenAI's description of the harmony response format,
and gpt-oss's chat template.

`analysis` is reasoning, `final` the answer; a message to `functions.name` is a tool call, any other one
on `commentary` is text for the user. The last message ends with the stream: its end markers end the
answer and never arrive.
"""

import re
from typing import Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.json_stream import json_value
from ds4.text.tool_calls import EventSink

MARKERS: Final = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
)
# What ends the reasoning and begins the answer.
CLOSING: Final = "<|end|><|start|>assistant<|channel|>final<|message|>"
_HEADER_BEGINS: Final = Markers(("<|start|>", "<|channel|>"))
_HEADER_ENDS: Final = Markers(("<|message|>", "<|end|>", "<|call|>", "<|return|>"))
_BODY_ENDS: Final = Markers(("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"))
_RECIPIENT: Final = re.compile(r"to=(functions\.)?([^\s<>]+)")
_ANALYSIS: Final = re.compile(r"<\|channel\|>\s*analysis\b")


class HarmonyReader:
    """Reads a whole output. Immutable."""

    def read(self, source: ArrivingText, sink: EventSink, *, has_tools: bool) -> Waiting[None]:
        """All messages up to the end of the stream; text outside of any message is the answer."""
        begin = yield from self._between(source, sink)
        while begin is not None:
            end = yield from self._message(source, sink, begin, has_tools=has_tools)
            begin = end if end in _HEADER_BEGINS.texts else (yield from self._between(source, sink))

    @staticmethod
    def _between(source: ArrivingText, sink: EventSink) -> Waiting[str | None]:
        """Read the marker that begins the next header; None at the end of the stream."""
        source.mark()
        yield from source.skip(SPACE)
        begin = yield from source.marker(_HEADER_BEGINS)
        if begin is None and (yield from source.literal("to=")):  # the prompt ended inside of the header
            begin = "to="
        if begin is not None:
            source.forget_mark()
            return begin
        source.rewind()
        return (yield from source.until(_HEADER_BEGINS, sink.text))

    @staticmethod
    def _message(
        source: ArrivingText, sink: EventSink, begin: str, *, has_tools: bool
    ) -> Waiting[str | None]:
        """Pass one message on. Returns its end marker, None at the end of the stream."""
        pieces = [begin]
        end = yield from source.until(_HEADER_ENDS, pieces.append)
        if end != "<|message|>":
            return end  # a header of nothing
        header = "".join(pieces)
        name = _called(header, sink) if has_tools else None
        if name is not None:
            sink.begin(name)
            yield from source.skip(SPACE)
            end = yield from source.marker(_BODY_ENDS)
            if end is not None or not (yield from source.peek()):
                sink.arguments("{}")
            else:
                yield from json_value(source, sink.arguments)  # a marker in a string is no marker
                end = yield from source.until(_BODY_ENDS, sink.arguments, trims=True)
            sink.end()
            return end
        sink.is_reasoning = _ANALYSIS.search(header) is not None
        end = yield from source.until(_BODY_ENDS, sink.reasoning if sink.is_reasoning else sink.text)
        sink.is_reasoning = False
        return end


def _called(header: str, sink: EventSink) -> str | None:
    """The tool that a message is for, if it is for one."""
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        return None
    namespace, name = recipient.groups()
    return name if namespace or name in sink.tools else None
