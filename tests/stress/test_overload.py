"""The overload run, short: see overload.py for the long one."""

import pytest

from tests.stress.overload import Plan, overload


@pytest.mark.stress
@pytest.mark.e2e
def test_too_many_clients_are_refused_honestly_and_nothing_grows() -> None:
    outcome = overload(Plan(seconds=4.0, idle=300, sessions=8, slots=8, slow=4, dribbling=8))
    assert outcome.faults == []
    assert [phase.name for phase in outcome.phases] == [
        "peak",
        "polite",
        "peak",
        "tenfold",
        "peak",
        "rude",
        "peak",
    ]
    for phase in outcome.phases:
        assert phase.whole > 0, phase
        assert phase.refused > 0 or phase.name == "peak", phase
    assert outcome.idle_open == 308
