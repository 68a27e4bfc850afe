"""top_k, min_p and top_p on sorted candidates: what each keeps, and when more candidates are needed."""

from typing import Any

import numpy as np

from workers.sampling import filters
from workers.sampling.seats import NO_TOP_K

PROBABILITIES = [0.4, 0.3, 0.2, 0.1]


def _draw(
    uniform: float,
    *,
    values: list[float] | None = None,
    whole_row: bool = True,
    temperature: float = 1.0,
    top_k: int = NO_TOP_K,
    min_p: float = 0.0,
    top_p: float = 1.0,
    mass: float = np.nan,
) -> int:
    logits = np.log(PROBABILITIES) if values is None else np.array(values)
    index = filters.draw(
        logits.astype(np.float32)[None],
        whole_row=whole_row,
        temperature=np.array([temperature], np.float32),
        top_k=np.array([top_k], np.int64),
        min_p=np.array([min_p], np.float32),
        top_p=np.array([top_p], np.float64),
        mass=np.array([mass], np.float64),
        uniform=np.array([uniform], np.float64),
    )
    return int(index[0])


def _support(**changes: Any) -> list[int]:
    """How many of 1000 evenly spaced uniform numbers draw each index."""
    drawn = [_draw((i + 0.5) / 1000, **changes) for i in range(1000)]
    return [drawn.count(index) for index in range(max(drawn) + 1)]


def test_without_filters_each_candidate_has_its_probability() -> None:
    assert _support() == [400, 300, 200, 100]


def test_a_number_on_the_border_of_two_candidates_draws_the_second() -> None:
    assert _draw(0.5, values=[1.0, 1.0]) == 1
    assert _draw(0.0) == 0


def test_top_k_keeps_the_first_and_renormalises() -> None:
    assert _support(top_k=2) == [571, 429]


def test_min_p_is_relative_to_the_best() -> None:
    assert len(_support(min_p=0.49)) == 3
    assert len(_support(min_p=0.51)) == 2
    assert _support(min_p=1.0) == [1000]
    assert _support(min_p=1.0, values=[2.0, 2.0, 1.0]) == [500, 500]


def test_top_p_keeps_the_shortest_prefix_that_reaches_its_share() -> None:
    assert len(_support(top_p=0.39)) == 1
    assert len(_support(top_p=0.41)) == 2
    assert len(_support(top_p=0.69)) == 2
    assert len(_support(top_p=0.91)) == 4
    assert _support(top_p=0.0) == [1000]


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    # Of the three left (0.4, 0.3, 0.2 of 0.9), two hold 0.78.
    assert len(_support(top_k=3, top_p=0.77)) == 2
    assert len(_support(top_k=3, top_p=0.79)) == 3
    assert len(_support(min_p=0.4, top_p=0.77)) == 2


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    assert _support(temperature=0.01) == [1000]
    assert _support(temperature=1e30) == [250] * 4


def test_too_few_candidates_are_told_from_enough() -> None:
    def some(uniform: float, **changes: Any) -> int:
        return _draw(uniform, whole_row=False, **changes)

    assert some(0.1) == filters.UNDECIDED  # nothing says how much mass is missing
    assert some(0.1, mass=5.0) == 0  # the best weighs 1, the four 2.5
    assert some(0.49, mass=5.0) == 3
    assert some(0.51, mass=5.0) == filters.UNDECIDED  # the drawn mass lies past the four
    assert some(0.99, mass=5.0, top_p=0.49) == 3
    assert some(0.01, mass=5.0, top_p=0.51) == filters.UNDECIDED
    assert some(0.99, top_k=4) == 3
    assert some(0.99, top_k=5) == filters.UNDECIDED
    assert some(0.99, min_p=0.3) == 2
    assert some(0.99, min_p=0.2) == filters.UNDECIDED
    assert some(0.99, values=[1.0, 1.0, -np.inf]) == 1


def test_a_candidate_of_weight_zero_is_never_drawn_even_if_the_mass_is_overstated() -> None:
    assert _draw(1 - 2**-53, values=[0.0, 0.0, -500.0, -np.inf], mass=2.0000001) == 1
