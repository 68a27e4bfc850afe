"""What the OpenAI dialects share on the wire: sampling fields, their checks, usage, errors.

Owns: the wire names and ranges of everything that decides how tokens are drawn. Runs in: front ends.
Source: the OpenAI API reference; extensions (top_k, min_p, repetition_penalty, stop_token_ids,
min_tokens, ignore_eos) are spelt as vLLM and llama-server spell them.

A field nobody declares is ignored; a declared field that would change the output and is not honoured
is refused by name (ds4/protocol/refused.py). Nothing is accepted without effect.
"""

import logging
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from ds4.config import Settings
from ds4.errors import ContextOverflowError, RequestError
from ds4.generation import (
    MAX_BIASES,
    MAX_STOP_IDS,
    MAX_TOP_LOGPROBS,
    NO_LOGPROBS,
    GenerationRequest,
    SamplingParams,
)
from ds4.json_size import check_json_size
from ds4.protocol.refused import RefusedFields, refuse_unsupported
from ds4.protocol.structured import Structure, structure_of

_log = logging.getLogger(__name__)

MAX_CHOICES: Final = 128
_SEED_BITS: Final = 64
_DRAWN_SEED_BITS: Final = 32  # answers may show it, and not every client's numbers hold 64 bits
_MAX_BIAS: Final = 100.0
_MAX_BIASED_CHARS: Final = 256
_MAX_TOP_K: Final = 1 << 30
_TEMPERATURES: Final = (0.0, 100.0)
_SHARES: Final = (0.0, 1.0)  # top_p, min_p
_PENALTIES: Final = (0.01, 100.0)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: counts so far with every chunk


class GenerationFields(RefusedFields, frozen=True, kw_only=True):
    """The body fields of every OpenAI route that generates. Built by decoding only."""

    model: str | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    penalty_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | list[tuple[int | str, float | bool]] | None = None
    seed: int | None = None
    n: int | None = None
    n_cmpl: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_wanted(self) -> int:
        """How many choices; `n_cmpl` is llama-server's name for `n`. Not checked."""
        return next((number for number in (self.n_cmpl, self.n) if number is not None), 1)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that names nothing gets. Fixed at start."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    max_tokens: int = 0  # 0: until the context is full


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request, without its prompts: how to draw, when to stop, what to answer.

    `structure` is what the client asked for, `grammar` what the worker gets once that was compiled.
    """

    sampling: SamplingParams
    max_tokens: int | None
    min_tokens: int
    stops: tuple[str, ...]
    include_stop: bool
    stop_token_ids: tuple[int, ...]
    num_choices: int
    stream: bool
    include_usage: bool
    counts_always: bool = False  # usage so far, with every chunk
    structure: Structure | None = None
    holds_end: bool = False  # ignore_eos with a structure: it ends where nothing else may follow
    grammar: str = ""

    def generation(
        self, num_prompt_tokens: int, max_context_tokens: int, choice: int, param: str
    ) -> GenerationRequest:
        """What one choice asks of the worker. Raises ContextOverflowError naming `param`.

        The output is cut to what the context still holds; siblings differ in their seed.
        """
        room = max_context_tokens - num_prompt_tokens
        if room < min(1, self.max_tokens if self.max_tokens is not None else 1):
            raise ContextOverflowError(num_prompt_tokens, max_context_tokens, param=param)
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        assert bool(self.grammar) == (self.structure is not None), "a structure was not compiled"
        seed = (self.sampling.seed + choice) % (1 << _SEED_BITS)
        return GenerationRequest(
            max_tokens=max_tokens,
            min_tokens=max_tokens if self.holds_end else min(self.min_tokens, max_tokens),
            stop_token_ids=self.stop_token_ids,
            sampling=msgspec.structs.replace(self.sampling, seed=seed),
            grammar=self.grammar,
        )


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What validation needs to know of the model's tokens."""

    size: int
    end_ids: Collection[int]
    spell: Callable[[str], Sequence[int]]  # a text as ids


