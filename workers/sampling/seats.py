"""Sampling parameters of every seat, written when it is taken, gathered by seat each step.

Owns: `SeatTable`, mutated only by `HostSampler.seat`. Runs in the worker. Source: this project.
"""

from typing import Final

import numpy as np

from ds4.generation import NO_LOGPROBS, SamplingParams
from workers.sampling.filters import UNDECIDED
from workers.sampling.summary import DRAW
from workers.sampling.uniform import stream_of

# What a seat needs beyond the arg-max of its logits (bits of `SeatTable.needs`).
DRAWS: Final = 1
ADJUSTS: Final = 2  # penalties, bias, suppression or typical_p change its logits first
REPORTS: Final = 4  # log-probabilities

# Below this the softmax is the arg-max to float32 precision but for exact ties.
MIN_TEMPERATURE: Final = 1e-5
NO_TOP_K: Final = int(np.iinfo(np.int64).max)
ALWAYS: Final = int(np.iinfo(np.int64).max)  # a position no sequence reaches


class SeatTable:
    """Parameters by seat. Arrays are [max_seats]; a seat never given out is greedy."""

    def __init__(self, max_seats: int) -> None:
        self.needs = np.zeros(max_seats, np.uint8)
        self.num_logprobs = np.full(max_seats, NO_LOGPROBS, np.int64)
        # What a row's DRAW is before its step: one gather a step. The parameters are its columns.
        self.draws = np.zeros(max_seats, DRAW)
        self.draws["token"], self.draws["mass"] = UNDECIDED, -1.0
        self.adjust_below = self.draws["adjust_below"]  # ADJUSTS holds for positions below this one
        self.temperature, self.min_p = self.draws["temperature"], self.draws["min_p"]
        self.top_k, self.top_p = self.draws["top_k"], self.draws["top_p"]
        self.stream = self.draws["stream"]
        self.temperature[:] = self.top_k[:] = self.top_p[:] = 1

    def set(self, seat: int, params: SamplingParams, *, adjust_below: int) -> None:
        """Overwrite everything that `seat` had."""
        # With one candidate left there is nothing to draw: those are arg-max, lowest id on a tie.
        greedy = params.temperature < MIN_TEMPERATURE or params.top_k == 1 or params.top_p <= 0.0
        needs = 0 if greedy else DRAWS
        if adjust_below > 0:
            needs |= ADJUSTS
        if params.num_logprobs != NO_LOGPROBS:
            needs |= REPORTS
        self.needs[seat] = needs
        self.adjust_below[seat] = adjust_below
        self.temperature[seat] = 1.0 if greedy else min(params.temperature, 3e38)
        self.top_k[seat] = 1 if greedy else params.top_k if params.top_k > 0 else NO_TOP_K
        self.min_p[seat] = params.min_p
        self.top_p[seat] = params.top_p
        self.stream[seat] = stream_of(params.seed)
        self.num_logprobs[seat] = params.num_logprobs
