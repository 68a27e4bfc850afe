"""Which tokens are penalised, by how much, and how counts grow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ds4.generation import SamplingParams
from workers.sampling.penalties import Penalties, wanted


def _apply(
    sampling: SamplingParams, history: list[int], prompt: int, row: list[float], drawn: tuple[int, ...] = ()
) -> list[float]:
    penalties = Penalties(sampling, np.array(history, np.uint32), prompt)
    for token_id in drawn:
        penalties.count(token_id)
    logits: NDArray[np.float32] = np.array(row, np.float32)
    penalties.apply(logits)
    values: list[float] = logits.tolist()
    return values


def test_only_sequences_with_a_penalty_are_counted() -> None:
    assert not wanted(SamplingParams(temperature=0.3, top_k=5))
    assert wanted(SamplingParams(repetition_penalty=0.9))
    assert wanted(SamplingParams(presence_penalty=-0.1))
    assert wanted(SamplingParams(frequency_penalty=0.1))


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    got = _apply(SamplingParams(repetition_penalty=2.0), [0, 1, 1], 2, [4.0, -4.0, 4.0, 0.0, -1.0], (3, 4))
    assert got == [2.0, -8.0, 4.0, 0.0, -2.0]


def test_presence_is_charged_once_and_frequency_per_occurrence_of_output_only() -> None:
    sampling = SamplingParams(presence_penalty=1.0, frequency_penalty=0.25)
    assert _apply(sampling, [0, 0, 1, 2, 2], 2, [5.0] * 4, (2, 3)) == [5.0, 3.75, 3.25, 3.75]


def test_a_token_of_the_prompt_becomes_output_when_it_is_drawn() -> None:
    sampling = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    assert _apply(sampling, [0], 1, [4.0, 4.0]) == [2.0, 4.0]
    assert _apply(sampling, [0], 1, [4.0, 4.0], (0,)) == [1.0, 4.0]


def test_finite_logits_stay_finite_and_masked_ones_stay_masked() -> None:
    got = _apply(
        SamplingParams(repetition_penalty=1e-6, presence_penalty=-1e6), [0, 1, 2], 1, [3e38, -np.inf, -3e38]
    )
    assert np.isfinite(got[0])
    assert got[0] > 3e38
    assert got[1] == -np.inf
    assert np.isfinite(got[2])
    assert np.isfinite(_apply(SamplingParams(repetition_penalty=1e6), [0], 1, [-3e38])).all()


def test_an_empty_history_changes_nothing() -> None:
    assert _apply(SamplingParams(repetition_penalty=3.0), [], 0, [1.0, -1.0]) == [1.0, -1.0]


@given(st.lists(st.integers(0, 199), max_size=60), st.lists(st.integers(0, 199), max_size=300), st.data())
def test_counting_one_by_one_equals_starting_from_the_longer_history(
    history: list[int], drawn: list[int], data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(0, len(history)))
    sampling = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1)
    row = np.linspace(-3, 3, 200).tolist()
    assert _apply(sampling, history, prompt, row, tuple(drawn)) == _apply(
        sampling, history + drawn, prompt, row
    )
