"""`/v1/chat/completions` on the wire: its request, its answer, its chunks.

Owns: the names and shapes of this dialect. Runs in: front ends. Source: the OpenAI API reference;
`timings` is llama-server's extension. A budget of reasoning has llama-server's names, vLLM's
(`thinking_token_budget`), Anthropic's (inside `thinking`) and OpenRouter's (inside `reasoning`).
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
from ds4.protocol.conversation import (
    EFFORTS,
    Conversation,
    allowed_tools,
    checked_tool_calls,
    checked_tool_choice,
    checked_tools,
    refuse,
    with_tool_names,
)

# Of the fields that other routes refuse.
_HONOURED: Final = frozenset({"continue_final_message", "tools", "tool_choice", "thinking"})
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
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None  # what `tool_calls` was before


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`, OpenRouter's spelling of how to think. What was thought is always shown."""

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """The request body, and that of `/apply-template`, which looks at what makes the prompt."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    timings_per_token: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    reasoning_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None
    thinking_token_budget: int | None = None


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


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a tool call; in a stream the name comes first, and the arguments piece by piece."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the answer; `index` is there in streams only, the rest but for arguments once."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: CalledFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message. `content` is null where there is nothing but tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
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
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


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


def decode_chat(body: bytes) -> ChatRequest:
    """The body, checked for types only. Raises RequestError."""
    return decode_body(_decoder, body)


def plan_chat(request: ChatRequest, defaults: SamplingDefaults, vocabulary: Vocabulary) -> Plan:
    """All checks that need no prompt. Raises RequestError naming the field."""
    num_logprobs = NO_LOGPROBS
    if request.logprobs:
        num_logprobs = check_top_logprobs("top_logprobs", request.top_logprobs or 0)
    elif request.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    return make_plan(request, defaults, vocabulary, num_logprobs=num_logprobs, honoured=_HONOURED)


def conversation(request: ChatRequest) -> Conversation:
    """What the model shall read, and how it may answer. Raises RequestError naming the field."""
    tools, wanted = allowed_tools(request.tool_choice, checked_tools(request.tools or ()))
    choice = checked_tool_choice(wanted, tools)
    if choice == "none":
        tools = []
    thinking, budget, thinking_param = _thinking(request)
    kwargs = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort or (request.reasoning.effort if request.reasoning else None)
    if effort not in (None, "none"):
        kwargs.setdefault("reasoning_effort", effort)
    messages = template_messages(request.messages)
    continues = bool(request.continue_final_message)
    if continues and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise refuse("continue_final_message", "the last message must be text of the assistant")
    if continues and request.add_generation_prompt:
        raise refuse("continue_final_message", "add_generation_prompt: true would begin another message")
    return Conversation(
        messages=messages,
        continues=continues,
        tools=tools,
        tool_choice=choice,
        is_parallel=request.parallel_tool_calls is not False,
        thinking=thinking,
        thinking_param=thinking_param,
        max_reasoning_tokens=budget,
        add_generation_prompt=request.add_generation_prompt is not False,
        kwargs=kwargs,
    )


def _thinking(request: ChatRequest) -> tuple[bool | None, int | None, str]:
    """Whether to think, for how long, and which field says so: different clients use different ones."""
    options = request.reasoning or ReasoningOptions()
    if options.exclude:
        raise refuse("reasoning.exclude", "what was thought is always shown", "unsupported_parameter")
    budget, budget_param = _reasoning_budget(request, options)
    effort, effort_param = request.reasoning_effort, "reasoning_effort"
    if effort is None and options.effort is not None:
        effort, effort_param = options.effort, "reasoning.effort"
    if effort is not None and effort not in EFFORTS:
        raise refuse(effort_param, f"{effort[:40]!r} is not one of {', '.join(EFFORTS)}")
    # The most exact wish first.
    wishes = (
        ("chat_template_kwargs.enable_thinking", (request.chat_template_kwargs or {}).get("enable_thinking")),
        ("enable_thinking", request.enable_thinking),
        ("thinking", _switch(request.thinking)),
        ("reasoning.enabled", options.enabled),
        (effort_param, None if effort is None else effort != "none"),
    )
    param, wanted = next(
        ((name, wish) for name, wish in wishes if isinstance(wish, bool)), (budget_param, None)
    )
    return (False if budget == 0 else wanted), budget, param


def _switch(thinking: Any) -> bool | None:
    if isinstance(thinking, bool | None):
        return thinking
    if not isinstance(thinking, dict):
        raise refuse("thinking", "must be true, false, or an object", "invalid_type")
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive", "auto"):
        raise refuse("thinking.type", "must be enabled or disabled")
    return {"enabled": True, "disabled": False}.get(kind)


def _reasoning_budget(request: ChatRequest, options: ReasoningOptions) -> tuple[int | None, str]:
    """How many tokens of reasoning at most, and the field that says so; None: as many as the model likes."""
    thinking = request.thinking if isinstance(request.thinking, dict) else {}
    given = (
        ("reasoning_budget", request.reasoning_budget),
        ("reasoning_budget_tokens", request.reasoning_budget_tokens),
        ("thinking_budget_tokens", request.thinking_budget_tokens),
        ("thinking_token_budget", request.thinking_token_budget),
        ("thinking.budget_tokens", thinking.get("budget_tokens")),
        ("reasoning.max_tokens", options.max_tokens),
    )
    param, budget = next(
        ((name, value) for name, value in given if value is not None), ("reasoning_budget", None)
    )
    if budget == -1:  # llama-server's spelling of "no limit"
        return None, param
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        raise refuse(param, "must be a number of tokens")
    return budget, param


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as templates expect them: text content, `system` for `developer`.

    Raises RequestError for an empty list, an unknown role, or content that is not text.
    """
    if not messages:
        raise RequestError("messages must not be empty", param="messages", code="invalid_value")
    return with_tool_names([_template_message(index, message) for index, message in enumerate(messages)])


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
    if message.tool_calls:
        out["tool_calls"] = checked_tool_calls(f"{param}.tool_calls", message.tool_calls)
    elif message.function_call is not None:
        call = {"id": f"call_{index}", "function": message.function_call}
        out["tool_calls"] = checked_tool_calls(f"{param}.function_call", [call])
    elif message.role == "function":  # the result of the call in the message before
        out |= {"role": "tool", "tool_call_id": message.tool_call_id or f"call_{index - 1}"}
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    more = {"name": message.name, "reasoning_content": reasoning, "tool_call_id": message.tool_call_id}
    return out | {name: value for name, value in more.items() if value is not None}


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
