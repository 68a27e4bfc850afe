"""The counter-based generator: its published sequence, its uniformity, and that it has no state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.sampling import oracle
from workers.sampling.uniform import stream_of, uniforms


def _uniforms(seeds: list[int], positions: list[int]) -> list[float]:
    streams = np.array([stream_of(seed) for seed in seeds], np.uint64)
    numbers: list[float] = uniforms(streams, np.array(positions, np.int32)).tolist()
    return numbers


def test_words_are_the_published_splitmix64_sequence() -> None:
    # The widely printed outputs of SplitMix64 started at 1234567.
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    got = uniforms(np.full(4, 1234567, np.uint64), np.arange(4, dtype=np.int32))
    assert got.tolist() == [(word >> 11) * 2.0**-53 for word in words]


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 2)), min_size=1, max_size=40))
def test_numbers_equal_the_integer_arithmetic_of_the_documentation(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = [s for s, _ in pairs], [p for _, p in pairs]
    got = _uniforms(seeds, positions)
    assert got == [oracle.uniform(s, p) for s, p in pairs]
    assert all(0.0 <= u < 1.0 for u in got)


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_numbers_are_uniform_along_positions_and_along_neighbouring_seeds(axis: str) -> None:
    n, bins = 64_000, 64
    counter = list(range(n))
    got = _uniforms([7] * n, counter) if axis == "positions" else _uniforms(counter, [7] * n)
    counts = np.bincount((np.array(got) * bins).astype(int), minlength=bins)
    chi_square = float(((counts - n / bins) ** 2 / (n / bins)).sum())
    assert 30 < chi_square < 110  # 63 degrees of freedom: both tails are far below 1e-3


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    n = 20_000
    base = np.array(_uniforms([3] * n, list(range(n))))
    for seed, shift in ((4, 0), (4, 1), (3, 1), (3 + 2**63, 0)):
        other = np.array(_uniforms([seed] * n, list(range(shift, n + shift))))
        assert abs(float(np.corrcoef(base, other)[0, 1])) < 0.03  # about four standard errors
