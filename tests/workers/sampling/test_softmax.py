"""The mass of a row: right, and the same bits whatever else is computed with it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from workers.sampling.softmax import SoftmaxMass


def _mass(logits: NDArray[np.float32], rows: list[int], temperature: float = 1.0) -> NDArray[np.float64]:
    index = np.array(rows, np.int64)
    t = np.full(len(rows), temperature, np.float32)
    return SoftmaxMass(logits.shape[1]).of(logits[index], logits[index].max(axis=1), t)


@pytest.mark.parametrize("vocab", [32, 100, 8191, 8193, 50257, 262144])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 40.0])
def test_the_mass_is_the_sum_of_exponentials(vocab: int, temperature: float) -> None:
    logits = (np.random.default_rng(vocab).standard_normal((2, vocab)) * 5).astype(np.float32)
    wide = logits.astype(np.float64)
    expected = np.exp((wide - wide.max(axis=1, keepdims=True)) / temperature).sum(axis=1)
    # float32 weights: half an ulp in the division and a few in the exponential, grown by |x| up to 90.
    np.testing.assert_allclose(_mass(logits, [0, 1], temperature), expected, rtol=2e-6)


@pytest.mark.parametrize(("vocab", "num_rows"), [(32, 700), (1000, 300), (8200, 40), (50257, 9)])
def test_a_mass_has_the_same_bits_alone_and_in_any_company(vocab: int, num_rows: int) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((num_rows, vocab)) * 5).astype(np.float32)
    together = _mass(logits, list(range(num_rows)))
    for i in rng.choice(num_rows, 6, replace=False).tolist():
        assert _mass(logits, [i])[0] == together[i]
        assert _mass(logits[i : i + 1].copy(), [0])[0] == together[i]
    shuffled = rng.permutation(num_rows)
    assert (_mass(logits, shuffled.tolist()) == together[shuffled]).all()


def test_minus_infinity_and_extreme_logits_weigh_nothing() -> None:
    logits = np.array([[3e38, -3e38, -np.inf, 3e38] + [-np.inf] * 30], np.float32)
    assert _mass(logits, [0]).tolist() == [2.0]
