"""No model at all: words drawn by (seed, position), for load tests of everything in front of a device.

Owns: sampling state by seat. Runs in: the worker's thread; depth 0. Source: this project; the numbers are
those of `workers/sampling/uniform.py`, so that a replayed sequence gets its tokens again.

It reads no weights, and keeps neither keys nor values: any GGUF with a tokenizer will do, one without
tensors too. A step takes the time that was asked for, whatever is in it. Of what a client may ask for
it honours what others can see: seed, grammar, `min_tokens`, a bias that forces a token, and the number of
log-probabilities, which are all those of words that are equally likely.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.config import Settings
from ds4.generation import NO_LOGPROBS
from ds4.model_file import ModelFile
from workers.devices.interface import PAGE_TOKENS, Limits, SeatParams, StepBatch, StepResult
from workers.sampling.masks import SeatMasks
from workers.sampling.uniform import stream_of, uniforms

_NORMAL: Final = 1  # tokenizer.ggml.token_type of text
_WORD: Final = re.compile("[\u0120\u2581]?[A-Za-z]+")  # either mark of a space, and letters
_FORCES: Final = 100.0  # a bias from here on decides; the API's own scale ends there
_MAX_PAGES: Final = 1 << 18  # nothing is stored in them, but they are counted one by one


def word_ids(model: ModelFile) -> NDArray[np.int32]:
    """The ids to draw from: plain words, or where there are none all text. Raises ModelFileError."""
    tokens = model.get_list("tokenizer.ggml.tokens", str)
    types = model.get_list("tokenizer.ggml.token_type", int, [])
    normal = [token_id for token_id in range(len(tokens)) if not types or types[token_id] == _NORMAL]
    words = [token_id for token_id in normal if _WORD.fullmatch(tokens[token_id])]
    found = words or normal
    if not found:
        raise model.fault("the vocabulary has no text in it")
    return np.array(found, np.int32)


def open_mock(settings: Settings, model: ModelFile) -> tuple["MockDevice", Limits]:
    """The device and its limits: nothing of it depends on memory. Raises ModelFileError."""
    seats = max(1, settings.batched_sessions)
    trained = model.max_context_tokens
    context = min(settings.ctx or trained, trained)
    per_context = -(-context // PAGE_TOKENS)
    if settings.kv_cache_tokens:
        num_pages = -(-settings.kv_cache_tokens // PAGE_TOKENS)
    else:
        num_pages = max(per_context, min(seats * per_context, _MAX_PAGES))
    limits = Limits(
        max_rows=max(settings.max_batch_tokens, seats),
        max_seats=seats,
        max_context_tokens=min(context, num_pages * PAGE_TOKENS),
        num_pages=num_pages,
    )
    rate = settings.mock_tokens_per_s
    device = MockDevice(limits, word_ids(model), model.vocab_size, step_s=1.0 / rate if rate > 0 else 0.0)
    return device, limits


class MockDevice:
    """One owner, the worker's thread; `seat` and `submit` mutate it."""

    name = "mock"
    pipeline_depth = 0

    def __init__(
        self,
        limits: Limits,
        words: NDArray[np.int32],
        vocab_size: int,
        *,
        step_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`words` [n] are the ids to draw from; a step takes `step_s`."""
        self._words = words
        self._logprob = -math.log(len(words))
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._clock = clock
        self._sleep = sleep
        self._streams = np.zeros(limits.max_seats, np.uint64)
        self._plain = np.ones(limits.max_seats, np.bool_)  # seats that ask for nothing special
        self._params: dict[int, SeatParams] = {}  # of the others
        self._masks = SeatMasks(limits.max_seats, vocab_size)
        self._result = StepResult(limits.max_seats)
        self._result.ok.fill(True)
        self._queued: deque[float] = deque()  # when each queued step is done
        self._done_s = 0.0  # when the latest is
        self._submitted_s = 0.0

    def seat(self, seat: int, params: SeatParams) -> None:
        """Give `seat` to a new sequence."""
        sampling = params.sampling
        self._streams[seat] = stream_of(sampling.seed)
        self._masks.seat(seat, params.constraint)
        is_plain = (
            params.constraint is None
            and not params.suppressed_ids
            and not sampling.logit_bias
            and sampling.num_logprobs == NO_LOGPROBS
        )
        self._plain[seat] = is_plain
        if is_plain:
            self._params.pop(seat, None)
        else:
            self._params[seat] = params

    def submit(self, batch: StepBatch) -> None:
        """Draw a token for every row that wants one."""
        now_s = self._clock()
        # A little late counts as in time, so that the rate is the one that was asked for.
        in_time = now_s - self._done_s < self._step_s
        self._done_s = (self._done_s if in_time else now_s) + self._step_s
        self._submitted_s = now_s
        self._queued.append(self._done_s)
        result, count = self._result, batch.num_samples
        result.num_samples = count
        result.forced = {}
        if not count:
            return
        seats = batch.sample_seats[:count]
        positions = batch.positions[batch.sample_rows[:count]] + 1
        drawn = uniforms(self._streams[seats], positions)
        result.token_ids[:count] = self._words[(drawn * len(self._words)).astype(np.int64)]
        result.ok[:count] = True
        for row in np.flatnonzero(~self._plain[seats]).tolist():
            self._draw_special(row, int(seats[row]), int(positions[row]), float(drawn[row]))
        if self._params:
            sample_of = {int(seat): sample for sample, seat in enumerate(seats) if result.ok[sample]}
            forced = self._masks.accept(
                (seat, int(result.token_ids[sample])) for seat, sample in sample_of.items()
            )
            result.forced = {sample_of[seat]: ids for seat, ids in forced.items()}

    def collect(self) -> StepResult:
        """The step's tokens, when its time is over."""
        wait_s = self._queued.popleft() - self._clock()
        if wait_s > 0.0:
            self._sleep(wait_s)
        self._result.elapsed_s = self._clock() - self._submitted_s
        return self._result

    def close(self) -> None:
        """Nothing to free."""

    def _draw_special(self, row: int, seat: int, position: int, drawn: float) -> None:
        params, result = self._params[seat], self._result
        allowed = self._allowed(seat, params, position)
        if not len(allowed):
            result.ok[row] = False
            return
        token = int(allowed[int(drawn * len(allowed))])
        result.token_ids[row] = token
        num_top = params.sampling.num_logprobs
        if num_top == NO_LOGPROBS:
            return
        result.logprobs[row] = self._logprob
        words = self._words
        others = words[(int(drawn * len(words)) + np.arange(num_top + 1)) % len(words)]
        result.top_ids[row, :num_top] = np.append(token, others[others != token])[:num_top]
        result.top_logprobs[row, :num_top] = self._logprob

    def _allowed(self, seat: int, params: SeatParams, position: int) -> "NDArray[np.int32]":
        """What may be drawn, [n] int32; empty where a constraint cannot go on."""
        if seat in self._masks:
            self._masks.wait()
            if self._masks.has_failed(seat):
                return np.zeros(0, np.int32)
            row = np.zeros(self._vocab_size, np.float32)
            self._masks.apply(seat, row)
            allowed = np.flatnonzero(row == 0.0).astype(np.int32)
        else:
            forced = _forced(params.sampling.logit_bias)
            allowed = self._words if forced is None else np.array([forced], np.int32)
        if position < params.suppress_below:
            kept = allowed[~np.isin(allowed, params.suppressed_ids)]
            allowed = kept if len(kept) else allowed
        return allowed


def _forced(biases: Sequence[tuple[int, float]]) -> int | None:
    token_id, bias = max(biases, key=lambda each: each[1], default=(0, 0.0))
    return token_id if bias >= _FORCES else None
