"""`/v1/messages` on the wire: its request, its answer, its stream events, its errors.

Owns: the names and shapes of this dialect, and how a request of it reads as a chat request. Runs in:
front ends. Source: the Anthropic API reference; `min_p`, `seed` and `repetition_penalty` are extensions.

Blocks and options that are not served are declared, so that a refusal can name them.
"""

from typing import Any, Final, Literal

import msgspec

from ds4.errors import RequestError
from ds4.protocol.common import decode_body

# Prompt parts that name the client and change with every request: shown to the model they would tell
# it nothing and spoil the prefix that all its requests share.
_CLIENT_NOTES: Final = "x-anthropic-"


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning. The signature is the message's id; it is not checked when it comes back."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="redacted_thinking"
):
    """Reasoning that another server hid; nothing of it can be shown to the model."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: dict[str, Any]


class ImageBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image"):
    """Not served."""


class DocumentSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a document is: only text is served."""

    type: str
    data: str | None = None


class DocumentBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="document"):
    """A document. Served where it is plain text."""

    source: DocumentSource
    title: str | None = None


class SearchResultBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="search_result"):
    """A search result: its text is served, citations are not made."""

    content: list[TextBlock]
    title: str | None = None
    source: str | None = None


_ResultPart = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    """What a call came to."""

    tool_use_id: str
    content: str | list[_ResultPart] | None = None
    is_error: bool | None = None


InputBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the history."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the client's. Tools that a server runs itself have a `type` and are refused."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and what the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model reasons first, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Effort and form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the history that the server shall make."""

    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of the history; only those that change nothing are served."""

    edits: list[ContextEdit] | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of `/v1/messages`."""

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    container: Any = None


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts: the prompt is `input_tokens` plus what was read from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


def message_usage(num_prompt: int, num_cached: int, num_generated: int) -> MessageUsage:
    """The `usage` object."""
    return MessageUsage(
        input_tokens=num_prompt - num_cached,
        output_tokens=num_generated,
        cache_read_input_tokens=num_cached,
    )


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; in `message_start` without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """The first event."""

    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: AnswerBlock


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingPart(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignaturePart(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The signature, last in a thinking block."""

    signature: str


class InputPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """A block goes on."""

    index: int
    delta: TextPart | ThinkingPart | SignaturePart | InputPart


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block is over."""

    index: int


class Ending(msgspec.Struct, frozen=True):
    """Why the answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """The ending, and the counts."""

    delta: Ending
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """The server is alive."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The inside of an error; the token counts only where the context overflowed."""

    type: str
    message: str
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class ErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error, as a body or as a stream event."""

    error: ErrorDetail
    request_id: str | None = None


StreamEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | ErrorBody
)

_messages: Final = msgspec.json.Decoder(MessagesRequest)
_count: Final = msgspec.json.Decoder(CountRequest)
_dumps: Final = msgspec.json.Encoder().encode


def decode_messages(body: bytes) -> MessagesRequest:
    """The body of `/v1/messages`, checked for types only. Raises RequestError."""
    return decode_body(_messages, body)


def decode_count(body: bytes) -> CountRequest:
    """The body of `/v1/messages/count_tokens`, checked for types only. Raises RequestError."""
    return decode_body(_count, body)


def chat_fields(request: CountRequest) -> dict[str, Any]:
    """The same request as the body of a chat request. Raises RequestError for what is not served."""
    _refuse_unserved(request)
    messages = _chat_messages(request)
    fields: dict[str, Any] = {"model": request.model, "messages": messages}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        fields["continue_final_message"] = True
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "repetition_penalty": request.repetition_penalty,
            "seed": request.seed,
        }
    fields |= _tool_fields(request)
    if request.thinking is not None:
        fields["thinking"] = msgspec.to_builtins(request.thinking)
    config = request.output_config or OutputConfig()
    fields["reasoning_effort"] = config.effort
    if (form := config.format or request.output_format) is not None:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": form.schema, "strict": True},
        }
    return {name: value for name, value in fields.items() if value is not None}


def _refuse(param: str, message: str, code: str = "unsupported_parameter") -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code=code)


def _refuse_unserved(request: CountRequest) -> None:
    if request.mcp_servers:
        raise _refuse("mcp_servers", "this server does not call MCP servers")
    if isinstance(request, MessagesRequest) and isinstance(request.container, dict):
        raise _refuse("container", "this server has no containers")
    management = request.context_management or ContextManagement()
    for index, edit in enumerate(management.edits or ()):
        if not (edit.type.startswith("clear_thinking_") and edit.keep == "all"):
            raise _refuse(f"context_management.edits[{index}]", f"{edit.type[:60]!r} is not supported")


def _tool_fields(request: CountRequest) -> dict[str, Any]:
    """`tools` and `tool_choice`. No tools: no choice between them either."""
    fields: dict[str, Any] = {}
    if request.tools:
        fields["tools"] = [_chat_tool(index, tool) for index, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if choice is None:
        return fields
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise _refuse("tool_choice.name", "is required with type tool", "missing_required_parameter")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    return fields


def _chat_tool(index: int, tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise _refuse(f"tools[{index}].type", f"{tool.type[:60]!r} is run by no server of this kind")
    if tool.input_schema is None:
        raise _refuse(f"tools[{index}].input_schema", "is required", "missing_required_parameter")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _chat_messages(request: CountRequest) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if system := _system_text(request.system):
        out.append({"role": "system", "content": system})
    if not request.messages:
        raise _refuse("messages", "must not be empty", "invalid_value")
    for index, message in enumerate(request.messages):
        param = f"messages[{index}]"
        if isinstance(message.content, str):
            out.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            out.append(_assistant(param, message.content))
        else:
            out += _user(param, message.role, message.content)
    return out


def _system_text(system: str | list[TextBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n\n".join(block.text for block in system if not block.text.startswith(_CLIENT_NOTES))


def _assistant(param: str, blocks: list[InputBlock]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": _dumps(block.input).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):
            raise _misplaced(f"{param}.content[{index}]", block, "assistant")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(param: str, role: str, blocks: list[InputBlock]) -> list[dict[str, Any]]:
    """One message of Anthropic's is several of OpenAI's: each result is one, and the texts between."""
    out: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            out.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        where = f"{param}.content[{index}]"
        if isinstance(block, ToolResultBlock):
            flush()
            content = _result_text(where, block)
            out.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlock | ImageBlock | DocumentBlock | SearchResultBlock):
            texts.append(_part_text(where, block))
        else:
            raise _misplaced(where, block, role)
    flush()
    return out or [{"role": role, "content": ""}]


def _result_text(param: str, block: ToolResultBlock) -> str:
    parts = block.content
    if parts is None or isinstance(parts, str):
        text = parts or ""
    else:
        text = "\n".join(_part_text(f"{param}.content[{index}]", part) for index, part in enumerate(parts))
    # The role of a result in chat templates has no place for failure; the word is what models know.
    return f"Error: {text}" if block.is_error else text


def _part_text(param: str, part: _ResultPart) -> str:
    if isinstance(part, TextBlock):
        return part.text
    if isinstance(part, SearchResultBlock):
        named = [each for each in (part.title, part.source) if each]
        return "\n".join([*named, *(block.text for block in part.content)])
    if isinstance(part, DocumentBlock) and part.source.type == "text" and part.source.data is not None:
        return f"{part.title}\n{part.source.data}" if part.title else part.source.data
    kind = part.__struct_config__.tag
    raise _refuse(f"{param}.type", f"content of type {kind!r} is not supported, only text is")


def _misplaced(param: str, block: InputBlock, role: str) -> RequestError:
    kind = block.__struct_config__.tag
    return _refuse(f"{param}.type", f"{kind!r} blocks cannot stand in {role} messages", "invalid_value")
