"""Log-probabilities: of the raw logits, best first, whatever the sampling parameters do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ds4.generation import MAX_TOP_LOGPROBS, SamplingParams
from tests.workers.sampling import oracle
from workers.sampling.interface import SeatParams, StepResult
from workers.sampling.sampler import HostSampler


def _run(logits: NDArray[np.float32], sampling: list[SamplingParams]) -> StepResult:
    n = len(logits)
    sampler, result = HostSampler(n, logits.shape[1]), StepResult(n)
    for seat, params in enumerate(sampling):
        history = np.arange(6, dtype=np.uint32)
        sampler.seat(seat, SeatParams(sampling=params, history=history, num_prompt_tokens=3))
    sampler.sample(logits, np.arange(n, dtype=np.int32), np.full(n, 6, np.int32), result)
    return result


@given(st.integers(0, 2**32), st.sampled_from([32, 33, 200, 5003]), st.integers(0, MAX_TOP_LOGPROBS))
@settings(max_examples=60, deadline=None)
def test_they_are_the_log_softmax_of_the_models_logits(seed: int, vocab: int, num_top: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((5, vocab)) * rng.choice([0.1, 3.0, 30.0])).astype(np.float32)
    logits[3] = np.round(logits[3])  # ties
    logits[4, rng.random(vocab) < 0.5] = -np.inf
    logits[4, 0] = 0.0
    sampling = [
        SamplingParams(temperature=0.0, num_logprobs=num_top),
        SamplingParams(temperature=1.7, top_k=9, num_logprobs=num_top, seed=seed),
        SamplingParams(repetition_penalty=1.5, logit_bias=((2, 50.0),), num_logprobs=num_top, seed=seed),
        SamplingParams(temperature=0.3, presence_penalty=1.0, num_logprobs=num_top, seed=seed),
        SamplingParams(min_p=0.1, num_logprobs=num_top, seed=seed),
    ]
    result = _run(logits, sampling)
    for i, row in enumerate(logits):
        expected = oracle.log_softmax(row)
        # float32 weights and a float32 result: about 1e-7 of the value.
        np.testing.assert_allclose(result.logprobs[i], expected[result.token_ids[i]], rtol=3e-6, atol=3e-6)
        order = np.lexsort((np.arange(vocab), -row))[:num_top]
        finite = order[np.isfinite(row[order])]
        assert result.top_ids[i, : len(finite)].tolist() == finite.tolist()
        np.testing.assert_allclose(
            result.top_logprobs[i, : len(finite)], expected[finite], rtol=3e-6, atol=3e-6
        )
        assert (result.top_logprobs[i, len(finite) : num_top] == -np.inf).all()


def test_rows_of_one_batch_may_ask_for_different_numbers() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    logits[1] = np.nan
    asked = [-1, 5, 0, 20]
    result = _run(logits, [SamplingParams(num_logprobs=n) for n in asked])
    assert result.ok[:4].tolist() == [True, False, True, True]
    expected = oracle.log_softmax(logits[3])
    assert result.top_ids[3].tolist() == np.argsort(-logits[3], kind="stable")[:20].tolist()
    assert result.logprobs[3] == pytest.approx(expected[result.token_ids[3]], abs=1e-5)
    assert result.logprobs[2] == pytest.approx(oracle.log_softmax(logits[2])[result.token_ids[2]], abs=1e-5)


def test_a_flat_row_reports_the_lowest_ids() -> None:
    result = _run(np.full((1, 5000), 4.0, np.float32), [SamplingParams(temperature=0.0, num_logprobs=20)])
    assert result.top_ids[0].tolist() == list(range(20))
    np.testing.assert_allclose(result.top_logprobs[0], -np.log(5000), rtol=1e-6)


def test_the_best_token_of_a_certain_model_has_log_probability_zero() -> None:
    logits = np.full((1, 64), -200.0, np.float32)
    logits[0, 9] = 50.0
    result = _run(logits, [SamplingParams(num_logprobs=2)])
    assert result.token_ids[0] == 9
    assert result.logprobs[0] == 0.0
    assert result.top_logprobs[0, 1] == pytest.approx(-250.0)
