"""`/completion` and `/infill` on the wire: llama-server's own dialect, which its clients and editors speak.

Owns: the names and shapes of this dialect. Runs in: front ends. Source: llama-server's README. Fields of
llama-server that cannot change an answer here (`cache_prompt`, `id_slot`, `n_keep`) are ignored.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from ds4.errors import RequestError
from ds4.generation import NO_LOGPROBS
from ds4.protocol.common import (
    GenerationFields,
    Plan,
    SamplingDefaults,
    Timings,
    Vocabulary,
    check_token_ids,
    check_top_logprobs,
    decode_body,
    make_plan,
)

# One prompt: texts and ids one after the other. A plain text is one text, a plain list of ids only ids.
Prompt = list[str | int]

_HONOURED: Final = frozenset({"n_probs"})  # of the fields that other routes refuse


class NativeFields(GenerationFields, frozen=True, kw_only=True):
    """What both routes take."""

    n_probs: int | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[str] | None = None


class NativeRequest(NativeFields, frozen=True, kw_only=True):
    """The body of `/completion`."""

    prompt: str | list[Any] | dict[str, Any]


class ExtraFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the model sees before the one to be filled in; its name, where the model has a token for that."""

    text: str
    filename: str = "tmp"


class InfillRequest(NativeFields, frozen=True, kw_only=True):
    """The body of `/infill`: the text before is `input_prefix`, then `prompt`."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[ExtraFile] = msgspec.field(default_factory=list)


class NativeTop(msgspec.Struct, frozen=True, kw_only=True):
    """An alternative at one position."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class NativeProbability(NativeTop, frozen=True, kw_only=True):
    """A generated token with its log-probability."""

    top_logprobs: list[NativeTop]


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer was drawn."""

    n_predict: int
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[int, float]]
    stop: list[str]
    n_probs: int
    ignore_eos: bool
    stream: bool


class NativeCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt, or the last event of a streamed one."""

    index: int
    content: str
    tokens: list[int]
    id_slot: Literal[-1] = -1  # a session has no slot of its own that a client could name
    stop: Literal[True] = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: Literal[False] = False
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[NativeProbability] | msgspec.UnsetType = msgspec.UNSET


class NativeChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer but the last."""

    index: int
    content: str
    tokens: list[int]
    id_slot: Literal[-1] = -1
    stop: Literal[False] = False
    tokens_predicted: int
    tokens_evaluated: int
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    completion_probabilities: list[NativeProbability] | msgspec.UnsetType = msgspec.UNSET


_decoder: Final = msgspec.json.Decoder(NativeRequest)
_infill_decoder: Final = msgspec.json.Decoder(InfillRequest)


def decode_native(body: bytes) -> NativeRequest:
    """The body of `/completion`, checked for types only. Raises RequestError."""
    return decode_body(_decoder, body)


def decode_infill(body: bytes) -> InfillRequest:
    """The body of `/infill`, checked for types only. Raises RequestError."""
    return decode_body(_infill_decoder, body)


def plan_native(request: NativeFields, defaults: SamplingDefaults, vocabulary: Vocabulary) -> Plan:
    """All checks that need no prompt. Raises RequestError naming the field."""
    if request.stream and request.response_fields:
        raise RequestError(
            "response_fields cannot be given with stream", param="response_fields", code="invalid_value"
        )
    num_logprobs = NO_LOGPROBS
    if request.n_probs:
        num_logprobs = check_top_logprobs("n_probs", request.n_probs)
    elif request.return_tokens or request.stream:
        num_logprobs = 0  # the ids come with them
    return make_plan(
        request, defaults, vocabulary, num_logprobs=num_logprobs, least_max_tokens=0, honoured=_HONOURED
    )


def native_prompts(
    prompt: str | list[Any] | dict[str, Any], vocabulary_size: int
) -> tuple[list[Prompt], bool]:
    """The prompts, and whether a list of them was given. Raises RequestError.

    A list that holds an id is one prompt; any other is a list of prompts.
    """
    if not isinstance(prompt, list):
        return [_one(prompt, vocabulary_size)], False
    if not prompt:
        raise RequestError("prompt must not be an empty list", param="prompt", code="invalid_value")
    if any(type(each) is int for each in prompt):
        return [_one(prompt, vocabulary_size)], False
    return [_one(each, vocabulary_size) for each in prompt], True


def _one(prompt: Any, vocabulary_size: int) -> Prompt:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise RequestError(
                "prompt.multimodal_data is not supported, only text is",
                param="prompt.multimodal_data",
                code="unsupported_parameter",
            )
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not all(type(each) in (str, int) for each in prompt):
        message = (
            "prompt must be a string, token ids, both mixed, an object with prompt_string, or a list of such"
        )
        raise RequestError(message, param="prompt", code="invalid_type")
    check_token_ids("prompt", [each for each in prompt if type(each) is int], vocabulary_size)
    return prompt


def selected(document: Mapping[str, Any], paths: list[str]) -> dict[str, Any]:
    """Of the answer what `response_fields` names, under those names; `/` leads into an object."""
    out: dict[str, Any] = {}
    for path in paths:
        found: Any = document
        for name in path.split("/"):
            if not isinstance(found, Mapping) or name not in found:
                break
            found = found[name]
        else:
            out[path] = found
    return out
