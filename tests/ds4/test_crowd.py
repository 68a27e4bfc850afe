"""ds4/crowd.py: who was turned away counts until he had time to come back."""

from ds4 import crowd
from ds4.crowd import Crowd


def test_those_who_were_turned_away_leave_in_the_order_of_their_times() -> None:
    found = Crowd()
    for back_s in (5.0, 3.0, 9.0):
        found.add(back_s)
    assert [found.size(now_s) for now_s in (2.0, 3.0, 8.9, 9.0)] == [3, 2, 1, 0]


def test_a_crowd_has_a_limit() -> None:
    found = Crowd()
    for _ in range(crowd._MAX_REMEMBERED + 5):
        found.add(1.0)
    assert found.size(0.0) == crowd._MAX_REMEMBERED
