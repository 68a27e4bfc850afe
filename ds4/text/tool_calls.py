"""What a parser finds in a model's output, and the seam to the parsers of tool calls.

Owns: the output events, `EventSink`, `ToolFormat`, what is known of a request's tools. Runs in:
front ends. Source: this project; the events follow what OpenAI's and Anthropic's streams can say.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from ds4.text.arriving import ArrivingText, Waiting


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the reasoning before the answer."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """A tool call whose name is known; its arguments follow."""

    index: int
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """Nothing more comes for this call. Its arguments are as the model wrote them, right or wrong."""

    index: int


OutputEvent = TextDelta | ReasoningDelta | CallBegin | ArgumentsDelta | CallEnd

# JSON types that a tool's schema allows, for each of its parameters; empty: anything.
ParameterTypes = Mapping[str, frozenset[str]]
_PREFIX: Final = "call_"
_ANYTHING: Final[frozenset[str]] = frozenset()


class EventSink:
    """Collects the events of one stream, one kind after the other joined. Owned by its parser."""

    def __init__(self, tools: Mapping[str, ParameterTypes], *, is_parallel: bool = True) -> None:
        self.tools: Final = tools
        self.num_calls = 0
        self.is_reasoning = False  # what is being read belongs to the reasoning
        self.is_full = False  # the one call that was allowed is complete: nothing is taken any more
        self._is_parallel = is_parallel
        self._events: list[OutputEvent] = []
        self._kind: type[TextDelta | ReasoningDelta | ArgumentsDelta] | None = None
        self._texts: list[str] = []

    def text(self, text: str) -> None:
        """More of the answer."""
        self._add(TextDelta, text)

    def reasoning(self, text: str) -> None:
        """More of the reasoning."""
        self._add(ReasoningDelta, text)

    def begin(self, name: str) -> None:
        """A call begins. From here on it is one, whatever follows."""
        if not self.is_full:
            self._close()
            self._events.append(CallBegin(self.num_calls, _PREFIX + secrets.token_hex(12), name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self._add(ArgumentsDelta, text)

    def end(self) -> None:
        """The call that began last is over."""
        if not self.is_full:
            self._close()
            self._events.append(CallEnd(self.num_calls - 1))
            self.is_full = not self._is_parallel

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """The JSON types that this parameter may have; empty where anything goes or nothing is known."""
        return self.tools.get(tool, {}).get(parameter, _ANYTHING)

    def _add(self, kind: type[TextDelta | ReasoningDelta | ArgumentsDelta], text: str) -> None:
        if self.is_full or not text:
            return
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._texts.append(text)

    def _close(self) -> None:
        if self._kind is None:
            return
        text = "".join(self._texts)
        if self._kind is ArgumentsDelta:
            self._events.append(ArgumentsDelta(self.num_calls - 1, text))
        elif self._kind is TextDelta:
            self._events.append(TextDelta(text))
        else:
            self._events.append(ReasoningDelta(text))
        self._kind = None
        self._texts = []

    def drain(self) -> list[OutputEvent]:
        """Everything since the last call."""
        self._close()
        events, self._events = self._events, []
        return events


class ToolFormat(Protocol):
    """How one family of models writes tool calls. Immutable."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers that begin a block of calls."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers that a block is made of; where they are control tokens they must be shown."""
        ...

    @property
    def is_bare(self) -> bool:
        """Whether an output may be a call from its first character on, without any marker."""
        ...

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """Read one block. `opener` was read already; it is empty for a bare call.

        Returns whether this was one. Where it was not, no call has begun, and the text is content. A call
        that has begun is always ended.
        """
        ...


def tool_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, ParameterTypes]:
    """Name to parameter types, from tools in the form of OpenAI's API. Schemas may be anything."""
    found: dict[str, ParameterTypes] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        schema = function.get("parameters", function.get("input_schema"))
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        found[function["name"]] = (
            {name: _types(schema) for name, schema in properties.items()}
            if isinstance(properties, Mapping)
            else {}
        )
    return found


def _types(schema: Any, depth: int = 4) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return _ANYTHING
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(each for each in declared if isinstance(each, str))
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        if isinstance(options, list) and options:
            types = [_types(option, depth - 1) for option in options]
            return frozenset().union(*types) if all(types) else _ANYTHING
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return frozenset(("string",))
    return _ANYTHING
