"""The block-maximum filter against a plain sort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from workers.sampling import candidates

VOCABS = [32, 33, 63, 97, 1000, 1024, 4099, 32000, 49152, 50257]


def _sorted_ids(row: NDArray[np.float32], k: int) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def _check(logits: NDArray[np.float32], k: int) -> candidates.Candidates:
    got = candidates.best(logits, k)
    for i, row in enumerate(logits):
        expected = _sorted_ids(row, k)
        if got.complete[i]:
            finite = [j for j in expected if row[j] != -np.inf]
            missing = k - len(finite)
            assert got.ids[i].tolist() == finite + [0] * missing
            assert got.values[i].tolist() == row[finite].tolist() + [-np.inf] * missing
        assert candidates.ranked(row)[:k].tolist() == expected
    return got


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_best_k_of_random_rows_are_those_of_a_sort(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((3, vocab)) * 4).astype(np.float32)
    for k in (1, 2, 20, 64, 1024, vocab):
        if k <= vocab:
            assert _check(logits, k).complete.all()


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 300)),
        elements=st.one_of(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-45, -np.inf]),
            st.floats(-50, 50, width=32),
        ),
    ),
    st.data(),
)
@settings(max_examples=300)
def test_ties_zeros_of_both_signs_and_extremes_sort_by_value_then_id(
    logits: NDArray[np.float32], data: st.DataObject
) -> None:
    _check(logits, data.draw(st.integers(1, logits.shape[1])))


def test_a_row_of_equal_values_is_reported_incomplete_and_harms_no_other() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 5000)).astype(np.float32)
    logits[1] = 2.5
    got = _check(logits, 40)
    assert got.complete.tolist() == [True, False, True]


def test_masked_logits_are_nobodys_candidates_and_cost_no_sort_of_the_row() -> None:
    logits = np.full((2, 5000), -np.inf, np.float32)
    logits[0, [4000, 7]] = 1.0, 2.0
    got = _check(logits, 40)
    assert got.complete.all()


def test_all_rows_incomplete_is_answered() -> None:
    assert not candidates.best(np.zeros((2, 5000), np.float32), 40).complete.any()


def test_the_best_values_may_all_lie_in_one_block() -> None:
    # Worst case of the filter: a strided column, and a contiguous run, hold every large value.
    for ids in (np.arange(40) * 250, np.arange(40), np.arange(40) + 9960):
        row = np.linspace(-1, 0, 10_000, dtype=np.float32)
        row[ids] = np.arange(40, dtype=np.float32) + 1
        _check(row[None], 40)


def test_values_past_the_last_whole_block_are_found() -> None:
    for vocab in range(1000, 1070):
        row = -np.arange(vocab, dtype=np.float32)
        row[-1] = 5.0
        assert candidates.best(row[None], 3).ids[0].tolist() == [vocab - 1, 0, 1]
