"""A model's output taken apart: reasoning, answer, tool calls, as one stream of events.

Owns: `OutputParser`, `OutputFormat`. Runs in: front ends, one parser for each stream. Source: this
project. Every dialect's endpoint consumes these events; none of them reads tags itself.

The events of an output, joined, do not depend on how its text was cut into pieces. White space next
to a tag belongs to the format. What looks like a call and is none is text; nothing is lost.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.reasoning import ReasoningReader, ThinkTags
from ds4.text.tool_calls import EventSink, OutputEvent, ToolFormat, tool_types

_NOTHING: Final = Markers(())


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How one model writes reasoning and tool calls. Fixed at start (ds4/text/output_format.py)."""

    think: ThinkTags | None = None
    tools: ToolFormat | None = None

    def parser(
        self,
        *,
        rendered: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_parallel: bool = True,
        id_prefix: str = "call_",
    ) -> "OutputParser | None":
        """A parser for one stream of this prompt; None where there can be nothing but text."""
        think = self.think
        if think is None and not tools:
            return None
        return OutputParser(
            ReasoningReader(think) if think is not None else None,
            self.tools if tools else None,
            is_open=think is not None and think.is_open(rendered),
            sink=EventSink(tool_types(tools or ()), is_parallel=is_parallel, id_prefix=id_prefix),
        )


class OutputParser:
    """One stream. Owned by whoever reads that stream.

    `is_reasoning`: the last text that was pushed ended inside the reasoning. `is_done`: nothing that is
    pushed from now on counts, so that generating may end. `has_calls`: the answer is one of tool calls.
    """

    def __init__(
        self, reasoning: ReasoningReader | None, tools: ToolFormat | None, *, is_open: bool, sink: EventSink
    ) -> None:
        self.is_reasoning = is_open
        self._reasoning = reasoning
        self._tools = tools
        self._openers = Markers(tools.openers if tools is not None else ())
        self._source = ArrivingText()
        self._sink = sink
        self._run = self._read()
        self._is_over = False

    @property
    def is_done(self) -> bool:
        """Whether the only call that was allowed is complete."""
        return self._sink.is_full

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._sink.num_calls > 0

    def push(self, text: str) -> list[OutputEvent]:
        """The events that `text` completes."""
        if not text or self._is_over or self._sink.is_full:
            return []
        self._source.push(text)
        self._resume()
        return self._sink.drain()

    def finish(self) -> list[OutputEvent]:
        """The events of what was held back, at the end of the stream."""
        if not self._is_over:
            self._source.end()
            self._resume()
        return self._sink.drain()

    def _resume(self) -> None:
        if next(self._run, self) is self:
            self._is_over = True

    def _read(self) -> Waiting[None]:
        """The whole output."""
        if self._reasoning is not None:
            yield from self._reasoning.read(self._source, self._sink, is_open=self.is_reasoning)
        self.is_reasoning = False
        tools = self._tools
        if tools is not None and tools.is_bare:
            yield from self._block(tools, "")
        while True:
            opener = yield from self._source.until(self._openers, self._sink.text, trims=tools is not None)
            if opener is None:
                return
            assert tools is not None
            yield from self._block(tools, opener)

    def _block(self, tools: ToolFormat, opener: str) -> Waiting[None]:
        """Calls, or the opener as text where it opens none."""
        source, sink = self._source, self._sink
        before = source.trimmed if opener else ""
        source.mark()
        if (yield from tools.calls(source, sink, opener)):
            source.forget_mark()
            yield from source.skip(SPACE)
            return
        is_hopeless = source.is_starved or source.is_too_long
        source.rewind()
        sink.text(before + opener)
        if is_hopeless:
            # All the rest was read and is no call. To look for others inside would read it once more for
            # each opener in it.
            yield from source.until(_NOTHING, sink.text)
