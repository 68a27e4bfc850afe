"""A model's output taken apart: reasoning, answer, tool calls, as one stream of events.

Owns: `OutputParser`, `OutputFormat`. Runs in: front ends, one parser for each stream. Source: this
project. Every dialect's endpoint consumes these events; none of them reads tags itself.

The events of an output, joined, do not depend on how its text was cut into pieces. White space next
to a tag belongs to the format. What looks like a call and is none is text; nothing is lost, but for the head
of a call that the limit of tokens cut off before its name was known.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.harmony import CLOSING as HARMONY_CLOSING
from ds4.text.harmony import MARKERS as HARMONY_MARKERS
from ds4.text.harmony import HarmonyReader
from ds4.text.json_stream import is_json
from ds4.text.reasoning import ReasoningReader, ThinkTags
from ds4.text.tool_calls import (
    ArgumentsDelta,
    CallBegin,
    EventSink,
    OutputEvent,
    ParameterTypes,
    TextDelta,
    ToolFormat,
)

_NOTHING: Final = Markers(())
_MAX_RECOVERIES: Final = 16


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How one model writes reasoning and tool calls. Fixed at start (ds4/text/output_format.py)."""

    think: ThinkTags | None = None
    tools: ToolFormat | None = None
    harmony: HarmonyReader | None = None  # then the other two are not

    def parser(
        self,
        *,
        rendered: str,
        tools: Mapping[str, ParameterTypes] | None = None,
        is_parallel: bool = True,
        is_forced: bool = False,
    ) -> "OutputParser | None":
        """A parser for one stream of this prompt; None where there can be nothing but text.

        `tools` is what `tool_types` says of them: it takes milliseconds where there are many, and every
        choice has a parser. `is_forced`: the answer has to be a call.
        """
        sink = EventSink(tools or {}, is_parallel=is_parallel)
        source = ArrivingText()
        if self.harmony is not None:
            return OutputParser(source, sink, self.harmony.read(source, sink, has_tools=bool(tools)))
        if self.think is None and not tools:
            return None
        sink.is_reasoning = self.think is not None and self.think.is_open(rendered)
        reasoning = ReasoningReader(self.think) if self.think is not None else None
        run = _read(source, sink, reasoning, self.tools if tools else None, is_forced=is_forced)
        return OutputParser(source, sink, run)

    @property
    def closing(self) -> str:
        """What ends reasoning that is open; empty for models that do not reason."""
        if self.harmony is not None:
            return HARMONY_CLOSING
        return self.think.closing() if self.think is not None else ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that must be shown to a parser, control tokens included."""
        think = (self.think.open, self.think.close) if self.think is not None else ()
        tools = self.tools.markers if self.tools is not None else ()
        return (*think, *tools, *(HARMONY_MARKERS if self.harmony is not None else ()))


class OutputParser:
    """One stream. Owned by whoever reads that stream."""

    def __init__(self, source: ArrivingText, sink: EventSink, run: Waiting[None]) -> None:
        self._source = source
        self._sink = sink
        self._run = run
        self._is_over = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the last text that was pushed ended inside the reasoning."""
        return self._sink.is_reasoning

    @property
    def is_done(self) -> bool:
        """Whether the only call that was allowed is complete: nothing counts any more."""
        return self._sink.is_full

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._sink.num_calls > 0

    def feed(self, text: str) -> None:
        """More of the output."""
        if text and not self._is_over and not self._sink.is_full:
            self._source.push(text)
            self._resume()

    def end(self, *, is_cut: bool = False) -> None:
        """The output is over, or cut off; what was held back is decided."""
        if not self._is_over:
            self._source.is_cut = is_cut
            self._source.end()
            self._resume()

    def drain(self) -> list[OutputEvent]:
        """The events since the last call, adjacent deltas of one kind joined."""
        return self._sink.drain()

    def push(self, text: str) -> list[OutputEvent]:
        """`feed` and `drain`."""
        self.feed(text)
        return self.drain()

    def finish(self) -> list[OutputEvent]:
        """`end` and `drain`."""
        self.end()
        return self.drain()

    def _resume(self) -> None:
        if next(self._run, self) is self:
            self._is_over = True


def _read(
    source: ArrivingText,
    sink: EventSink,
    reasoning: ReasoningReader | None,
    tools: ToolFormat | None,
    *,
    is_forced: bool = False,
) -> Waiting[None]:
    """The whole output: reasoning, then text with calls in it."""
    if reasoning is not None:
        thought: list[str] = []

        def reason(text: str) -> None:
            sink.reasoning(text)
            if tools is not None:
                thought.append(text)

        never_ended = yield from reasoning.read(source, sink, reason, is_open=sink.is_reasoning)
        if never_ended and tools is not None:
            _recover("".join(thought), sink, tools)
        del thought
    openers = _NOTHING if tools is None else Markers(tools.openers)
    if tools is not None and tools.is_bare:
        yield from _block(source, sink, tools, "", is_forced=is_forced)
    while True:
        opener = yield from source.until(openers, sink.text, trims=tools is not None)
        if opener is None:
            return
        assert tools is not None
        yield from _block(source, sink, tools, opener, is_forced=is_forced)


def _recover(thought: str, sink: EventSink, tools: ToolFormat) -> None:
    """Take calls that stand at the very end of reasoning that never ended for what they are.

    Models forget to close their reasoning first. All of it has gone out as reasoning already.
    """
    openers = Markers(tools.openers)
    match = openers.search(thought, 0)
    for _ in range(_MAX_RECOVERIES):
        if match is None:
            return
        source, found = ArrivingText(), EventSink(sink.tools)
        parser = OutputParser(source, found, _read(source, found, None, tools))
        events = [*parser.push(thought[match.start() :]), *parser.finish()]
        if not any(isinstance(event, TextDelta) for event in events) and _are_whole(events):
            for event in events:
                if isinstance(event, CallBegin):
                    sink.begin(event.name)
                elif isinstance(event, ArgumentsDelta):
                    sink.arguments(event.text)
                else:
                    sink.end()
            return
        match = openers.search(thought, match.end())


def _are_whole(events: Sequence[OutputEvent]) -> bool:
    """Whether these are calls whose arguments are JSON."""
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ArgumentsDelta):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    return bool(arguments) and all(map(is_json, arguments.values()))


def _block(
    source: ArrivingText, sink: EventSink, tools: ToolFormat, opener: str, *, is_forced: bool
) -> Waiting[None]:
    """Calls, or the opener as text where it opens none."""
    before = source.trimmed if opener else ""
    source.mark()
    if (yield from tools.calls(source, sink, opener)):
        source.forget_mark()
        yield from source.skip(SPACE)
        return
    if source.is_cut and source.is_starved and (opener or is_forced):
        # The head of a call that the limit of tokens cut off: nobody can read it.
        yield from source.until(_NOTHING, lambda text: None)
        return
    is_hopeless = source.is_starved or source.is_too_long
    source.rewind()
    sink.text(before + opener)
    if is_hopeless:
        # All the rest was read and is no call. To look for others inside would read it once more for
        # each opener in it.
        yield from source.until(_NOTHING, sink.text)
