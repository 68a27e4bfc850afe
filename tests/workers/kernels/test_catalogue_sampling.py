"""Sampling on the device against the host sampler, whose tokens it must draw."""

from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.generation import NO_LOGPROBS, SamplingParams
from tests.workers.kernels.rig import Rig, emulator, needs_compiler
from workers.devices.cuda.backend import Argument
from workers.kernels import catalogue
from workers.kernels.sampling_layout import ALWAYS, IN_PROMPT, NEED_MASKED, NO_TOP_K, RESULT, SEAT
from workers.sampling.interface import SeatParams, StepResult
from workers.sampling.sampler import HostSampler
from workers.sampling.seats import ADJUSTS, SeatTable

pytestmark = needs_compiler

CAPACITY: Final = 16
VOCAB: Final = 500


def seat_row(params: SeatParams) -> NDArray[np.void]:
    """A seat as the kernels read it."""
    sampling = params.sampling
    table = SeatTable(1)
    adjusts = bool(params.suppressed_ids or sampling.logit_bias)
    penalised = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (
        1,
        0,
        0,
    )
    table.set(0, sampling, adjust_below=0)
    row = np.zeros((), SEAT)
    for name in ("stream", "top_p", "temperature", "min_p", "num_logprobs", "needs"):
        row[name] = getattr(table, name)[0]
    row["top_k"] = min(int(table.top_k[0]), NO_TOP_K)
    row["repetition"] = sampling.repetition_penalty
    row["presence"] = sampling.presence_penalty
    row["frequency"] = sampling.frequency_penalty
    is_typical = sampling.typical_p < 1
    if adjusts or penalised or is_typical:
        row["needs"] |= ADJUSTS
        row["adjust_below"] = (
            ALWAYS if penalised or is_typical or sampling.logit_bias else params.suppress_below
        )
    row["num_biases"] = len(sampling.logit_bias)
    row["num_suppressed"] = len(params.suppressed_ids)
    row["suppress_below"] = params.suppress_below
    row["typical_p"] = sampling.typical_p
    return row


class Samplers:
    """The same seats on the host and on a device."""

    def __init__(self, seats: list[SeatParams], *, vocab: int = VOCAB, order: int = 0) -> None:
        self.vocab, self.seats = vocab, seats
        self.host = HostSampler(len(seats), vocab)
        self.rig = Rig(emulator(order))
        self.rows = np.stack([seat_row(params) for params in seats])
        counts = np.zeros((len(seats), vocab), np.int32)
        ids, values = np.zeros((len(seats), CAPACITY), np.int32), np.zeros((len(seats), CAPACITY), np.float32)
        for seat, params in enumerate(seats):
            self.host.seat(seat, params)
            prompt, output = np.split(params.history.astype(np.int64), [params.num_prompt_tokens])
            np.add.at(counts[seat], output, 1)
            if params.sampling.repetition_penalty != 1:
                counts[seat, prompt] |= IN_PROMPT
            biases = params.sampling.logit_bias
            listed = [*(i for i, _ in biases), *params.suppressed_ids]
            ids[seat, : len(listed)] = listed
            values[seat, : len(biases)] = [v for _, v in biases]
        put = self.rig.put
        self._seats, self._counts, self._ids, self._values = (
            put(self.rows),
            put(counts),
            put(ids),
            put(values),
        )
        self.last_tokens = put(np.full(len(seats), -5, np.int32))

    def on_device(
        self, logits: NDArray[np.float32], position: int, masks: NDArray[np.uint32] | None = None
    ) -> NDArray[Any]:
        """Result rows. `position` is the drawn token's."""
        count, rig = len(self.seats), self.rig
        raw, adjusted, results = rig.put(logits), rig.empty(logits.shape), rig.empty(count, RESULT)
        positions = rig.put(np.full(count + 1, position - 1, np.int32))
        rows, seats = (rig.put(np.arange(start, start + count, dtype=np.int32)) for start in (1, 0))
        places: list[Argument] = [positions, rows, seats, self.vocab]
        mask = None if masks is None else rig.put(masks)
        lists: list[Argument] = [self._seats, self._counts, self._ids, self._values, mask]
        rig.run(catalogue.adjust(count), [adjusted, raw, *lists, *places, CAPACITY])
        rig.run(catalogue.typical(count), [adjusted, self._seats, *places])
        state: list[Argument] = [results, self.last_tokens, self._counts, raw, adjusted, self._seats]
        rig.run(catalogue.sample(count), [*state, *places])
        return rig.get(results, RESULT)

    def on_host(self, logits: NDArray[np.float32], position: int) -> StepResult:
        """The host sampler's."""
        count = len(self.seats)
        result = StepResult(count)
        seats, positions = np.arange(count, dtype=np.int32), np.full(count, position, np.int32)
        with np.errstate(all="ignore"):
            self.host.sample(logits.copy(), seats, positions, result)
        return result

    def compare(self, logits: NDArray[np.float32], position: int) -> None:
        """One step on both."""
        wanted, got = self.on_host(logits, position), self.on_device(logits, position)
        count = len(self.seats)
        ok = wanted.ok[:count]
        assert np.array_equal(got["ok"] != 0, ok)
        assert np.array_equal(got["token"][ok], wanted.token_ids[:count][ok])
        for row in np.flatnonzero(ok):
            asked = self.seats[row].sampling.num_logprobs
            if asked == NO_LOGPROBS:
                continue
            assert got["logprob"][row] == pytest.approx(wanted.logprobs[row], abs=2e-6)
            assert np.array_equal(got["top_ids"][row, :asked], wanted.top_ids[row, :asked])
            given, expected = got["top_logprobs"][row, :asked], wanted.top_logprobs[row, :asked]
            assert np.allclose(given, expected, atol=2e-6)
        assert np.array_equal(self.rig.get(self.last_tokens, np.int32)[ok], wanted.token_ids[:count][ok])


