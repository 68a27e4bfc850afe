"""Tools for models whose template knows none: said in words, and the history in words too.

Owns: `explained`. Runs in: front ends. Source: this project. The calls that such a model is asked to
write are those that `JsonCalls` reads without a marker.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ds4.json_size import check_json_size
from ds4.text.chat_template import ChatTemplate

_encode: Final = msgspec.json.Encoder().encode
_ABOUT: Final = (
    "You can use tools. Each of these lines describes one, with the JSON schema of its parameters:\n"
    "{tools}\n\n"
    "To use a tool, answer with a JSON object and nothing else:\n"
    '{{"name": "<name of the tool>", "arguments": {{<its parameters>}}}}\n'
    "To use several, write one such object on each line. The results come back in the next message. "
    "Where no tool is needed, answer in words."
)
_RESULT: Final = "Result of {name}:\n{content}"


def explained(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages with everything about tools that the template would leave out put into words."""
    out: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and not template.shows_results:
            text = _RESULT.format(name=message.get("name") or "the tool", content=message["content"])
            if out and out[-1].get("results"):
                out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{text}"}
            else:
                out.append({"role": "user", "content": text, "results": True})
        elif message.get("tool_calls") and not template.shows_calls:
            lines = [message["content"]] if message["content"] else []
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            out.append({**rest, "content": "\n".join(lines + list(map(_line, message["tool_calls"])))})
        else:
            out.append(message)
    out = [{name: value for name, value in each.items() if name != "results"} for each in out]
    if tools and not template.takes_tools:
        about = _ABOUT.format(tools="\n".join(map(_description, tools)))
        role = "system" if template.takes_system else "user"
        if out and out[0]["role"] == role:
            out[0] = {**out[0], "content": f"{about}\n\n{out[0]['content']}"}
        else:
            out.insert(0, {"role": role, "content": about})
    return out


def _line(call: Mapping[str, Any]) -> str:
    """A call as the model was asked to write it."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        text = arguments.encode("utf-8", "replace") or b"{}"
        check_json_size(text)
        with contextlib.suppress(msgspec.DecodeError):  # else as wrong as it was
            arguments = msgspec.json.decode(text)
    return _encode({"name": function["name"], "arguments": arguments}).decode()


def _description(tool: Mapping[str, Any]) -> str:
    return _encode(tool.get("function", tool)).decode()
