"""`/v1/chat/completions` on the wire: its request, its answer, its chunks.

Owns: the names and shapes of this dialect. Runs in: front ends. Source: the OpenAI API reference;
`timings` is llama-server's extension.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from ds4.errors import RequestError
from ds4.generation import NO_LOGPROBS
from ds4.protocol.common import (
    GenerationFields,
    Plan,
    SamplingDefaults,
    Timings,
    Usage,
    Vocabulary,
    check_top_logprobs,
    decode_body,
    make_plan,
)

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message's content; only text is served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the history."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """The request body."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class TemplateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/apply-template`."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    """An alternative at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a choice or chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of the answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer in one piece."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to its choice; absent fields are not written."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The one choice a chunk speaks of."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer. `usage` is null in all but the last when it was asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


_decoder: Final = msgspec.json.Decoder(ChatRequest)
_template_decoder: Final = msgspec.json.Decoder(TemplateRequest)


def decode_chat(body: bytes) -> ChatRequest:
    """The body, checked for types only. Raises RequestError."""
    return decode_body(_decoder, body)


def decode_template(body: bytes) -> TemplateRequest:
    """The body of `/apply-template`. Raises RequestError."""
    return decode_body(_template_decoder, body)


def plan_chat(request: ChatRequest, defaults: SamplingDefaults, vocabulary: Vocabulary) -> Plan:
    """All checks that need no prompt. Raises RequestError naming the field."""
    num_logprobs = NO_LOGPROBS
    if request.logprobs:
        num_logprobs = check_top_logprobs("top_logprobs", request.top_logprobs or 0)
    elif request.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    return make_plan(request, defaults, vocabulary, num_logprobs=num_logprobs)


def template_kwargs(request: ChatRequest | TemplateRequest) -> dict[str, Any]:
    """What the template gets besides the messages."""
    kwargs = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    return kwargs


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as templates expect them: text content, `system` for `developer`.

    Raises RequestError for an empty list, an unknown role, or content that is not text.
    """
    if not messages:
        raise RequestError("messages must not be empty", param="messages", code="invalid_value")
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    param = f"messages[{index}]"
    if message.role not in _ROLES:
        raise RequestError(
            f"{param}.role: {message.role[:40]!r} is not one of {', '.join(_ROLES)}",
            param=f"{param}.role",
            code="invalid_value",
        )
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(param, message.content),
    }
    for name in ("name", "reasoning_content", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None and value != []:
            out[name] = value
    return out


def _text(param: str, content: str | list[ContentPart] | None) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{param}.content[{index}]"
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(
                f"{where}: content of type {part.type[:40]!r} is not supported, only text is",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise RequestError(f"{where}: text is missing", param=f"{where}.text", code="invalid_value")
        texts.append(text)
    return "\n".join(texts)