def sampling_defaults(settings: Settings, metadata: Mapping[str, Any]) -> SamplingDefaults:
    """Flag or variable, else the file's `general.sampling.*`, else the C server's defaults.

    A file's value that a request might not have is ignored: the file comes from strangers.
    """
    built_in = SamplingDefaults()
    ignored: list[str] = []

    def pick(setting: float | None, key: str, bounds: tuple[float, float], fallback: float) -> float:
        value = metadata.get(f"general.sampling.{key}")
        if setting is not None or value is None:
            return fallback if setting is None else setting
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and bounds[0] <= value <= bounds[1]:
            return float(value)
        ignored.append(f"{key} {value!r:.40}")
        return fallback

    defaults = SamplingDefaults(
        temperature=pick(settings.temperature, "temp", _TEMPERATURES, built_in.temperature),
        top_p=pick(settings.top_p, "top_p", _SHARES, built_in.top_p),
        top_k=max(0, int(pick(settings.top_k, "top_k", (-1, _MAX_TOP_K), built_in.top_k))),
        min_p=pick(settings.min_p, "min_p", _SHARES, built_in.min_p),
        repetition_penalty=pick(None, "penalty_repeat", _PENALTIES, built_in.repetition_penalty),
        max_tokens=settings.default_max_tokens,
    )
    if ignored:
        _log.warning("ignored sampling values of the model file: %s", ", ".join(ignored))
    return defaults


_INTEGER: Final = re.compile(r"-?[0-9]{1,18}")
_PATH: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_T = TypeVar("_T")


