"""ds4/protocol/openai_completions.py: shapes of prompts, log-probabilities."""

from typing import Any

import msgspec
import pytest

from ds4.errors import RequestError
from ds4.protocol.common import SamplingDefaults, Vocabulary
from ds4.protocol.openai_completions import decode_completion, plan_completion, prompts_of, scores_prompt

_VOCABULARY = Vocabulary(size=100, end_ids=frozenset({2}), spell=lambda text: list(text.encode()))


def _decode(**fields: Any) -> Any:
    return decode_completion(msgspec.json.encode(fields))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [""]),
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_every_shape_of_prompt_is_understood(prompt: Any, prompts: list[Any]) -> None:
    assert prompts_of(_decode(prompt=prompt), 100) == prompts


@pytest.mark.parametrize(
    "prompt", [None, [], {}, 5, [1, "a"], [None], [[1, "a"]], [[1.0]], [True], [100], [-1]]
)
def test_other_shapes_and_unknown_ids_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        prompts_of(_decode(prompt=prompt), 100)
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


@pytest.mark.parametrize(
    ("logprobs", "number"), [(None, -1), (0, 0), (5, 5), (20, 20), (True, 0), (False, -1)]
)
def test_logprobs_are_a_count(logprobs: Any, number: int) -> None:
    plan = plan_completion(_decode(prompt="x", logprobs=logprobs), SamplingDefaults(), _VOCABULARY)
    assert plan.sampling.num_logprobs == number


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 1000}, "n"),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan_completion(_decode(prompt="x", **fields), SamplingDefaults(), _VOCABULARY)
    assert caught.value.param == param


def test_no_tokens_at_all_may_be_asked_for() -> None:
    plan = plan_completion(_decode(prompt="x", max_tokens=0), SamplingDefaults(), _VOCABULARY)
    assert plan.generation(5, 100, 0, "prompt").max_tokens == 0
    assert plan.generation(100, 100, 0, "prompt").max_tokens == 0


def test_the_best_are_chosen_among_more_with_the_help_of_log_probabilities() -> None:
    plan = plan_completion(_decode(prompt="x", n=2, best_of=5), SamplingDefaults(), _VOCABULARY)
    assert plan.num_choices == 5
    assert plan.sampling.num_logprobs == 0


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": True, "logprobs": True}, True),
        ({"echo": True, "logprobs": False}, False),
        ({"echo": True}, False),
        ({"logprobs": 1}, False),
    ],
)
def test_a_prompt_is_scored_where_it_is_echoed_with_log_probabilities(
    fields: dict[str, Any], scores: bool
) -> None:
    assert scores_prompt(_decode(prompt="x", **fields)) is scores
