"""What crosses the ring, as typed values: a request, its tokens, its one ending.

Owned by nobody: frozen data. The worker never sees text; a front end never sees a tensor.
Requests travel as one msgpack array (`encode_request`) beside the prompt, which travels as raw
little-endian u32 ids and never as a msgpack list.
"""

from enum import IntEnum
from typing import Final

import msgspec

from ds4.errors import ErrorCode, WorkerError

MAX_TOP_LOGPROBS: Final = 20
MAX_CACHE_SALT_BYTES: Final = 64
MAX_GRAMMAR_BYTES: Final = 256 * 1024
MAX_STOP_IDS: Final = 4096
MAX_BIASES: Final = 65_536
MAX_TENANT: Final = (1 << 32) - 1
MAX_WEIGHT: Final = 1000
NO_LOGPROBS: Final = -1


class FinishReason(IntEnum):
    """How a generation ended (u32 in the final event)."""

    STOP = 1  # a token of `stop_token_ids` was sampled; that token is not delivered
    LENGTH = 2  # max_tokens, or the context is full
    CANCELLED = 3  # the front end asked for it
    ERROR = 4  # see ErrorCode and the event's text


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one token is drawn from the logits, in this order: penalties, bias, temperature, filters.

    Filters follow the C server ds4: softmax at `temperature`, then (not in ds4) typical_p, top_k, min_p relative to the
    best token, top_p on what is left. `temperature` 0 is arg-max (lowest id wins a tie).
    Random numbers are a function of (seed, position in the sequence) alone.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # u64; the front end draws one where the client gave none
    num_logprobs: int = NO_LOGPROBS  # -1: none, 0: the chosen token's, k: and the k best
    typical_p: float = 1.0


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One sequence to generate; the prompt's ids travel beside it.

    `num_resumed_tokens`: how many of the prompt's last ids are output already delivered by an
    earlier worker; they count towards `max_tokens`, `min_tokens` and the penalties as output.
    `max_tokens` counts the whole output, the resumed part included. `grammar` is what the output has
    to match, in llguidance's own language (ds4/text/grammar.py writes it); it needs an end token among
    `stop_token_ids`, because that is what it ends with.

    `scores_prompt`: nothing is generated; the prompt's own tokens from the second on come back, each with
    its log-probability after those before it, and the ending with the last.

    Cached prefixes are shared only between requests with the same `cache_salt`.

    `tenant` is whose request it is, 0 where nobody is told apart. Waiting requests of different tenants are
    served by `weight`, the same in all requests of a tenant.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()
    num_resumed_tokens: int = 0
    grammar: str = ""
    scores_prompt: bool = False
    cache_salt: bytes = b""
    tenant: int = 0
    weight: int = 1


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """One generated token. `logprob` is the natural log-probability under the model's own
    distribution (temperature 1, before any filter); `top` holds (id, logprob), best first.
    """

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


class GenerationEnd(msgspec.Struct, frozen=True):
    """The one ending of a request."""

    reason: FinishReason
    error_code: int = 0
    error_text: str = ""
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    queue_ms: int = 0  # from the worker's taking it to its first row


_UNFIT: Final = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE})


def failure_of(end: GenerationEnd, *, is_resumed: bool) -> WorkerError:
    """The exception for an ending in an error.

    What a worker refuses that the worker before it took is no mistake of the client's.
    """
    text, code = end.error_text or "the request failed", ErrorCode(end.error_code)
    if is_resumed and code in _UNFIT:
        text = f"the worker was lost, and the next one does not take the request: {text}"
        code = ErrorCode.DEVICE
    return WorkerError(text, code=code)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the worker tells every front end about the model it serves (in the ring's header)."""

    architecture: str
    vocab_size: int
    max_context_tokens: int
    tokenizer_hash: str  # ds4.model_file.ModelFile.tokenizer_hash
    device: str
    batched_sessions: int
    num_pages: int
    page_tokens: int


_request_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(GenerationRequest)
_info_decoder = msgspec.msgpack.Decoder(ModelInfo)


def encode_request(request: GenerationRequest) -> bytes:
    """The request as it lies in a slot descriptor."""
    return _request_encoder.encode(request)


def decode_request(raw: bytes) -> GenerationRequest:
    """Inverse of `encode_request`. Raises msgspec.DecodeError on anything else."""
    return _request_decoder.decode(raw)


def encode_model_info(info: ModelInfo) -> bytes:
    """The model info as it lies in the segment header."""
    return _request_encoder.encode(info)


def decode_model_info(raw: bytes) -> ModelInfo:
    """Inverse of `encode_model_info`. Raises msgspec.DecodeError on anything else."""
    return _info_decoder.decode(raw)
