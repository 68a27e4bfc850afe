"""workers/sampling/typical.py: which tokens are typical, written from the definition."""

import numpy as np
import pytest
from numpy.typing import NDArray

from workers.sampling import typical


def _kept(row: NDArray[np.float32], typical_p: float, temperature: float = 1.0) -> list[int]:
    after = row.copy()
    typical.keep(after, np.float32(temperature), typical_p)
    kept = np.flatnonzero(np.isfinite(after))
    assert np.array_equal(after[kept], row[kept]), "what is kept is kept as it is"
    return [int(each) for each in kept]


def _defined(row: NDArray[np.float32], typical_p: float, temperature: float) -> list[int]:
    """By surprise and entropy in float64."""
    p = np.exp((row.astype(np.float64) - row.max()) / temperature)
    p /= p.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(p)
        entropy = np.nansum(p * surprise)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    num_kept = int(np.searchsorted(np.cumsum(p[order]), typical_p)) + 1
    return sorted(order[:num_kept].tolist())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("typical_p", [0.05, 0.5, 0.9, 0.99])
def test_it_keeps_what_the_definition_says(typical_p: float, temperature: float) -> None:
    for seed in range(5):
        row = (3 * np.random.default_rng(seed).standard_normal(4000)).astype(np.float32)
        assert _kept(row, typical_p, temperature) == _defined(row, typical_p, temperature)


def test_the_likeliest_token_may_be_untypical() -> None:
    row = np.log(np.array([0.4] + [0.06] * 10)).astype(np.float32)
    assert _kept(row, 0.5) == list(range(1, 11)), "equals stay together"
    assert _kept(row, 0.61) == list(range(11))


def test_nothing_of_the_mass_leaves_the_most_typical() -> None:
    row = np.array([2.0, 1.0, 0.0, -9.0], np.float32)
    assert _kept(row, 0.0) == _defined(row, 1e-12, 1.0)
    assert len(_kept(row, 0.0)) == 1


def test_what_is_forbidden_stays_so_and_a_broken_row_stays_as_it_is() -> None:
    row = np.array([1.0, -np.inf, 1.5, 0.5], np.float32)
    assert 1 not in _kept(row, 0.999)
    for broken in ([np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]):
        before = np.array(broken, np.float32)
        after = before.copy()
        typical.keep(after, np.float32(1), 0.5)
        assert np.array_equal(before, after, equal_nan=True)


def test_one_likely_token_is_typical_at_any_temperature() -> None:
    row = np.full(100, -50, np.float32)
    row[7] = 50
    for temperature in (1e-5, 1.0):
        assert _kept(row, 0.9, temperature) == [7]
