"""The chaos run, short: see chaos.py for the long one."""

from collections import Counter

import pytest

from tests.stress.chaos import Plan, Run, strike
from tests.support.raw_http import Answer


@pytest.mark.stress
@pytest.mark.e2e
def test_blows_lose_no_stream_and_leak_nothing() -> None:
    outcome = strike(Plan(seconds=60.0, streams=32, seed=5))
    assert outcome.faults == []
    assert outcome.counts["exact"] > 0
    assert sum(outcome.blows.values()) > 3


def test_the_harness_notices_what_must_not_be() -> None:
    def judged(answer: Answer, *, left: bool = False) -> int:
        run = Run.__new__(Run)
        run.counts, run.faults, run.struck_s = Counter(), [], 0.0
        run.judge(answer, "abc", 100.0, left=left)
        return len(run.faults)

    assert judged(Answer(status=200, text="abc", is_done=True)) == 0
    assert judged(Answer(status=200, text="abd", is_done=True)) == 2
    assert judged(Answer(status=200, text="ab", is_done=True)) == 1
    assert judged(Answer(status=200, text="ab")) == 1
    assert judged(Answer(status=200, text="ab"), left=True) == 0
    assert judged(Answer(status=200, text="ab", error="worker_lost")) == 0
    assert judged(Answer(status=200, text="ax", error="worker_lost")) == 1
    assert judged(Answer(error="connection: EOFError")) == 1, "no front end was struck"
