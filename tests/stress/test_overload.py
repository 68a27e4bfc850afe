"""The overload run, short: see overload.py for the long one."""

import pytest

from tests.stress.overload import Plan, overload


@pytest.mark.stress
@pytest.mark.e2e
def test_too_many_clients_are_refused_honestly_and_nothing_grows() -> None:
    outcome = overload(Plan(seconds=6.0, idle=300, slots=8, slow=4, dribbling=8))
    assert outcome.faults == []
    assert outcome.counts["whole"] > 0
    assert outcome.counts["429"] > 0
    assert outcome.idle_open == 300