def _params(history: int = 0, num_prompt_tokens: int = 0, **fields: Any) -> SeatParams:
    ids = np.random.default_rng(history).integers(0, VOCAB, history).astype(np.uint32)
    suppressed, below = fields.pop("suppressed_ids", ()), fields.pop("suppress_below", 0)
    return SeatParams(
        sampling=SamplingParams(**fields),
        history=ids,
        num_prompt_tokens=num_prompt_tokens,
        suppressed_ids=suppressed,
        suppress_below=below,
    )


def _many(seed: int) -> list[SeatParams]:
    """Every combination of filters, each with its own seed."""
    rng = np.random.default_rng(seed)
    return [
        _params(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=int(rng.integers(1 << 63)),
            num_logprobs=int(rng.choice([-1, 0, 3, 20])),
        )
        for temperature in (0.0, 0.7, 1.5)
        for top_k in (0, 1, 40)
        for top_p in (1.0, 0.9)
        for min_p in (0.0, 0.05, 1.0)
    ]


@pytest.mark.parametrize("vocab", [37, VOCAB, 3001])
def test_the_host_samplers_tokens_are_drawn(vocab: int) -> None:
    samplers = Samplers(_many(1), vocab=vocab, order=vocab % 4)
    for step in range(3):
        logits = np.random.default_rng(step).standard_normal((len(samplers.seats), vocab)) * 3
        samplers.compare(logits.astype(np.float32), 10 + step)


def test_ties_are_broken_by_the_lowest_id() -> None:
    samplers = Samplers(_many(2))
    logits = np.random.default_rng(0).integers(-3, 3, (len(samplers.seats), VOCAB)).astype(np.float32)
    logits[logits == 0] = -0.0
    samplers.compare(logits, 5)
    samplers.compare(np.zeros_like(logits), 6)


def test_rows_that_cannot_be_drawn_are_reported_and_harm_nobody() -> None:
    samplers = Samplers(_many(3))
    logits = np.random.default_rng(0).standard_normal((len(samplers.seats), VOCAB)).astype(np.float32)
    logits[0, 3] = np.nan
    logits[1] = -np.inf
    logits[2, 7] = np.inf
    logits[3, 9:] = -np.inf
    logits[30] = np.nan
    samplers.compare(logits, 1)


