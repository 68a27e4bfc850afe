"""The page pool: free list and reference counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.kvcache.pages import PagePool


def test_all_pages_are_free_at_first_and_each_is_given_once() -> None:
    pool = PagePool(5)
    taken = pool.take(2) + pool.take(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_held) == (0, 5)
    pool.check([])


def test_a_page_with_two_holders_is_given_up_by_the_last() -> None:
    pool = PagePool(1)
    (page,) = pool.take(1)
    pool.hold([page])
    assert pool.drop([page]) == []
    assert pool.drop([page]) == [page]
    pool.check([page])
    pool.free([page])
    pool.check([])


def test_giving_a_page_back_twice_is_noticed() -> None:
    pool = PagePool(1)
    (page,) = pool.take(1)
    pool.drop([page])
    with pytest.raises(AssertionError):
        pool.drop([page])


def test_taking_more_than_there_is_is_noticed() -> None:
    with pytest.raises(AssertionError):
        PagePool(1).take(2)


def test_a_leaked_page_is_noticed() -> None:
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.drop([page])  # neither free nor kept by anybody
    with pytest.raises(AssertionError, match="leaked"):
        pool.check([])


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "drop"]), st.integers(0, 9)), max_size=60))
def test_every_page_is_always_free_or_held(steps: list[tuple[str, int]]) -> None:
    pool = PagePool(10)
    held: list[int] = []  # one entry for each holder
    for step, number in steps:
        if step == "take":
            held += pool.take(min(number, pool.num_free))
        elif held:
            page = held[number % len(held)]
            if step == "hold":
                pool.hold([page])
                held.append(page)
            else:
                held.remove(page)
                if pool.drop([page]):
                    assert page not in held
                    pool.free([page])
        assert pool.num_held == len(set(held))
        assert pool.num_free == 10 - len(set(held))
        pool.check([])
