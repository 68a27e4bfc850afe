"""From the ring into the engine: submissions become sequences, with every range checked again.

Owns the checks and the coalescing window. Runs in the worker. A front end is another process, maybe
of another user's making one day: whatever it wrote is only bytes until it has passed here. What does
not pass ends alone, with ErrorCode.INVALID_REQUEST and a text that says why.
"""

import itertools
import math
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ErrorCode
from ds4.generation import (
    MAX_BIASES,
    MAX_CACHE_SALT_BYTES,
    MAX_STOP_IDS,
    MAX_TENANT,
    MAX_TOP_LOGPROBS,
    MAX_WEIGHT,
    NO_LOGPROBS,
    GenerationRequest,
    SamplingParams,
    decode_request,
)
from ds4.ring.worker_end import Submission
from workers.sequence import Sequence, token_array

_SLICE_S: Final = 250e-6  # the window is slept in slices, each ended early by a bell


class RefusedError(Exception):
    """A submission that will not become a sequence. `code` and the text go to the front end."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
        super().__init__(text)
        self.code = code


class Admission:
    """Turns submissions into sequences. Owned by the engine."""

    def __init__(
        self, *, vocab_size: int, max_context_tokens: int, max_prompt_tokens: int, clock: Callable[[], float]
    ) -> None:
        self._vocab_size = vocab_size
        self._max_context_tokens = max_context_tokens
        self._max_prompt_tokens = max_prompt_tokens  # what all KV pages together can hold
        self._clock = clock
        self._arrivals = itertools.count()

    def sequence(self, submission: Submission) -> Sequence:
        """The submission as a sequence. Raises RefusedError."""
        try:
            request = decode_request(submission.params)
        except msgspec.DecodeError as error:
            raise RefusedError(f"the request cannot be decoded: {error}") from None
        prompt, num_scored = submission.prompt, 0
        if request.scores_prompt:
            # What an earlier worker delivered is a part of the prompt again.
            num_scored = request.num_resumed_tokens
            if not 0 <= 2 * num_scored < max(1, len(prompt)):
                raise RefusedError(f"{num_scored} scores are more than a part of {len(prompt)} tokens has")
            prompt = prompt[: len(prompt) - num_scored]
            request = msgspec.structs.replace(request, num_resumed_tokens=0)
        self._check_prompt(prompt, request)
        self._check_request(request)
        check_sampling(request.sampling, self._vocab_size)
        sequence = Sequence(
            request_id=submission.request_id,
            slot=submission.slot,
            front_end=submission.front_end,
            arrival=next(self._arrivals),
            request=request,
            prompt=token_array(prompt.astype(np.uint32, copy=False).tobytes()),
            max_context_tokens=self._max_context_tokens,
            submitted_s=self._clock(),
        )
        sequence.num_scored = num_scored
        return sequence

    def _check_prompt(self, prompt: NDArray[np.uint32], request: GenerationRequest) -> None:
        if len(prompt) == 0:
            raise RefusedError("the prompt is empty")
        largest = int(prompt.max())
        if largest >= self._vocab_size:
            raise RefusedError(
                f"prompt token {largest} is not in the vocabulary of {self._vocab_size} tokens"
            )
        if len(prompt) > self._max_prompt_tokens:
            raise RefusedError(
                f"the prompt has {len(prompt)} tokens, and the KV cache holds {self._max_prompt_tokens}",
                ErrorCode.TOO_LARGE,
            )
        if len(prompt) >= self._max_context_tokens + request.scores_prompt:  # which needs no room for output
            raise RefusedError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for output "
                f"in a context of {self._max_context_tokens}"
            )
        if not 0 <= request.num_resumed_tokens < len(prompt):
            raise RefusedError(
                f"num_resumed_tokens {request.num_resumed_tokens} is not below the prompt's {len(prompt)} tokens"
            )

    def _check_request(self, request: GenerationRequest) -> None:
        if request.max_tokens < 0:
            raise RefusedError(f"max_tokens {request.max_tokens} is negative")
        if request.min_tokens < 0:
            raise RefusedError(f"min_tokens {request.min_tokens} is negative")
        if len(request.cache_salt) > MAX_CACHE_SALT_BYTES:
            raise RefusedError(f"a cache salt of more than {MAX_CACHE_SALT_BYTES} bytes")
        if not 0 <= request.tenant <= MAX_TENANT:
            raise RefusedError(f"tenant {request.tenant} is not between 0 and {MAX_TENANT}")
        if not 1 <= request.weight <= MAX_WEIGHT:
            raise RefusedError(f"weight {request.weight} is not between 1 and {MAX_WEIGHT}")
        if len(request.stop_token_ids) > MAX_STOP_IDS:
            raise RefusedError(f"more than {MAX_STOP_IDS} stop token ids")
        _check_ids("stop token", request.stop_token_ids, self._vocab_size)


def _check_ids(what: str, ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RefusedError(f"{what} id {token_id} is not in the vocabulary of {vocab_size} tokens")


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Every sampling parameter in its range; NaN is in none. Raises RefusedError."""
    ranges = (
        ("temperature", sampling.temperature, 0.0, 1e6),
        ("top_k", sampling.top_k, 0, 2**31 - 1),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("typical_p", sampling.typical_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 1e-6, 1e6),
        ("presence_penalty", sampling.presence_penalty, -1e6, 1e6),
        ("frequency_penalty", sampling.frequency_penalty, -1e6, 1e6),
        ("seed", sampling.seed, 0, 2**64 - 1),
        ("num_logprobs", sampling.num_logprobs, NO_LOGPROBS, MAX_TOP_LOGPROBS),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise RefusedError(f"{name} {value} is not between {low} and {high}")
    if len(sampling.logit_bias) > MAX_BIASES:
        raise RefusedError(f"more than {MAX_BIASES} logit biases")
    _check_ids("logit_bias", tuple(token_id for token_id, _ in sampling.logit_bias), vocab_size)
    for token_id, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            raise RefusedError(f"the logit bias {bias} of token {token_id} is not finite")


class CoalescingWindow:
    """How long an idle engine waits before its first step, so that requests start together.

    It waits only where waiting can help: somebody is pending, there is room for more, and front ends
    are preparing requests that have not arrived. A lone stream therefore never pays. While the engine
    runs, the step itself is the window. Owned by the engine.
    """

    def __init__(self, *, window_us: int, max_seats: int, clock: Callable[[], float]) -> None:
        self._window_s = window_us / 1e6
        self._max_seats = max_seats
        self._clock = clock
        self._deadline_s: float | None = None

    def set(self, window_us: int) -> None:
        """Change the window's length."""
        self._window_s = window_us / 1e6

    def wait_s(self, *, num_waiting: int, num_preparing: int) -> float:
        """How long to sleep before asking again; 0: start now. Called while nothing runs."""
        if num_waiting == 0 or num_waiting >= self._max_seats or num_preparing == 0:
            self._deadline_s = None
            return 0.0
        now = self._clock()
        if self._deadline_s is None:
            self._deadline_s = now + self._window_s
        left = self._deadline_s - now
        if left <= 0.0:
            return 0.0  # the deadline stands until the engine has started
        return min(left, _SLICE_S)

    def close(self) -> None:
        """The engine started: the next window begins anew."""
        self._deadline_s = None
