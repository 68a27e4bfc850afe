"""A conversation as every dialect asks for it: messages, tools, how to think.

Owns: `Conversation`, the checks of tools and tool calls that all dialects share. Runs in: front ends.
Source: this project; tools have the form of OpenAI's chat API, which templates expect.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from ds4.errors import RequestError

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_TOOL_NAME_CHARS: Final = 256


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What the model shall read and how it may answer.

    `messages`: role and text content, and what a template may want besides. `thinking`: None leaves it to
    the template. `max_reasoning_tokens`: None is no limit. `kwargs` become template variables. `continues`:
    the last message is the beginning of the answer.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: "ToolChoice" = "none"
    is_parallel: bool = True
    thinking: bool | None = None
    thinking_param: str = "thinking"  # the field that says so
    max_reasoning_tokens: int | None = None
    add_generation_prompt: bool = True
    continues: bool = False
    kwargs: Mapping[str, Any] = {}

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


def refuse(param: str, message: str, code: str = "invalid_value") -> RequestError:
    """The error of a field."""
    return RequestError(f"{param}: {message}", param=param, code=code)


def checked_tools(tools: Any) -> list[Mapping[str, Any]]:
    """The tools, each a function with a name of its own. Raises RequestError naming what is wrong."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise refuse("tools", "must be a list", "invalid_type")
    names: set[str] = set()
    out: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise refuse(param, "a tool must be an object", "invalid_type")
        kind = tool.get("type", "function")
        if kind != "function":
            raise refuse(f"{param}.type", f"{str(kind)[:40]!r} is not supported", "unsupported_parameter")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise refuse(f"{param}.function", "a function is required", "missing_required_parameter")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_TOOL_NAME_CHARS:
            raise refuse(f"{param}.function.name", "a name is required")
        if name in names:
            raise refuse(f"{param}.function.name", f"{name[:40]!r} is there twice")
        if not isinstance(function.get("description") or "", str):
            raise refuse(f"{param}.function.description", "must be text", "invalid_type")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise refuse(f"{param}.function.parameters", "must be a JSON schema", "invalid_type")
        names.add(name)
        out.append({**tool, "type": kind})
    return out


class NamedTool(msgspec.Struct, frozen=True):
    """The tool that the answer has to call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def allowed_tools(choice: Any, tools: list[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], Any]:
    """OpenAI's choice of type `allowed_tools` taken apart: the tools it leaves, and whether to call one.

    Any other choice comes back as it is, with all tools. Raises RequestError.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    param = "tool_choice"
    inner = choice.get("allowed_tools", choice)  # Responses have no object inside
    mode, named = (
        (inner.get("mode", "auto"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
    )
    if mode not in ("auto", "required"):
        raise refuse(f"{param}.mode", "must be auto or required")
    if not isinstance(named, list) or not named:
        raise refuse(f"{param}.tools", "must be a list of tools")
    kept = [checked_tool_choice(each, tools) for each in named]
    names = {each.name for each in kept if isinstance(each, NamedTool)}
    if len(names) < len(set(map(repr, named))):
        raise refuse(f"{param}.tools", "must each name a function")
    return [tool for tool in tools if tool["function"]["name"] in names], mode


def checked_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Which tools may or have to be called. Raises RequestError for a choice that makes no sense."""
    param = "tool_choice"
    if choice is None:
        return "auto" if tools else "none"
    if choice in ("none", "auto"):
        return "none" if choice == "none" else "auto"
    name = None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if choice not in ("required", "any") and name is None:
        raise refuse(param, "must be none, auto, required, or name a function")
    if not tools:
        raise refuse(param, "there are no tools to choose from")
    if name is None:
        return "required"
    if all(tool["function"]["name"] != name for tool in tools):
        raise refuse(param, f"there is no tool {str(name)[:40]!r}")
    return NamedTool(name)


def checked_tool_calls(param: str, calls: Sequence[Any]) -> list[dict[str, Any]]:
    """The calls of a message in the history, in the form that templates expect. Raises RequestError."""
    out: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        where = f"{param}[{index}]"
        if not isinstance(call, Mapping):
            raise refuse(where, "a tool call must be an object", "invalid_type")
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise refuse(f"{where}.function.name", "a name is required", "missing_required_parameter")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | Mapping | None):
            raise refuse(f"{where}.function.arguments", "must be JSON text", "invalid_type")
        if not isinstance(call.get("id"), str | None):
            raise refuse(f"{where}.id", "must be text", "invalid_type")
        filled = {**function, "arguments": "{}" if arguments is None else arguments}
        out.append({**call, "type": "function", "function": filled})
    return out


def with_tool_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results that say which tool they come from: some templates want its name and not the id."""
    names: dict[str, str] = {}
    out = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            if call.get("id"):
                names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id") or "")
        is_nameless = message["role"] == "tool" and name is not None and not message.get("name")
        out.append({**message, "name": name} if is_nameless else message)
    return out