@pytest.mark.parametrize("vocab", [37, 3001])
def test_what_is_not_typical_is_not_drawn(vocab: int) -> None:
    seats = [
        _params(typical_p=share, temperature=temperature, top_p=top_p, seed=number)
        for number, (share, temperature, top_p) in enumerate(
            [(0.2, 1.0, 1.0), (0.9, 1.0, 1.0), (0.5, 2.0, 0.8), (0.0, 1.0, 1.0), (0.5, 0.0, 1.0)]
        )
    ]
    samplers = Samplers(seats, vocab=vocab)
    for step in range(4):
        logits = np.random.default_rng(step).standard_normal((len(seats), vocab)) * 3
        samplers.compare(logits.astype(np.float32), 10 + step)
    broken = np.full((len(seats), vocab), -np.inf, np.float32)
    broken[1:, 3], broken[2, 5] = 1.0, np.nan
    samplers.compare(broken, 20)


def test_penalties_count_what_is_drawn() -> None:
    seats = [
        _params(history=60, num_prompt_tokens=30, repetition_penalty=1.3, seed=1, num_logprobs=2),
        _params(history=60, num_prompt_tokens=30, presence_penalty=1.5, seed=2),
        _params(history=60, num_prompt_tokens=0, frequency_penalty=0.8, seed=3),
        _params(
            history=9, num_prompt_tokens=9, repetition_penalty=0.7, frequency_penalty=-0.5, temperature=0.0
        ),
    ]
    samplers = Samplers(seats)
    for step in range(8):  # few likely ids, so that they come again
        logits = np.full((len(seats), VOCAB), -9, np.float32)
        logits[:, step % 3 :: 50] = 2
        samplers.compare(logits, 60 + step)


def test_biases_and_suppression_end_where_they_should() -> None:
    seats = [
        _params(logit_bias=((5, 100.0), (6, -1e30), (7, 3e38)), temperature=0.0, num_logprobs=1),
        _params(suppressed_ids=(3, 4), suppress_below=12, temperature=0.0),
        _params(suppressed_ids=tuple(range(10)), suppress_below=12, logit_bias=((2, 50.0),), seed=4),
    ]
    samplers = Samplers(seats)
    logits = np.random.default_rng(1).standard_normal((3, VOCAB)).astype(np.float32)
    logits[:, 3] = 20
    logits[0, 5] = -np.inf
    for position in (11, 12):
        samplers.compare(logits, position)


def test_a_masked_seat_draws_only_what_its_grammar_allows() -> None:
    seats = [_params(temperature=0.0), _params(seed=1), _params(temperature=0.0)]
    samplers = Samplers(seats)
    samplers.rows["needs"][:2] |= NEED_MASKED
    samplers._seats = samplers.rig.put(samplers.rows)
    masks = np.zeros((3, -(-VOCAB // 32)), np.uint32)
    masks[0, 1] = 1 << 3  # id 35
    masks[1, 15] = 0b110  # ids 481, 482
    logits = np.random.default_rng(2).standard_normal((3, VOCAB)).astype(np.float32)
    got = samplers.on_device(logits, 3, masks)
    assert got["token"][0] == 35
    assert got["token"][1] in (481, 482)
    assert got["token"][2] == logits[2].argmax()
    masks[0] = 0
    assert samplers.on_device(logits, 3, masks)["ok"].tolist() == [0, 1, 1]


def test_the_layouts_have_the_sizes_of_the_structures() -> None:
    assert SEAT.itemsize == 72
    assert RESULT.itemsize == 176


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_the_smallest_random_number_draws_the_best_candidate(top_p: float) -> None:
    samplers = Samplers([_params(top_p=top_p)])
    position = 7
    samplers.rows["stream"] = (-(position + 1) * 0x9E3779B97F4A7C15) % 2**64  # its word at this position is 0
    samplers._seats = samplers.rig.put(samplers.rows)
    logits = np.random.default_rng(0).standard_normal((1, VOCAB)).astype(np.float32)
    assert samplers.on_device(logits, position)["token"].tolist() == [logits.argmax()]
