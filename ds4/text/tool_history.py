"""Tools and tool calls as templates can take them that take less than OpenAI's API allows.

Owns: `described`, `one_call_each`. Runs in: front ends. Source: this project; what a template can take is
found by the probes of ds4/text/chat_template.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_MAX_DEPTH: Final = 32


def described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with empty descriptions where it has none: some templates join them without asking."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    text = function.get("description") or ""
    return {**tool, "function": {**function, "description": text, "parameters": _described(schema, 0)}}


def _described(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return schema
    out = dict(schema)
    if depth:
        out.setdefault("description", "")
    properties = out.get("properties")
    if isinstance(properties, Mapping):
        out["properties"] = {name: _described(each, depth + 1) for name, each in properties.items()}
    elif depth and out.get("type") == "object":
        out.setdefault("additionalProperties", {})
    if isinstance(out.get("items"), Mapping):
        out["items"] = _described(out["items"], depth + 1)
    return out


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same history with one call in a message, and its result right after it."""
    out: list[Mapping[str, Any]] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            out.append(message)
            continue
        end = index
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = list(messages[index:end])
        index = end
        for number, call in enumerate(calls):
            # What was thought and said belongs before the first call.
            said = message if number == 0 else {"role": message["role"], "content": ""}
            out.append({**said, "tool_calls": [call]})
            of_call = [each for each in results if each.get("tool_call_id") == call.get("id")]
            out += of_call
            results = [each for each in results if each not in of_call]
        out += results
    return out
