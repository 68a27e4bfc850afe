"""top_k, min_p, top_p and the draw itself, on candidates that are sorted best first.

Owns: nothing; pure functions. Runs in: the worker. Source: the order and meaning of the filters is the
C server ds4's: softmax at the temperature, then top_k, min_p relative to the best token, top_p on what
is left. Precision: see `softmax`; cumulative sums are float64 in candidate order.

The draw inverts the cumulative distribution in candidate order: with C the mass that is kept and u the
row's uniform number, the first candidate whose cumulative mass exceeds u * C.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

UNDECIDED: Final = -1


def draw(
    values: NDArray[np.float32],
    *,
    whole_row: bool,
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    min_p: NDArray[np.float32],
    top_p: NDArray[np.float64],
    mass: NDArray[np.float64],
    uniform: NDArray[np.float64],
) -> NDArray[np.int64]:
    """The index of the drawn candidate of each row, or UNDECIDED where k candidates were too few.

    values [n, k] float32, the k best logits of each row, best first and finite, the others maybe -inf;
    `whole_row` says that k is the vocabulary. The parameters are [n]. `mass` is the row's whole softmax
    mass where neither top_k nor min_p limits it, else NaN. Returns [n] int64.
    """
    num_candidates = values.shape[1]
    with np.errstate(over="ignore"):  # far below the best: minus infinity, weight 0
        weights = np.exp((values - values[:, :1]) / temperature[:, None])
    keep = np.arange(num_candidates) < top_k[:, None]
    keep &= weights >= min_p[:, None]
    weights[~keep] = 0.0
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)

    # What top_k and min_p leave: known if it ends among these candidates or is the given mass.
    known_mass = ~np.isnan(mass)
    ends_here = ~keep[:, -1] | np.isneginf(values[:, -1]) | (top_k <= num_candidates) | whole_row
    left = np.where(known_mass, mass, cumulative[:, -1])

    # top_p keeps the shortest prefix that holds its share of that, at least one candidate.
    limits = top_p < 1.0
    num_below = np.count_nonzero(cumulative < (top_p * left)[:, None], axis=1)
    cut = np.minimum(num_below, num_candidates - 1)
    kept_mass = np.where(limits, cumulative[np.arange(len(values)), cut], left)
    index = np.count_nonzero(cumulative <= (uniform * kept_mass)[:, None], axis=1)

    # Rounding may leave the last sum below the target: never step to a candidate of weight 0.
    last = np.count_nonzero(weights, axis=1) - 1
    reached = np.where(limits, num_below, index) < num_candidates
    decided = ends_here | (known_mass & reached)
    return np.where(decided, np.minimum(index, last), UNDECIDED)
