"""What a sampler is given for a seat and what it fills in for a step.

Owns: `SeatParams`, `StepResult`, the seam to constraints. Frozen data and plain arrays, used by every device; the device seam
(`workers/devices/interface.py`) passes both through under the same names. Runs in the worker.
Source: this project.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.generation import MAX_TOP_LOGPROBS, SamplingParams


class Constraint(Protocol):
    """What the output of one sequence has to match, and how much of it was read so far.

    Belongs to its sequence and outlives its seats: a sequence that was preempted comes back with the
    constraint as it left. Only `source` reads and changes what is inside.
    """

    @property
    def source(self) -> "MaskSource":
        """Who computes its masks, together with those of others."""
        ...

    @property
    def failure(self) -> str:
        """Why the sequence cannot go on; empty while it can."""
        ...


class MaskSource(Protocol):
    """Reads tokens and computes masks of many constraints at once, on threads of its own.

    Never raises for a constraint: it notes its `failure`. Called from one thread at a time, which need
    not be the device's.
    """

    def accept(self, drawn: Sequence[tuple[Constraint, int]]) -> list[Sequence[int]]:
        """Let each constraint read the token that its sequence drew, and whatever that forces.

        For each, the ids that follow since no mask would allow another: none to draw any more. They are
        read already. Empty where none are, where that was not wanted, and where the constraint failed.
        """
        ...

    def compute(self, wanted: Sequence[tuple[Constraint, int]], masks: NDArray[np.uint32]) -> None:
        """Write what may come next of each constraint into `masks[seat]`.

        masks [max_seats, ceil(vocab / 32)] uint32, C-contiguous: bit i % 32 of word i / 32 is 1 where id
        i may be drawn.
        """
        ...


class SeatParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a device keeps for one seat.

    `history` [n] uint32: prompt and already generated ids (resume, preemption); ids from
    `num_prompt_tokens` on are output and count for presence and frequency penalties. Tokens sampled
    later are counted by the device itself. `suppressed_ids` are never drawn for a token whose position
    in the sequence is below `suppress_below` (min_tokens). `constraint` has read all output ids; it has
    the last word: where it allows suppressed ids only, one of them is drawn.
    """

    sampling: SamplingParams
    history: NDArray[np.uint32]
    num_prompt_tokens: int
    suppressed_ids: tuple[int, ...] = ()
    suppress_below: int = 0
    constraint: Constraint | None = None


class StepResult:
    """One step's output, [num_samples] in the order of `StepBatch.sample_rows`.

    The arrays belong to the device and are valid until the next `collect`.
    """

    def __init__(self, max_seats: int) -> None:
        self.num_samples = 0
        self.token_ids = np.zeros(max_seats, np.int32)
        # By sample: ids that follow the drawn one since its constraint allows no other. The device has
        # taken them as drawn: what it samples next for the seat is the token after all of them.
        self.forced: dict[int, Sequence[int]] = {}
        # False: the row's logits held NaN or +inf, or nothing that may be drawn, or its constraint failed;
        # token_ids is meaningless
        self.ok = np.zeros(max_seats, np.bool_)
        # Only of seats that asked: natural log-probabilities at temperature 1, before any filter.
        self.logprobs = np.zeros(max_seats, np.float32)
        self.top_ids = np.zeros((max_seats, MAX_TOP_LOGPROBS), np.int32)  # best first
        self.top_logprobs = np.zeros((max_seats, MAX_TOP_LOGPROBS), np.float32)
        self.elapsed_s = 0.0  # device time of the step
