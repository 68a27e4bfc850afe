"""logit_bias and suppression on one row."""

import numpy as np

from ds4.generation import SamplingParams
from workers.sampling.bias import Bias, wanted
from workers.sampling.interface import SeatParams


def _params(
    bias: tuple[tuple[int, float], ...] = (), suppressed: tuple[int, ...] = (), below: int = 0
) -> SeatParams:
    return SeatParams(
        sampling=SamplingParams(logit_bias=bias),
        history=np.zeros(0, np.uint32),
        num_prompt_tokens=0,
        suppressed_ids=suppressed,
        suppress_below=below,
    )


def _apply(params: SeatParams, row: list[float], position: int = 0) -> list[float]:
    logits = np.array(row, np.float32)
    Bias(params).apply(logits, position)
    values: list[float] = logits.tolist()
    return values


def test_only_sequences_that_ask_are_touched() -> None:
    assert not wanted(_params())
    assert not wanted(_params(suppressed=(1,), below=0))
    assert not wanted(_params(below=9))
    assert wanted(_params(suppressed=(1,), below=9))
    assert wanted(_params(bias=((0, 1.0),)))


def test_a_bias_is_added_and_a_repeated_id_adds_up() -> None:
    assert _apply(_params(((2, 1.5), (0, -1.0), (2, 0.5))), [1.0, 1.0, 1.0]) == [0.0, 1.0, 3.0]


def test_suppression_beats_any_bias_and_ends_at_its_position() -> None:
    params = _params(((1, 100.0),), (1,), 5)
    assert _apply(params, [0.0, 0.0], 4) == [0.0, -np.inf]
    assert _apply(params, [0.0, 0.0], 5) == [0.0, 100.0]


def test_a_bias_never_makes_a_logit_infinite_nor_brings_a_masked_one_back() -> None:
    largest = float(np.finfo(np.float32).max)
    params = _params(((0, 1e38), (1, 100.0), (2, -1e38)))
    assert _apply(params, [largest, -np.inf, -largest]) == [largest, -np.inf, -largest]


def test_a_sequence_is_left_alone_once_its_suppression_is_over() -> None:
    assert Bias(_params(suppressed=(1,), below=5)).adjust_below == 5
    assert Bias(_params(bias=((0, 1.0),), suppressed=(1,), below=5)).adjust_below > 2**40
