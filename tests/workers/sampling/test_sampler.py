"""HostSampler against the obvious oracle, and the promises of the device seam."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ds4.generation import SamplingParams
from tests.workers.sampling import oracle
from workers.sampling.filters import UNDECIDED
from workers.sampling.interface import SeatParams, StepResult
from workers.sampling.sampler import HostSampler
from workers.sampling.summary import DRAW

NO_HISTORY = np.zeros(0, np.uint32)


def seat_params(sampling: SamplingParams, history: list[int] | None = None, prompt: int = 0) -> SeatParams:
    return SeatParams(sampling=sampling, history=np.array(history or [], np.uint32), num_prompt_tokens=prompt)


def run(
    logits: NDArray[np.float32], params: list[SeatParams], positions: list[int] | None = None
) -> StepResult:
    """One step on a fresh sampler; row i is seat i."""
    sampler, result = HostSampler(len(params), logits.shape[1]), StepResult(len(params))
    for seat, p in enumerate(params):
        sampler.seat(seat, p)
    index = np.arange(len(params), dtype=np.int32)
    sampler.sample(logits, index, np.array(positions or [100] * len(params), np.int32), result)
    assert result.num_samples == len(params)
    return result


def tokens(result: StepResult) -> list[int | None]:
    n = result.num_samples
    return [
        t if ok else None for t, ok in zip(result.token_ids[:n].tolist(), result.ok[:n].tolist(), strict=True)
    ]


@st.composite
def seats(draw: st.DrawFn, vocab: int) -> SeatParams:
    """Parameters from the whole accepted range, its corners first."""
    ids = st.integers(0, vocab - 1)
    finite = st.floats(-100, 100, width=32)
    history = draw(st.lists(ids, max_size=30))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 1e-5, 0.01, 0.7, 1.0, 1.5, 100.0, 1e6, 1e30])),
        top_k=draw(
            st.sampled_from([0, 0, 1, 2, 5, 40, 64, 65, 100, 1024, 1025, vocab, vocab + 1, 2**31 - 1])
        ),
        top_p=draw(st.sampled_from([0.0, 1e-9, 0.3, 0.5, 0.9, 0.95, 0.999999, 1.0, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.01, 0.05, 0.5, 0.999, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.1, 0.5, 1e-6, 1e6])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -2.0, 2.0, 1e6])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.1, -2.0, 2.0, -1e6])),
        logit_bias=tuple(draw(st.lists(st.tuples(ids, finite), max_size=4))),
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    suppressed = draw(
        st.one_of(st.just(()), st.lists(ids, max_size=5).map(tuple), st.sampled_from([tuple(range(vocab))]))
        if draw(st.booleans())
        else st.just(())
    )
    return SeatParams(
        sampling=sampling,
        history=np.array(history, np.uint32),
        num_prompt_tokens=draw(st.integers(0, len(history))),
        suppressed_ids=suppressed,
        suppress_below=draw(st.sampled_from([0, 50, 100, 101, 200])),
    )


@st.composite
def logit_rows(draw: st.DrawFn, num_rows: int, vocab: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for _ in range(num_rows):
        kind = draw(st.sampled_from(["normal", "peaked", "flat", "few", "ties", "masked", "huge", "bad"]))
        row = rng.standard_normal(vocab)
        if kind == "normal":
            row *= 3
        elif kind == "peaked":
            row[rng.integers(vocab)] += 20
        elif kind == "flat":
            row[:] = draw(st.sampled_from([0.0, -7.5, 3e38, -3e38]))
        elif kind == "few":
            row = rng.integers(0, 4, vocab).astype(np.float64)
        elif kind == "ties":
            row[rng.integers(0, vocab, vocab // 2)] = 4.0
        elif kind == "masked":
            row[rng.random(vocab) < 0.9] = -np.inf
        elif kind == "huge":
            row *= 1e38
        else:
            row[rng.integers(vocab)] = draw(st.sampled_from([np.nan, np.inf]))
            row[rng.integers(vocab)] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 0.0]))
        rows.append(row)
    stacked = np.array(rows)
    finite = np.isfinite(stacked)
    stacked[finite] = np.clip(stacked[finite], -3e38, 3e38)
    return stacked.astype(np.float32)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_every_row_gets_the_oracles_token_whatever_its_parameters(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([32, 33, 64, 65, 100, 777, 1500, 2111]))
    num_rows = data.draw(st.integers(1, 5))
    params = [data.draw(seats(vocab)) for _ in range(num_rows)]
    logits = data.draw(logit_rows(num_rows, vocab))
    positions = data.draw(st.lists(st.integers(0, 150), min_size=num_rows, max_size=num_rows))
    before = logits.copy()
    got = tokens(run(logits, params, positions))
    np.testing.assert_array_equal(logits, before)
    expected = [
        oracle.sample(row, p, position) for row, p, position in zip(logits, params, positions, strict=True)
    ]
    assert got == expected


@pytest.mark.parametrize("vocab", [49152, 50257, 262144])
def test_a_large_vocabulary_agrees_with_the_oracle_at_every_depth_of_the_search(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rank = rng.permutation(vocab) + 1.0
    logits = np.array([-slope * np.log(rank) for slope in (3.0, 1.5, 1.1, 0.6, 0.1)], np.float32)
    settings_ = [
        SamplingParams(),
        SamplingParams(top_p=0.95),
        SamplingParams(min_p=0.0001),
        SamplingParams(top_k=3000, top_p=0.9),
        SamplingParams(temperature=1.5, top_p=0.99, min_p=1e-7),
    ]
    for i, sampling in enumerate(settings_):
        params = [seat_params(sampling) for _ in logits]
        positions = [10 * i + j for j in range(len(logits))]
        expected = [oracle.sample(row, params[0], p) for row, p in zip(logits, positions, strict=True)]
        assert tokens(run(logits, params, positions)) == expected


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.zeros((2, 50), np.float32)
    logits[1, [7, 30, 49]] = 1.0
    greedy = seat_params(SamplingParams(temperature=0.0))
    assert tokens(run(logits, [greedy, greedy])) == [0, 7]


def test_a_row_with_nan_or_infinity_fails_alone() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 100)).astype(np.float32)
    logits[1, 5], logits[2, 99], logits[4] = np.nan, np.inf, -np.inf
    logits[5, :99] = -np.inf
    for sampling in (
        SamplingParams(temperature=0.0),
        SamplingParams(num_logprobs=3),
        SamplingParams(top_k=5, frequency_penalty=0.5),
    ):
        result = run(logits, [seat_params(sampling, [1, 2])] * 6)
        assert result.ok[:6].tolist() == [True, False, False, True, False, True]
        assert result.token_ids[5] == 99


def test_a_row_with_everything_suppressed_fails_alone() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float32)
    blocked = SeatParams(
        sampling=SamplingParams(),
        history=NO_HISTORY,
        num_prompt_tokens=0,
        suppressed_ids=tuple(range(40)),
        suppress_below=101,
    )
    result = run(logits, [blocked, seat_params(SamplingParams())], [100, 100])
    assert result.ok[:2].tolist() == [False, True]
    assert run(logits[:1], [blocked], [101]).ok[0]


def test_suppressed_ids_return_at_the_position_given() -> None:
    logits = np.zeros((1, 40), np.float32)
    logits[0, 3], logits[0, 4] = 9.0, 5.0
    params = SeatParams(
        sampling=SamplingParams(temperature=0.0),
        history=NO_HISTORY,
        num_prompt_tokens=0,
        suppressed_ids=(3,),
        suppress_below=12,
    )
    assert [tokens(run(logits, [params], [p]))[0] for p in (10, 11, 12, 13)] == [4, 4, 3, 3]


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(top_p=0.5),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, num_logprobs=5),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.3, num_logprobs=0),
    SamplingParams(temperature=1.5, logit_bias=((3, 5.0), (4, -100.0)), num_logprobs=20),
    SamplingParams(temperature=3.0, num_logprobs=1),
]


@pytest.mark.parametrize("vocab", [32, 1000, 8200, 49153])
def test_a_row_draws_the_same_bits_alone_and_among_others(vocab: int) -> None:
    rng = np.random.default_rng(5)
    num_rows = 33
    slopes = rng.uniform(0.2, 3, num_rows)[:, None]
    logits = (-slopes * np.log(rng.permuted(np.tile(np.arange(vocab) + 1.0, (num_rows, 1)), axis=1))).astype(
        np.float32
    )
    logits[7, 0] = np.nan
    params = [
        SeatParams(
            sampling=MIXED[i % len(MIXED)], history=np.arange(i, dtype=np.uint32), num_prompt_tokens=i // 2
        )
        for i in range(num_rows)
    ]
    positions = list(range(200, 200 + num_rows))
    together = run(logits, params, positions)
    for i in range(num_rows):
        alone = run(logits[i : i + 1].copy(), [params[i]], [positions[i]])
        assert alone.ok[0] == together.ok[i]
        if not alone.ok[0]:
            continue
        assert alone.token_ids[0] == together.token_ids[i]
        num_logprobs = params[i].sampling.num_logprobs
        if num_logprobs >= 0:
            assert alone.logprobs[0] == together.logprobs[i]
            k = num_logprobs
            assert alone.top_ids[0, :k].tolist() == together.top_ids[i, :k].tolist()
            assert alone.top_logprobs[0, :k].tolist() == together.top_logprobs[i, :k].tolist()


@pytest.mark.parametrize("sampling", MIXED)
def test_a_sequence_that_is_seated_again_with_its_history_continues_with_the_same_tokens(
    sampling: SamplingParams,
) -> None:
    vocab, prompt = 120, [5, 9, 9, 60]
    rng = np.random.default_rng(3)
    steps = (rng.standard_normal((30, vocab)) * 2).astype(np.float32)

    def continue_from(history: list[int], seat: int) -> list[int]:
        sampler, result = HostSampler(3, vocab), StepResult(3)
        sampler.seat(seat, seat_params(SamplingParams(repetition_penalty=2.0), [1, 2, 3], 1))  # leftovers
        sampler.seat(seat, seat_params(sampling, history, len(prompt)))
        sequence = list(history)
        for position in range(len(history), len(prompt) + len(steps)):
            row = steps[position - len(prompt)][None]
            sampler.sample(row, np.array([seat], np.int32), np.array([position], np.int32), result)
            sequence.append(int(result.token_ids[0]))
        return sequence

    whole = continue_from(prompt, 0)
    for cut in (1, 7, 29):
        assert continue_from(whole[: len(prompt) + cut], 2) == whole


def test_penalties_count_the_tokens_that_the_sampler_itself_drew() -> None:
    vocab = 40
    sampler, result = HostSampler(2, vocab), StepResult(2)
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    sampler.seat(0, seat_params(sampling))
    sampler.seat(1, seat_params(SamplingParams(temperature=0.0)))
    logits = np.zeros((2, vocab), np.float32)
    logits[:, 8], logits[:, 2] = 2.5, 2.0
    drawn = []
    for position in range(5):
        sampler.sample(logits, np.arange(2, dtype=np.int32), np.full(2, position, np.int32), result)
        drawn.append(result.token_ids[:2].tolist())
    assert drawn == [[8, 8], [2, 8], [8, 8], [2, 8], [8, 8]]


def test_a_failed_row_is_not_counted() -> None:
    sampler, result = HostSampler(1, 40), StepResult(1)
    sampler.seat(0, seat_params(SamplingParams(temperature=0.0, presence_penalty=5.0)))
    good, bad = np.zeros((1, 40), np.float32), np.full((1, 40), np.nan, np.float32)
    good[0, 0] = 1.0
    seat, position = np.zeros(1, np.int32), np.zeros(1, np.int32)
    sampler.sample(bad, seat, position, result)
    sampler.sample(good, seat, position, result)
    assert result.token_ids[0] == 0


def test_padding_between_rows_changes_nothing() -> None:
    rng = np.random.default_rng(8)
    padded = (rng.standard_normal((len(MIXED), 1024)) * 2).astype(np.float32)
    padded[:, 1001:] = 1e9
    params = [seat_params(sampling, [4, 5, 6], 2) for sampling in MIXED]
    packed, view = run(padded[:, :1001].copy(), params), run(padded[:, :1001], params)
    assert tokens(packed) == tokens(view)
    assert packed.logprobs.tolist() == view.logprobs.tolist()


def test_an_empty_step_is_answered() -> None:
    sampler, result = HostSampler(1, 40), StepResult(1)
    none = np.zeros(0, np.int32)
    sampler.sample(np.zeros((0, 40), np.float32), none, none, result)
    assert result.num_samples == 0


def test_what_a_device_chose_is_taken_unless_a_row_of_the_step_wants_log_probabilities() -> None:
    sampler, result = HostSampler(3, 100), StepResult(3)
    sampler.seat(0, seat_params(SamplingParams()))
    sampler.seat(1, seat_params(SamplingParams()))
    sampler.seat(2, seat_params(SamplingParams(num_logprobs=0)))  # and stays the last to have had it

    def is_taken(*seats: int, token_id: int = 7) -> bool:
        index, draws = np.array(seats, np.int32), np.zeros(len(seats), DRAW)
        sampler.describe(index, np.full(len(seats), 5, np.int32), draws)
        draws["token"] = token_id
        return sampler.take(index, draws, result)

    assert not is_taken(0, 2)
    assert is_taken(1, 0)
    assert tokens(result) == [7, 7]
    assert not is_taken(1, 0, token_id=UNDECIDED)
    assert is_taken()
    assert tokens(result) == []


def test_rows_may_name_seats_in_any_order() -> None:
    vocab = 64
    logits = np.random.default_rng(0).standard_normal((3, vocab)).astype(np.float32)
    sampler, result = HostSampler(8, vocab), StepResult(8)
    params = {
        5: SamplingParams(seed=1),
        0: SamplingParams(temperature=0.0),
        2: SamplingParams(top_k=3, seed=9),
    }
    for seat, sampling in params.items():
        sampler.seat(seat, seat_params(sampling))
    sampler.sample(logits, np.array([5, 0, 2], np.int32), np.array([1, 2, 3], np.int32), result)
    expected = [
        oracle.sample(row, seat_params(params[seat]), position)
        for row, seat, position in zip(logits, (5, 0, 2), (1, 2, 3), strict=True)
    ]
    assert tokens(result) == expected


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (SamplingParams(), 12),
        (SamplingParams(temperature=0.5), 12),
        (SamplingParams(top_k=4), 4),
        (SamplingParams(min_p=0.3), 0),
        (SamplingParams(top_p=0.7), 0),
        (SamplingParams(top_k=8, min_p=0.05, top_p=0.9, temperature=1.3), 0),
        (SamplingParams(typical_p=0.6), 0),
        (SamplingParams(typical_p=0.8, top_k=4, temperature=1.3), 0),
    ],
)
def test_draws_follow_the_distribution(sampling: SamplingParams, allowed: int) -> None:
    vocab, num_draws = 4000, 20_000
    logits = np.full(vocab, -np.inf, np.float32)
    ids = np.random.default_rng(2).permutation(vocab)[:12]
    logits[ids] = np.linspace(3, 0, 12)
    # The distribution, written from the definition in float64.
    wide = np.exp(logits[ids].astype(np.float64) / sampling.temperature)
    p = wide / wide.sum()
    if sampling.typical_p < 1:
        surprise = -np.log(p)
        nearest = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        p[nearest[np.searchsorted(np.cumsum(p[nearest]), sampling.typical_p) + 1 :]] = 0
    if sampling.top_k:
        p[np.argsort(p == 0, kind="stable")[sampling.top_k :]] = 0
    p[p < sampling.min_p * p.max()] = 0
    p /= p.sum()
    if sampling.top_p < 1:
        p[np.searchsorted(np.cumsum(p), sampling.top_p) + 1 :] = 0
    p /= p.sum()
    if allowed:
        assert np.count_nonzero(p) == allowed

    batch = 500
    sampler, result = HostSampler(batch, vocab), StepResult(batch)
    for seat in range(batch):
        sampler.seat(seat, seat_params(msgspec.structs.replace(sampling, seed=seat)))
    counts = np.zeros(vocab)
    tile, index = np.tile(logits, (batch, 1)), np.arange(batch, dtype=np.int32)
    for position in range(num_draws // batch):
        sampler.sample(tile, index, np.full(batch, position, np.int32), result)
        counts += np.bincount(result.token_ids, minlength=vocab)
    expected = p * num_draws
    observed = counts[ids]
    assert observed.sum() == num_draws
    assert (observed[p == 0] == 0).all()
    drawn = p > 0
    chi_square = float(((observed[drawn] - expected[drawn]) ** 2 / expected[drawn]).sum())
    assert chi_square < 33  # fixed seeds; 99.9 % of 11 degrees of freedom is 31.3
