"""What a sampler is given for a seat and what it fills in for a step.

Owns: `SeatParams`, `StepResult`. Frozen data and plain arrays, used by every device; the device seam
(`workers/devices/interface.py`) passes both through under the same names. Runs in the worker.
Source: this project.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.generation import MAX_TOP_LOGPROBS, SamplingParams


class SeatParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a device keeps for one seat.

    `history` [n] uint32: prompt and already generated ids (resume, preemption); ids from
    `num_prompt_tokens` on are output and count for presence and frequency penalties. Tokens sampled
    later are counted by the device itself. `suppressed_ids` are never drawn for a token whose position
    in the sequence is below `suppress_below` (min_tokens).
    """

    sampling: SamplingParams
    history: NDArray[np.uint32]
    num_prompt_tokens: int
    suppressed_ids: tuple[int, ...] = ()
    suppress_below: int = 0


class StepResult:
    """One step's output, [num_samples] in the order of `StepBatch.sample_rows`.

    The arrays belong to the device and are valid until the next `collect`.
    """

    def __init__(self, max_seats: int) -> None:
        self.num_samples = 0
        self.token_ids = np.zeros(max_seats, np.int32)
        # False: the row's logits held NaN or +inf, or nothing that may be drawn; token_ids is meaningless
        self.ok = np.zeros(max_seats, np.bool_)
        # Only of seats that asked: natural log-probabilities at temperature 1, before any filter.
        self.logprobs = np.zeros(max_seats, np.float32)
        self.top_ids = np.zeros((max_seats, MAX_TOP_LOGPROBS), np.int32)  # best first
        self.top_logprobs = np.zeros((max_seats, MAX_TOP_LOGPROBS), np.float32)
        self.elapsed_s = 0.0  # device time of the step
