"""logit_bias, and ids that may not be drawn before a position (min_tokens).

Owns: `Bias`, one per seat that asked, made by `HostSampler.seat`; immutable afterwards. Runs in: the
worker. Source: the OpenAI API's logit_bias (added to the logit before the softmax).
"""

import numpy as np
from numpy.typing import NDArray

from workers.sampling.interface import SeatParams
from workers.sampling.penalties import MAX_LOGIT
from workers.sampling.seats import ALWAYS


def wanted(params: SeatParams) -> bool:
    """Whether any logit of the sequence is biased or suppressed."""
    return bool(params.sampling.logit_bias) or bool(params.suppressed_ids and params.suppress_below > 0)


class Bias:
    """What one sequence adds to its logits, and what it forbids."""

    def __init__(self, params: SeatParams) -> None:
        # One entry per id: a repeated id adds up.
        ids, inverse = np.unique(
            np.array([i for i, _ in params.sampling.logit_bias], np.int64), return_inverse=True
        )
        self._ids = ids
        self._values = np.zeros(len(ids), np.float32)
        np.add.at(self._values, inverse, np.array([v for _, v in params.sampling.logit_bias], np.float32))
        self._suppressed = np.array(params.suppressed_ids, np.int64)
        self._suppress_below = params.suppress_below

    @property
    def adjust_below(self) -> int:
        """The position from which on no token of the sequence is affected any more."""
        return ALWAYS if len(self._ids) else self._suppress_below

    def apply(self, row: NDArray[np.float32], position: int) -> None:
        """Change the logits `row` [vocab] in place. Biased logits stay finite or -inf as they were."""
        if len(self._ids):
            before = row[self._ids]
            with np.errstate(over="ignore"):
                after = np.clip(before + self._values, -MAX_LOGIT, MAX_LOGIT)
            row[self._ids] = np.where(np.isfinite(before), after, before)
        if position < self._suppress_below:
            row[self._suppressed] = -np.inf
