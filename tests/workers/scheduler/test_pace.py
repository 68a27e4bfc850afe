"""The limit of prompt rows beside decode rows."""

import pytest

from workers.scheduler.pace import MIN_ROWS, TARGET_S, PrefillPace


def test_without_a_measurement_there_is_no_limit() -> None:
    assert PrefillPace(512).max_prompt_rows == 512


def test_a_fast_device_keeps_the_whole_budget() -> None:
    pace = PrefillPace(512)
    pace.note(512, 512, 0.02)
    assert pace.max_prompt_rows == 512


def test_a_very_slow_device_still_gets_on() -> None:
    pace = PrefillPace(512)
    pace.note(100, 100, 60.0)
    assert pace.max_prompt_rows == MIN_ROWS


def test_decode_steps_say_nothing() -> None:
    pace = PrefillPace(512)
    pace.note(1, 5, 10.0)
    assert pace.max_prompt_rows == 512


@pytest.mark.parametrize(("fixed_s", "row_s"), [(0.0, 0.002), (0.05, 0.001), (0.1, 0.005)])
def test_mixed_steps_settle_at_the_target(fixed_s: float, row_s: float) -> None:
    pace = PrefillPace(512)
    pace.note(512, 512, fixed_s + 512 * row_s)
    for _ in range(40):
        rows = pace.max_prompt_rows
        pace.note(rows, rows, fixed_s + rows * row_s)
    assert fixed_s + pace.max_prompt_rows * row_s == pytest.approx(TARGET_S, rel=0.1)
