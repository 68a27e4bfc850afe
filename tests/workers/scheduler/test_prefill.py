"""How prompts share the rows of a step."""

from hypothesis import given
from hypothesis import strategies as st

from workers.scheduler.prefill import share_rows


def test_a_lone_prompt_gets_all_rows() -> None:
    assert share_rows([100], 16) == [16]
    assert share_rows([5], 16) == [5]


def test_a_short_prompt_shares_with_a_long_one() -> None:
    assert share_rows([100, 6], 16) == [10, 6]


def test_equal_prompts_are_done_one_after_another() -> None:
    assert share_rows([20, 20, 20], 16) == [16, 0, 0]


def test_the_oldest_gets_at_least_half() -> None:
    assert share_rows([100, 3, 3, 3, 3], 16) == [8, 3, 3, 2, 0]


def test_without_rows_nobody_gets_any() -> None:
    assert share_rows([3, 4], 0) == [0, 0]
    assert share_rows([], 7) == []


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 64))
def test_all_rows_are_used_and_nobody_gets_more_than_it_needs(remaining: list[int], num_rows: int) -> None:
    shares = share_rows(remaining, num_rows)
    assert sum(shares) == min(sum(remaining), num_rows)
    assert all(0 <= share <= work for share, work in zip(shares, remaining, strict=True))
    if remaining:
        assert shares[0] >= min(remaining[0], num_rows // 2)
