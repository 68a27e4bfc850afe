"""Masks of seats: packing, the background, and what the sampler makes of them."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.generation import SamplingParams
from workers.sampling.interface import Constraint as AnyConstraint
from workers.sampling.interface import SeatParams, StepResult
from workers.sampling.masks import SeatMasks
from workers.sampling.sampler import HostSampler

VOCAB = 77  # no multiple of 8 or 32


class Constraint:
    """Allows what it is told to, by the number of tokens it has read."""

    def __init__(self, source: "Source", *allowed: set[int]) -> None:
        self.source = source
        self.allowed = allowed
        self.read: list[int] = []
        self.forced: dict[int, list[int]] = {}  # by the token before
        self.failure = ""


class Source:
    """A mask source without a library."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.threads: set[int] = set()
        self._before = before

    def accept(self, drawn: Sequence[tuple[AnyConstraint, int]]) -> list[Sequence[int]]:
        self.threads.add(threading.get_ident())
        for one, token_id in drawn:
            assert isinstance(one, Constraint)
            one.read.append(token_id)
            one.read += one.forced.get(token_id, [])
        return [one.forced.get(token_id, []) for one, token_id in drawn if isinstance(one, Constraint)]

    def compute(self, wanted: Sequence[tuple[AnyConstraint, int]], masks: NDArray[np.uint32]) -> None:
        self._before()
        self.threads.add(threading.get_ident())
        for one, seat in wanted:
            assert isinstance(one, Constraint)
            bits = np.zeros(masks.shape[1] * 32, np.uint8)
            if len(one.read) >= len(one.allowed):
                one.failure = "nothing more"
                bits[0] = 1  # as llguidance, which then allows the end
            else:
                bits[list(one.allowed[len(one.read)])] = 1
            masks[seat] = np.packbits(bits, bitorder="little").view(np.uint32)


def params(
    constraint: Constraint | None = None, sampling: SamplingParams | None = None, **fields: object
) -> SeatParams:
    return SeatParams(
        sampling=sampling or SamplingParams(temperature=0.0),
        history=np.zeros(0, np.uint32),
        num_prompt_tokens=0,
        constraint=constraint,
        **fields,  # type: ignore[arg-type]
    )


def sample(
    sampler: HostSampler, logits: NDArray[np.float32], seats: list[int], position: int = 5
) -> StepResult:
    result = StepResult(8)
    positions = np.full(len(seats), position, np.int32)
    sampler.sample(logits, np.array(seats, np.int32), positions, result)
    return result


def rows(count: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("allowed", [{0}, {76}, {31, 32, 63, 64}, set(range(VOCAB))])
def test_a_mask_forbids_all_but_its_ids(allowed: set[int]) -> None:
    masks = SeatMasks(3, VOCAB)
    masks.seat(2, Constraint(Source(), allowed))
    masks.wait()
    row = rows(1)[0]
    before = row.copy()
    masks.apply(2, row)
    assert set(np.flatnonzero(np.isfinite(row)).tolist()) == allowed
    assert np.array_equal(row[sorted(allowed)], before[sorted(allowed)])


def test_the_next_mask_is_computed_in_the_background_while_the_caller_goes_on() -> None:
    may_compute = threading.Event()
    may_compute.set()
    source = Source(may_compute.wait)
    constraint = Constraint(source, {3}, {4})
    masks = SeatMasks(1, VOCAB)
    masks.seat(0, constraint)
    masks.wait()
    may_compute.clear()
    assert masks.accept([(0, 3)]) == {}  # returns although nothing can be computed yet
    may_compute.set()
    assert masks.wait()[0, 0] == 1 << 4
    assert constraint.read == [3]
    assert source.threads.isdisjoint({threading.get_ident()})


def test_a_constrained_row_draws_what_is_allowed_whatever_its_parameters() -> None:
    source = Source()
    sampler = HostSampler(4, VOCAB)
    samplings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.5, seed=3),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.2, seed=4),
        SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.3, logit_bias=((7, 100.0),), seed=5),
    ]
    allowed = [{1, 2, 70}, {3}, {60, 61}, {9}]
    constraints = [Constraint(source, *allowed, {0}) for _ in samplings]
    for seat, (constraint, sampling) in enumerate(zip(constraints, samplings, strict=True)):
        sampler.seat(seat, params(constraint, sampling))
    for step, ids in enumerate(allowed):
        result = sample(sampler, rows(4, seed=step), [0, 1, 2, 3], position=step)
        assert result.ok[:4].all()
        assert set(result.token_ids[:4].tolist()) <= ids
    assert all(len(constraint.read) >= 3 for constraint in constraints)