def decode_body(decoder: "msgspec.json.Decoder[_T]", body: bytes) -> _T:
    """The body as its wire struct. Raises RequestError naming the field."""
    check_json_size(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        param = found.group(1) if found else ""
        reason = _PATH.sub("", text)
        if missing := _MISSING.fullmatch(reason):
            param = ".".join(filter(None, (param, missing[1])))
            raise RequestError(
                f"{param} is required", param=param, code="missing_required_parameter"
            ) from None
        raise RequestError(
            f"{param}: {reason}" if param else f"the body is not what this route takes: {reason}",
            param=param or None,
            code="invalid_type",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None


def make_plan(
    fields: GenerationFields,
    defaults: SamplingDefaults,
    vocabulary: Vocabulary,
    *,
    num_logprobs: int,
    least_max_tokens: int = 1,
    honoured: Collection[str] = (),
) -> Plan:
    """All checks that need no prompt. Raises RequestError naming the field."""
    refuse_unsupported(fields, honoured)
    num_choices = _whole("n", fields.num_wanted, 1, 1, MAX_CHOICES)
    best_of = _whole("best_of", fields.best_of, num_choices, 1, MAX_CHOICES)
    if best_of != num_choices:
        raise RequestError(
            "best_of other than n is not supported", param="best_of", code="unsupported_parameter"
        )
    stop_token_ids = tuple(dict.fromkeys(fields.stop_token_ids or ()))
    for token_id in stop_token_ids:
        _check_id("stop_token_ids", token_id, vocabulary.size)
    structure = structure_of(fields)
    options = fields.stream_options or StreamOptions()
    # A grammar ends with an end token, so it cannot do without.
    ends = () if fields.ignore_eos and structure is None else tuple(sorted(vocabulary.end_ids))
    _at_most("stop_token_ids", len(stop_token_ids), MAX_STOP_IDS - len(vocabulary.end_ids))
    penalty_name = "repetition_penalty" if fields.repetition_penalty is not None else "repeat_penalty"
    penalty = fields.repetition_penalty if fields.repetition_penalty is not None else fields.repeat_penalty
    sampling = SamplingParams(
        temperature=_number("temperature", fields.temperature, defaults.temperature, *_TEMPERATURES),
        top_p=_number("top_p", fields.top_p, defaults.top_p, *_SHARES),
        top_k=_top_k(fields.top_k, defaults.top_k, vocabulary.size),
        min_p=_number("min_p", fields.min_p, defaults.min_p, *_SHARES),
        typical_p=_number("typical_p", fields.typical_p, 1.0, *_SHARES),
        repetition_penalty=_number(penalty_name, penalty, defaults.repetition_penalty, *_PENALTIES),
        presence_penalty=_number("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields.logit_bias, vocabulary),
        seed=_seed(fields.seed),
        num_logprobs=num_logprobs,
    )
    _refuse_window(fields, sampling)
    return Plan(
        sampling=sampling,
        max_tokens=_max_tokens(fields, defaults, least_max_tokens),
        min_tokens=_whole("min_tokens", fields.min_tokens, 0, 0, 1 << 40),
        stops=_stops(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output),
        stop_token_ids=tuple(dict.fromkeys((*ends, *stop_token_ids))),
        num_choices=num_choices,
        stream=bool(fields.stream),
        include_usage=_include_usage(fields),
        counts_always=_include_usage(fields) and bool(options.continuous_usage_stats),
        structure=structure,
        holds_end=bool(fields.ignore_eos) and structure is not None,
    )


def _refuse_window(fields: GenerationFields, sampling: SamplingParams) -> None:
    """Penalties look at the whole of a sequence. Raises RequestError for another window, where it matters."""
    wants = (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
    for name in ("repeat_last_n", "penalty_last_n"):
        if wants and getattr(fields, name) not in (None, -1):
            raise RequestError(
                f"{name}: penalties look at the whole context here; leave it out, or make it -1",
                param=name,
                code="unsupported_parameter",
            )


def check_top_logprobs(param: str, count: int) -> int:
    """`count` itself. Raises RequestError outside 0 to 20."""
    return _whole(param, count, NO_LOGPROBS, 0, MAX_TOP_LOGPROBS)


def check_token_ids(param: str, ids: Collection[int], vocabulary_size: int) -> None:
    """Raises RequestError for an id that the vocabulary does not have."""
    for token_id in ids:
        _check_id(param, token_id, vocabulary_size)


def _check_id(param: str, token_id: int, vocabulary_size: int) -> None:
    if not 0 <= token_id < vocabulary_size:
        raise RequestError(
            f"{param}: token id {token_id} is outside the vocabulary of {vocabulary_size}",
            param=param,
            code="invalid_value",
        )


def _at_most(param: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(
            f"{param} has {count} entries, {limit} are allowed", param=param, code="invalid_value"
        )


def _whole(param: str, value: int | None, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        wanted = f"at least {low}" if value < low else f"at most {high}"
        raise RequestError(f"{param} must be {wanted}, got {value}", param=param, code="invalid_value")
    return value


def _number(param: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise RequestError(
            f"{param} must be between {low:g} and {high:g}, got {value:g}", param=param, code="invalid_value"
        )
    return float(value)


def _top_k(value: int | None, default: int, vocabulary_size: int) -> int:
    chosen = _whole("top_k", value, default, -1, 1 << 62)  # -1 and 0: off
    return 0 if chosen <= 0 or chosen >= vocabulary_size else chosen


def _max_tokens(fields: GenerationFields, defaults: SamplingDefaults, least: int) -> int | None:
    newer = getattr(fields, "max_completion_tokens", None)
    for param, value in (
        ("max_completion_tokens", newer),
        ("max_tokens", fields.max_tokens),
        ("n_predict", fields.n_predict),
    ):
        if value == -1:  # llama-server's spelling of "no limit"
            return defaults.max_tokens or None
        if value is not None:
            return _whole(param, value, 0, least, 1 << 62)
    return defaults.max_tokens or None


def _seed(value: int | None) -> int:
    if value is None or value == -1:  # -1: llama-server's spelling of "any"
        return secrets.randbits(_DRAWN_SEED_BITS)
    return _whole("seed", value, 0, -(1 << 63), (1 << _SEED_BITS) - 1) % (1 << _SEED_BITS)


def _stops(value: str | list[str] | None) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    return tuple(dict.fromkeys(stop for stop in stops if stop))  # an empty one can never be met


def _logit_bias(
    value: dict[str, float] | list[tuple[int | str, float | bool]] | None, vocabulary: Vocabulary
) -> tuple[tuple[int, float], ...]:
    """Biases by id. A key that is no number is a text, whose tokens all get the bias, as in llama-server.

    In pairs, which are llama-server's too, also a number in quotes is a text, and false forbids.
    """
    found: dict[int, float] = {}
    _at_most("logit_bias", len(value or ()), MAX_BIASES)
    pairs = value.items() if isinstance(value, dict) else value or ()
    for key, bias in pairs:
        if bias is True:
            raise RequestError("logit_bias: true is no bias", param="logit_bias", code="invalid_value")
        number = -_MAX_BIAS if bias is False else bias
        if isinstance(key, int) or (isinstance(value, dict) and _INTEGER.fullmatch(key)):
            ids: Sequence[int] = (int(key),)
            _check_id("logit_bias", ids[0], vocabulary.size)
        else:
            if len(key) > _MAX_BIASED_CHARS:
                raise RequestError(
                    f"logit_bias: a text of {len(key)} characters, {_MAX_BIASED_CHARS} are allowed",
                    param="logit_bias",
                    code="invalid_value",
                )
            ids = vocabulary.spell(key)
        amount = _number("logit_bias", number, 0.0, -_MAX_BIAS, _MAX_BIAS)
        found.update(dict.fromkeys(ids, amount))
    _at_most("logit_bias", len(found), MAX_BIASES)
    return tuple(found.items())


def _include_usage(fields: GenerationFields) -> bool:
    if fields.stream_options is None:
        return False
    if not fields.stream:
        raise RequestError(
            "stream_options is only allowed with stream", param="stream_options", code="invalid_value"
        )
    return bool(fields.stream_options.include_usage)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`: exact counts of one request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def usage(num_prompt: int, num_completion: int, num_cached: int, num_reasoning: int | None = None) -> Usage:
    """The `usage` object; `num_reasoning` is None where reasoning is not told from text."""
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(num_cached),
        completion_tokens_details=(
            msgspec.UNSET if num_reasoning is None else CompletionTokensDetails(num_reasoning)
        ),
    )


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """`timings`, an extension, named as llama-server names it; `queue_ms` is how long the prompt waited before."""

    queue_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


def timings(
    num_prompt: int, num_cached: int, queue_s: float, prompt_s: float, num_generated: int, decode_s: float
) -> Timings:
    """The `timings` object of one choice; `prompt_s` runs from the queue's end to the first token."""
    computed = max(0, num_prompt - num_cached)
    steps = max(0, num_generated - 1)  # the first token came out of the prompt
    return Timings(
        queue_ms=round(queue_s * 1000, 3),
        cache_n=num_cached,
        prompt_n=computed,
        prompt_ms=round(prompt_s * 1000, 3),
        prompt_per_token_ms=round(prompt_s * 1000 / computed, 3) if computed else 0.0,
        prompt_per_second=round(computed / prompt_s, 2) if prompt_s > 0 else 0.0,
        predicted_n=num_generated,
        predicted_ms=round(decode_s * 1000, 3),
        predicted_per_token_ms=round(decode_s * 1000 / steps, 3) if steps else 0.0,
        predicted_per_second=round(steps / decode_s, 2) if decode_s > 0 else 0.0,
    )


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The inside of an OpenAI error; the token counts only where the context overflowed."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class ErrorBody(msgspec.Struct, frozen=True):
    """An OpenAI error, as a body or as a stream event."""

    error: ErrorDetail
