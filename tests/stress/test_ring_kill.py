"""The kill test of the ring, short: see ring_kill.py for the long one."""

import pytest

from tests.stress.ring_kill import Plan, strike


@pytest.mark.stress
def test_kills_and_stops_lose_or_damage_no_token_and_leak_nothing() -> None:
    outcome = strike(Plan(seconds=6.0, front_ends=3, streams=16, seed=7, calm_s=0.2, blows=8))
    assert outcome.faults == []
    assert outcome.counts["finished"] > 0
    assert sum(outcome.blows.values()) >= 8
