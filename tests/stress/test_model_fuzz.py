"""The fuzzing of model files, short: see model_fuzz.py for the long one."""

import pytest

from tests.stress.model_fuzz import fuzz


@pytest.mark.stress
def test_a_model_file_from_hell_works_or_is_refused() -> None:
    outcome = fuzz(seed=1, device="reference", most=250)
    assert outcome.faults == []
    assert outcome.worked > 0
    assert outcome.refused > 0
