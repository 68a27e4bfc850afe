"""`/v1/completions` on the wire: its request, its answer, its chunks.

Owns: the names and shapes of this dialect. Runs in: front ends. Source: the OpenAI API reference.
"""

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
    check_token_ids,
    check_top_logprobs,
    decode_body,
    make_plan,
)

Prompt = str | list[int]


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """The request body. A list of ids is one prompt; a list of strings or of lists is several."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """`logprobs` of a choice: parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, whole or as what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


_HONOURED: Final = frozenset({"echo", "suffix"})  # of the fields that other routes refuse
_decoder: Final = msgspec.json.Decoder(CompletionRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """The body, checked for types only. Raises RequestError."""
    return decode_body(_decoder, body)


def plan_completion(request: CompletionRequest, defaults: SamplingDefaults, vocabulary: Vocabulary) -> Plan:
    """All checks that need no prompt. Raises RequestError naming the field."""
    num_logprobs = NO_LOGPROBS
    if request.logprobs is True:  # chat's spelling, sent by some clients: the chosen token's only
        num_logprobs = 0
    elif request.logprobs is not None and request.logprobs is not False:
        num_logprobs = check_top_logprobs("logprobs", request.logprobs)
    num_wanted = request.num_wanted
    if request.best_of is not None and request.best_of != num_wanted:
        if request.best_of < num_wanted:
            raise _bad_best_of(f"must be at least n, which is {num_wanted}")
        if request.stream:
            raise _bad_best_of("cannot be more than n in a stream: the best is known at the end only")
        request = msgspec.structs.replace(request, n=request.best_of, n_cmpl=None)
        num_logprobs = max(0, num_logprobs)  # they tell which are the best
    return make_plan(
        request,
        defaults,
        vocabulary,
        num_logprobs=num_logprobs,
        least_max_tokens=0,
        honoured=_HONOURED,
    )


def scores_prompt(request: CompletionRequest) -> bool:
    """Whether the tokens of the prompt shall have log-probabilities too."""
    return bool(request.echo) and request.logprobs is not None and request.logprobs is not False


def _bad_best_of(message: str) -> RequestError:
    return RequestError(f"best_of: {message}", param="best_of", code="invalid_value")


def prompts_of(request: CompletionRequest, vocabulary_size: int) -> list[Prompt]:
    """The prompts: text, or ids that are in the vocabulary. Raises RequestError."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must not be an empty list", param="prompt", code="invalid_value")
    if type(prompt[0]) is int:
        return [_ids("prompt", prompt, vocabulary_size)]
    out: list[Prompt] = []
    for index, each in enumerate(prompt):
        if isinstance(each, str):
            out.append(each)
        elif isinstance(each, list):
            out.append(_ids(f"prompt[{index}]", each, vocabulary_size))
        else:
            raise _bad_prompt()
    return out


def _ids(param: str, values: list[Any], vocabulary_size: int) -> list[int]:
    if any(type(value) is not int for value in values):
        raise _bad_prompt()
    check_token_ids(param, values, vocabulary_size)
    return values


def _bad_prompt() -> RequestError:
    message = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
    return RequestError(message, param="prompt", code="invalid_type")