def test_rows_without_a_constraint_are_drawn_as_without_neighbours() -> None:
    free = SamplingParams(temperature=1.0, seed=9)
    logits = rows(3)
    alone, mixed = HostSampler(4, VOCAB), HostSampler(4, VOCAB)
    alone.seat(1, params(sampling=free))
    mixed.seat(0, params(Constraint(Source(), {5}, {5})))
    mixed.seat(1, params(sampling=free))
    mixed.seat(2, params(Constraint(Source(), {6}, {6})))
    expected = sample(alone, logits[1:2], [1]).token_ids[0]
    result = sample(mixed, logits, [0, 1, 2])
    assert result.token_ids[:3].tolist() == [5, expected, 6]


def test_log_probabilities_are_those_of_the_model_and_not_of_the_mask() -> None:
    logits = rows(1)
    sampler = HostSampler(1, VOCAB)
    sampler.seat(0, params(Constraint(Source(), {5}), SamplingParams(temperature=0.0, num_logprobs=1)))
    result = sample(sampler, logits, [0])
    wide = logits[0].astype(np.float64)
    assert result.token_ids[0] == 5
    assert result.top_ids[0, 0] == logits[0].argmax()
    logprob = float(wide[5] - np.log(np.exp(wide).sum()))
    assert result.logprobs[0] == pytest.approx(logprob, abs=1e-5)


def test_suppressed_ids_give_way_where_nothing_else_is_allowed() -> None:
    source = Source()
    sampler = HostSampler(1, VOCAB)
    constraint = Constraint(source, {2, 8}, {2}, {2, 8})
    sampler.seat(0, params(constraint, suppressed_ids=(2,), suppress_below=100))
    drawn = [int(sample(sampler, rows(1, seed), [0]).token_ids[0]) for seed in range(3)]
    assert drawn == [8, 2, 8]


def test_a_failed_constraint_fails_its_row_alone_and_the_seat_can_be_used_again() -> None:
    source = Source()
    sampler = HostSampler(2, VOCAB)
    failing = Constraint(source, {2})
    sampler.seat(0, params(failing))
    sampler.seat(1, params(Constraint(source, {3}, {4})))
    assert sample(sampler, rows(2), [0, 1]).token_ids[:2].tolist() == [2, 3]
    result = sample(sampler, rows(2), [0, 1])
    assert result.ok[:2].tolist() == [False, True]
    assert failing.failure
    # One whose logits are changed too, if only by nothing.
    sampler.seat(0, params(sampling=SamplingParams(temperature=0.0, logit_bias=((1, 0.0),))))
    again = sample(sampler, rows(1), [0])
    assert again.ok[0]
    assert again.token_ids[0] == rows(1)[0].argmax()


def test_a_row_that_is_not_sampled_keeps_its_place() -> None:
    source = Source()
    sampler = HostSampler(2, VOCAB)
    first, second = Constraint(source, {2}, {3}), Constraint(source, {4}, {5})
    sampler.seat(0, params(first))
    sampler.seat(1, params(second))
    sample(sampler, rows(1), [0])
    broken = rows(2)
    broken[1, 7] = np.nan
    assert sample(sampler, broken, [0, 1]).ok[:2].tolist() == [True, False]
    assert second.read == []


def test_a_sequence_that_was_preempted_goes_on_where_it_was() -> None:
    source = Source()
    sampler = HostSampler(2, VOCAB)
    constraint = Constraint(source, {2}, {3}, {4})
    sampler.seat(0, params(constraint))
    assert sample(sampler, rows(1), [0]).token_ids[0] == 2
    sampler.seat(0, params())
    sampler.seat(1, params(constraint))
    assert sample(sampler, rows(1), [1]).token_ids[0] == 3


def test_what_is_forced_counts_as_drawn() -> None:
    constraint = Constraint(Source(), {3}, {4}, {4}, {9, 4})
    constraint.forced = {3: [4, 4]}
    sampler = HostSampler(2, VOCAB)
    sampling = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0)
    sampler.seat(0, params(sampling=SamplingParams(temperature=0.0)))
    sampler.seat(1, params(constraint, sampling))
    result = sample(sampler, rows(2), [0, 1])
    assert result.token_ids[1] == 3
    assert result.forced == {1: [4, 4]}
    level = np.zeros((1, VOCAB), np.float32)
    level[0, 4] = 3.9  # less than what two of it cost
    result = sample(sampler, level, [1], position=8)
    assert result.token_ids[0] == 9
    assert result.forced == {}
