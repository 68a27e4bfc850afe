"""typical_p: the tokens whose surprise is nearest to what the distribution makes one expect.

Owns: nothing; pure functions. Runs in: the worker. Source: Meister et al., "Locally Typical Sampling" (2023).

With y the logit over the temperature, less the best one, a token's surprise is log(mass) - y, and the expected
surprise is log(mass) less the mean of y: so the distance of the two is that of y from its mean. Kept are the
nearest tokens that together have the share typical_p of the mass; equals stay together.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.generation import SamplingParams

_BIN_SHIFT: Final = 16  # the upper half of a distance's bits: few tokens meet in a bin
_LEAST: Final = float(np.nextafter(0.0, 1.0))


def wanted(params: SamplingParams) -> bool:
    """Whether anything may be left out."""
    return params.typical_p < 1.0


def keep(row: NDArray[np.float32], temperature: np.float32, typical_p: float) -> None:
    """Forbid all others in the logits `row` [vocab], in place. A row that cannot be drawn stays as it is."""
    best = row.max()
    if not np.isfinite(best):
        return
    with np.errstate(over="ignore"):  # far below the best: minus infinity, weight 0
        scaled = (row - best) / temperature
    weights = np.exp(scaled)
    ids = np.flatnonzero(weights)
    mass, scaled = weights[ids].astype(np.float64), scaled[ids]
    total = mass.sum()
    distance = np.abs(scaled - np.float32((mass * scaled).sum() / total))
    limit = _limit(distance, mass, max(typical_p * total, _LEAST))
    is_kept = np.zeros(len(row), np.bool_)
    is_kept[ids] = distance <= limit
    row[~is_kept] = -np.inf


def _limit(distance: NDArray[np.float32], mass: NDArray[np.float64], target: float) -> np.float32:
    """The smallest distance up to which the masses reach `target`. Sorts one bin and no more."""
    bins = distance.view(np.uint32) >> _BIN_SHIFT
    through = np.cumsum(np.bincount(bins, weights=mass))
    found = min(int(np.searchsorted(through, target)), len(through) - 1)
    inside = np.flatnonzero(bins == found)
    order = inside[np.argsort(distance[inside], kind="stable")]
    before = through[found - 1] if found else 0.0
    reached = int(np.searchsorted(before + np.cumsum(mass[order]), target))
    limit: np.float32 = distance[order[min(reached, len(order) - 1)]]
    return limit
