"""What `/v1/responses` answers: the response, its output items, the events of its stream.

Owns: the names and shapes of this dialect's answers. Runs in: front ends. Source: the OpenAI API reference.
"""

from typing import Any, Literal

import msgspec

from ds4.protocol.openai_responses import ChoiceObject, FunctionTool, Reasoning, TextConfig

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class TopToken(msgspec.Struct, frozen=True):
    """An alternative at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the text with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of the reasoning."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """Text of the reasoning, in the place of a summary."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What the assistant said."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning", omit_defaults=True
):
    """What it thought: in `content`, or in `summary` where one was asked for."""

    id: str
    status: Status
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    cached_tokens: int
    cache_write_tokens: int = 0  # nothing is charged for


class OutputDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, in every state of it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | ChoiceObject
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class _ResponseEvent(_Event, frozen=True, kw_only=True):
    response: Response


class Created(_ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    """The first event."""


class InProgress(_ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """The second."""


class Completed(_ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    """The last, when all went well."""


class Incomplete(_ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    """The last, when the limit ended the answer."""


class Failed(_ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    """The last, when it failed."""


class _ItemEvent(_Event, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_ItemEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins, empty."""


class ItemDone(_ItemEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is over; it is shown whole."""


class _PartEvent(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class PartAdded(_PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """The one part of a message or of reasoning begins."""


class PartDone(_PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """It is over."""


class _SummaryPartEvent(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    summary_index: int = 0
    part: SummaryText


class SummaryPartAdded(
    _SummaryPartEvent, frozen=True, kw_only=True, tag="response.reasoning_summary_part.added"
):
    """The one part of a summary begins."""


class SummaryPartDone(
    _SummaryPartEvent, frozen=True, kw_only=True, tag="response.reasoning_summary_part.done"
):
    """It is over."""


class _InItem(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class TextDelta(_InItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(_InItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The whole text."""

    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(_InItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    content_index: int = 0
    delta: str


class ReasoningDone(_InItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    content_index: int = 0
    text: str


class SummaryDelta(_InItem, frozen=True, kw_only=True, tag="response.reasoning_summary_text.delta"):
    """More reasoning, in the place of a summary."""

    summary_index: int = 0
    delta: str


class SummaryDone(_InItem, frozen=True, kw_only=True, tag="response.reasoning_summary_text.done"):
    """The whole of it."""

    summary_index: int = 0
    text: str


class ArgumentsDelta(_InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """All of them."""

    name: str
    arguments: str


StreamEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | SummaryPartAdded
    | SummaryPartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
)


class InputItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a response's input items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
