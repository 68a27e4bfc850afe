"""`/v1/responses` on the wire: its request, and how it reads as a chat request.

Owns: the names and shapes of this dialect's requests. Runs in: front ends. Source: the OpenAI API
reference; `seed`, `stop`, `top_k`, `min_p` and `repetition_penalty` are extensions. What is answered is
in ds4/protocol/openai_responses_output.py.

Items are plain objects here: their `type` may be left out, and what was stored comes back as it was.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from ds4.errors import RequestError
from ds4.protocol.common import decode_body

Item = dict[str, Any]

_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_ROLES: Final = frozenset({"system", "developer", "user", "assistant"})
_LOGPROBS: Final = "message.output_text.logprobs"
_ENCRYPTED: Final = "reasoning.encrypted_content"
# Wishes that have nothing to be fulfilled with here: they name what only a server's own tools make.
_NO_WISH: Final = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How much to reason, and whether to show it as a summary."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool. Only functions of the client's are served."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChoiceObject(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that must be called, or the tools (`allowed_tools`) of which one may be or must be."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[Any] | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`. Obfuscation would only pad events; it is never added."""

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request body."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | ChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text shall come with log-probabilities."""
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def wants_opaque_reasoning(self) -> bool:
        """Whether the client keeps the reasoning for us, as a text it need not understand."""
        return _ENCRYPTED in (self.include or ())

    @property
    def summarises(self) -> bool:
        """Whether reasoning is shown in the place of a summary."""
        reasoning = self.reasoning or Reasoning()
        return reasoning.summary is not None or reasoning.generate_summary is not None


_decoder: Final = msgspec.json.Decoder(ResponsesRequest)


def decode_responses(body: bytes) -> ResponsesRequest:
    """The body, checked for types only. Raises RequestError."""
    return decode_body(_decoder, body)


def input_items(request: ResponsesRequest) -> list[Item]:
    """The input as items. Raises RequestError without any."""
    given = request.input
    if given == []:
        raise RequestError("input is required", param="input", code="missing_required_parameter")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [item if "type" in item else {"type": _untyped(item), **item} for item in given]


def _untyped(item: Item) -> str:
    """What an item is that does not say so."""
    return "item_reference" if item.keys() == {"id"} else "message"


def chat_fields(request: ResponsesRequest, items: Sequence[Item]) -> dict[str, Any]:
    """The same request as the body of a chat request, `items` being the whole conversation.

    Raises RequestError for what is not served.
    """
    _refuse_unserved(request)
    messages = chat_messages(items)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "seed": request.seed,
        "stop": request.stop,
        "stream": request.stream,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": (request.reasoning or Reasoning()).effort,
    }
    if request.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.tools:
        fields["tools"] = [_chat_tool(index, tool) for index, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if isinstance(choice, ChoiceObject) and choice.type == "allowed_tools":
        fields["tool_choice"] = msgspec.to_builtins(choice)
    elif isinstance(choice, ChoiceObject):
        if choice.type != "function" or choice.name is None:
            raise _refuse("tool_choice", f"{choice.type[:40]!r} cannot be forced, only a function can")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = choice
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _response_format(request.text.format)
    return {name: value for name, value in fields.items() if value is not None}


def chat_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as chat messages: what the assistant thought, said and called in a row is one message.

    Raises RequestError naming the item.
    """
    out: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that still grows

    def assistant() -> dict[str, Any]:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": ""}
            out.append(turn)
        return turn

    for index, item in enumerate(items):
        param = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            role, text = _role(param, item), _text(param, item.get("content"))
            if role != "assistant":
                turn = None
                out.append({"role": role, "content": text})
                continue
            if turn is not None and (turn["content"] or "tool_calls" in turn):
                turn = None
            assistant()["content"] = text
        elif kind == "reasoning":
            if turn is not None and (turn["content"] or "tool_calls" in turn):
                turn = None
            if thoughts := _reasoning(param, item):
                assistant()["reasoning_content"] = thoughts
        elif kind == "function_call":
            call = {"name": _word(param, item, "name"), "arguments": _word(param, item, "arguments")}
            calls = assistant().setdefault("tool_calls", [])
            calls.append({"id": _word(param, item, "call_id"), "type": "function", "function": call})
        elif kind == "function_call_output":
            turn = None
            result = _text(f"{param}.output", item.get("output"))
            out.append({"role": "tool", "tool_call_id": _word(param, item, "call_id"), "content": result})
        else:
            raise _refuse(f"{param}.type", f"items of type {str(kind)[:40]!r} are not supported")
    return out


def opaque(reasoning: str) -> str:
    """Reasoning for a client to keep and send back. It hides nothing."""
    return base64.b64encode(reasoning.encode()).decode()


def _refuse(param: str, message: str, code: str = "unsupported_parameter") -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code=code)


def _refuse_unserved(request: ResponsesRequest) -> None:
    if request.background:
        raise _refuse("background", "responses are answered while the client waits, never in the background")
    if request.conversation is not None:
        raise _refuse("conversation", "conversations are not kept; previous_response_id does the same")
    if request.prompt is not None:
        raise _refuse("prompt", "this server keeps no prompt templates")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise _refuse("text.verbosity", "this model's verbosity cannot be set")
    for index, wish in enumerate(request.include or ()):
        if wish not in (_LOGPROBS, _ENCRYPTED, *_NO_WISH):
            raise _refuse(f"include[{index}]", f"{wish[:60]!r} is not known", "invalid_value")


def _chat_tool(index: int, tool: FunctionTool) -> dict[str, Any]:
    if tool.type != "function":
        raise _refuse(f"tools[{index}].type", f"{tool.type[:40]!r} is not supported, only function is")
    if tool.name is None:
        raise _refuse(f"tools[{index}].name", "is required", "missing_required_parameter")
    given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    function = {"name": tool.name} | {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": function}


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None:
        raise _refuse("text.format.schema", "is required", "missing_required_parameter")
    given = {"description": form.description, "strict": form.strict}
    schema: dict[str, Any] = {"name": form.name or "output", "schema": form.schema}
    schema |= {name: value for name, value in given.items() if value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _role(param: str, item: Mapping[str, Any]) -> str:
    role = item.get("role")
    if role not in _ROLES:
        raise _refuse(f"{param}.role", f"must be one of {', '.join(sorted(_ROLES))}", "invalid_value")
    return str(role)


def _word(param: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _refuse(f"{param}.{name}", "a text is required", "invalid_type")
    return value


def _text(param: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _refuse(param, "must be text or a list of parts", "invalid_type")
    return "\n".join(_part(f"{param}[{index}]", part) for index, part in enumerate(content))


def _part(param: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise _refuse(param, "must be an object", "invalid_type")
    kind = part.get("type")
    if kind == "refusal":
        return _word(param, part, "refusal")
    if kind not in _TEXT_PARTS:
        raise _refuse(f"{param}.type", f"content of type {str(kind)[:40]!r} is not supported, only text is")
    return _word(param, part, "text")


def _reasoning(param: str, item: Mapping[str, Any]) -> str:
    """What was thought, from whichever place has it."""
    for name in ("content", "summary"):
        if text := _text(f"{param}.{name}", item.get(name)):
            return text
    kept = item.get("encrypted_content")
    if not isinstance(kept, str):
        return ""
    try:
        return base64.b64decode(kept, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""  # another server's: nothing of it can be shown to the model
