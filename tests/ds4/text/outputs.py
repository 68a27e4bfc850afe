"""How tests look at parsed output: the events of a text, however it is cut, in a form to compare."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import settings

from ds4.text.output import OutputFormat
from ds4.text.output_format import find_output_format
from ds4.text.tool_calls import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    tool_types,
)

# One example is cut and parsed several times; there are many families.
moderately = settings(max_examples=50, deadline=None)

Flat = list[tuple[str, ...]]


def tool(name: str, **types: Any) -> dict[str, Any]:
    """A tool in the form of OpenAI's API; `types` are its parameters' JSON types or schemas."""
    properties = {
        key: dict(value) if isinstance(value, Mapping) else {"type": value} for key, value in types.items()
    }
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    tool(
        "get_weather", city="string", days="integer", detail="boolean", unit=["string", "null"], box="object"
    ),
    tool("ping"),
]


def format_of(template: str, *tokens: str) -> OutputFormat:
    """The format of a model with this template and these tokens in its vocabulary."""
    return find_output_format(template, lambda text: text in tokens)


def flat(events: Iterable[OutputEvent]) -> Flat:
    """Deltas joined, ids left out."""
    out: Flat = []
    for event in events:
        match event:
            case TextDelta(text):
                row: tuple[str, ...] = ("text", text)
            case ReasoningDelta(text):
                row = ("reasoning", text)
            case CallBegin(index, _, name):
                row = ("begin", str(index), name)
            case ArgumentsDelta(index, text):
                row = ("arguments", str(index), text)
            case CallEnd(index):
                row = ("end", str(index))
        if out and row[0] in ("text", "reasoning", "arguments") and out[-1][:-1] == row[:-1]:
            out[-1] = (*row[:-1], out[-1][-1] + row[-1])
        else:
            out.append(row)
    return out


def parse(
    output_format: OutputFormat,
    pieces: Iterable[str],
    *,
    tools: Sequence[Mapping[str, Any]] | None = TOOLS,
    rendered: str = "",
    is_parallel: bool = True,
) -> Flat:
    """The events of this output."""
    parser = output_format.parser(rendered=rendered, tools=tool_types(tools or ()), is_parallel=is_parallel)
    assert parser is not None
    events = [event for piece in pieces for event in parser.push(piece)]
    return flat(events + parser.finish())


def cuts(text: str, seed: int) -> list[str]:
    """The text in random pieces: now single characters, now long stretches."""
    generator = random.Random(seed)
    longest = generator.choice((1, 2, 5, 40))
    pieces = []
    while text:
        length = generator.randint(1, longest)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def parse_every_way(output_format: OutputFormat, text: str, **options: Any) -> Flat:
    """The events of this text, after making sure that they are the same however it is cut."""
    whole = parse(output_format, [text], **options)
    for seed in range(12):
        pieces = cuts(text, seed)
        assert parse(output_format, pieces, **options) == whole, pieces
    return whole


def call(index: int, name: str, arguments: str) -> Flat:
    """The events of one call."""
    begin: Flat = [("begin", str(index), name)]
    if arguments:
        begin.append(("arguments", str(index), arguments))
    return [*begin, ("end", str(index))]
