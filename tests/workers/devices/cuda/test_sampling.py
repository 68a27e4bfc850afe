"""The sampling kernels against the host's sampler, which is their oracle."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.generation import SamplingParams
from tests.workers.devices.cuda.rig import needs_compiler, new_backend
from workers.devices.cuda.inputs import StepInputs
from workers.devices.cuda.sampling import DeviceSampler, sampler_bytes
from workers.devices.emulator.backend import EmulatorBackend
from workers.devices.interface import Limits, SeatParams, StepBatch, StepResult
from workers.sampling.sampler import HostSampler

pytestmark = needs_compiler

LIMITS = Limits(max_rows=32, max_seats=16, max_context_tokens=256, num_pages=64)
VOCAB = 301  # of no multiple


class Both:
    """A sampler on the emulator and one on the host, given the same."""

    def __init__(self, vocab: int = VOCAB, *, thread_order: int = 0) -> None:
        self.backend = EmulatorBackend(thread_order=thread_order) if thread_order else new_backend()
        self.vocab = vocab
        self._inputs = StepInputs(self.backend, LIMITS, chunk_rows=16, has_decode_attention=True)
        self.device = DeviceSampler(self.backend, LIMITS, vocab)
        self.host = HostSampler(LIMITS.max_seats, vocab)
        self._logits = self.backend.allocate((LIMITS.max_seats, vocab), np.float32)
        self._batch = StepBatch(LIMITS)

    def seat(self, seat: int, **changes: Any) -> None:
        history = np.array(changes.pop("history", ()), np.uint32)
        num_prompt = changes.pop("num_prompt", len(history))
        suppressed, below = changes.pop("suppressed", ()), changes.pop("below", 0)
        params = SeatParams(
            sampling=SamplingParams(**changes),
            history=history,
            num_prompt_tokens=num_prompt,
            suppressed_ids=suppressed,
            suppress_below=below,
        )
        self.device.seat(seat, params)
        self.host.seat(seat, params)

    def sample(
        self, logits: NDArray[np.float32], seats: list[int], positions: list[int] | None = None
    ) -> tuple[StepResult, StepResult]:
        """Both results for one row a seat; `positions` of the drawn tokens."""
        count, batch = len(seats), self._batch
        after = np.array(positions or [10 + seat for seat in seats], np.int32)
        batch.num_rows = batch.num_sequences = batch.num_samples = count
        batch.sequence_starts[: count + 1] = np.arange(count + 1)
        batch.sequence_seats[:count] = batch.sample_seats[:count] = seats
        batch.positions[:count] = after - 1
        batch.sample_rows[:count] = np.arange(count)
        block, _ = self._inputs.stage(batch, count, count)
        self.backend.upload(logits, self._logits)
        self.device.upload_seats()
        of = batch.sample_seats[:count]
        self.device.launch(block, self._logits, adjusts=self.device.adjusts(of))
        self.device.download(0, count)
        self.backend.synchronise()
        ours, oracle = StepResult(LIMITS.max_seats), StepResult(LIMITS.max_seats)
        self.device.read(0, len(of), ours, reports=self.device.reports(of))
        self.host.sample(logits.copy(), batch.sample_seats[:count], after, oracle)
        return ours, oracle


@pytest.fixture
def both() -> Both:
    return Both()


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, spread: float = 3.0) -> NDArray[np.float32]:
    return (spread * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def assert_same_tokens(results: tuple[StepResult, StepResult]) -> None:
    ours, oracle = results
    count = oracle.num_samples
    assert ours.num_samples == count
    assert ours.ok[:count].tolist() == oracle.ok[:count].tolist()
    sound = oracle.ok[:count]
    assert ours.token_ids[:count][sound].tolist() == oracle.token_ids[:count][sound].tolist()


PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 4.0},
    "cold": {"temperature": 0.02},
    "top_k": {"top_k": 7},
    "top_k beyond the vocabulary": {"top_k": 100_000},
    "top_p": {"top_p": 0.7},
    "narrow top_p": {"top_p": 0.01},
    "min_p": {"min_p": 0.05},
    "min_p of one": {"min_p": 1.0},
    "everything": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "typical_p": {"typical_p": 0.6},
    "typical_p and more": {"typical_p": 0.3, "temperature": 2.0, "top_p": 0.8, "logit_bias": ((5, 4.0),)},
    "bias": {"logit_bias": ((5, 4.0), (9, -100.0), (5, 1.5))},
    "penalties": {
        "repetition_penalty": 1.7,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "history": (3, 3, 3, 8, 100, 12, 100, 7),
        "num_prompt": 5,
    },
    "suppressed": {"suppressed": (1, 2, 200), "below": 1000, "temperature": 0.5},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_token_is_the_oracles(both: Both, name: str) -> None:
    for seat in range(4):
        both.seat(seat, seed=seat, **PARAMETERS[name])
    for step in range(4):
        logits = random_logits(step, rows=4)
        positions = [20 + step + seat for seat in range(4)]
        assert_same_tokens(both.sample(logits, [0, 1, 2, 3], positions))


def test_rows_of_one_step_may_each_want_something_else(both: Both) -> None:
    for seat, parameters in enumerate(PARAMETERS.values()):
        both.seat(seat, seed=50 + seat, **parameters)
    seats = list(range(len(PARAMETERS)))[::-1]
    for step in range(3):
        assert_same_tokens(both.sample(random_logits(40 + step, rows=len(seats)), seats))


@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_threads_changes_nothing(order: int) -> None:
    both = Both(thread_order=order)
    for seat, parameters in enumerate(PARAMETERS.values()):
        both.seat(seat, seed=70 + seat, num_logprobs=2, **parameters)
    logits = random_logits(3, rows=len(PARAMETERS))
    assert_same_tokens(both.sample(logits, list(range(len(PARAMETERS)))))


def test_a_large_vocabulary_is_split_and_searched_alike() -> None:
    both = Both(vocab=9001)
    both.seat(0, seed=1, temperature=0.0)
    both.seat(1, seed=2)
    both.seat(2, seed=3, top_k=500, top_p=0.95)
    for step in range(2):
        assert_same_tokens(both.sample(random_logits(step, 3, 9001), [0, 1, 2]))


@pytest.mark.parametrize(
    "make",
    [
        lambda row: row.fill(1.5),  # all equal
        lambda row: np.copyto(row, np.round(row)),  # many ties
        lambda row: np.copyto(row[::2], -np.inf),
        lambda row: np.copyto(row[1:], -np.inf),
        lambda row: np.copyto(row[:7], -1e30),  # far away, so that all others share a bin
        lambda row: np.copyto(row, row * 1e37),
        lambda row: np.copyto(row[:9], [0.0, -0.0] * 4 + [0.0]),
    ],
    ids=["flat", "ties", "half masked", "one left", "far values", "huge", "both zeros"],
)
def test_awkward_rows_are_searched_alike(both: Both, make: Callable[[NDArray[np.float32]], None]) -> None:
    wanted: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 10}, {"top_p": 0.6}, {"min_p": 0.1}]
    for seat, parameters in enumerate(wanted):
        both.seat(seat, seed=seat, **parameters)
    for step in range(3):
        logits = random_logits(step, rows=len(wanted))
        for row in logits:
            make(row)
        assert_same_tokens(both.sample(logits, [0, 1, 2, 3, 4], [9 + step] * 5))


def test_draws_follow_the_distribution() -> None:
    both = Both(vocab=5)
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.07, 0.03]], np.float32))
    rows = np.repeat(logits, 16, axis=0)
    counts = np.zeros(5)
    for seat in range(16):
        both.seat(seat, seed=1000 + seat)
    for step in range(40):
        ours, _ = both.sample(rows, list(range(16)), [step] * 16)
        counts += np.bincount(ours.token_ids[:16], minlength=5)
    assert np.abs(counts / counts.sum() - np.exp(logits[0])).max() < 0.07


def test_a_row_with_nan_or_infinity_fails_alone(both: Both) -> None:
    for seat in range(6):
        both.seat(seat, temperature=float(seat % 2), num_logprobs=1, seed=seat, presence_penalty=0.1 * seat)
    logits = random_logits(1, rows=6)
    logits[0, 17], logits[1, 300], logits[3, 0] = np.nan, np.inf, np.nan
    logits[4] = -np.inf
    results = both.sample(logits, [0, 1, 2, 3, 4, 5])
    assert results[0].ok[:6].tolist() == [False, False, True, False, False, True]
    assert_same_tokens(results)


def test_a_row_with_everything_suppressed_fails_alone(both: Both) -> None:
    both.seat(0, suppressed=tuple(range(VOCAB)), below=100)
    both.seat(1)
    results = both.sample(random_logits(2, rows=2), [0, 1])
    assert results[0].ok[:2].tolist() == [False, True]
    assert_same_tokens(results)


def test_suppressed_ids_return_at_the_position_given(both: Both) -> None:
    logits = random_logits(5)
    best = int(logits[0].argmax())
    both.seat(0, temperature=0.0, suppressed=(best,), below=12)
    for position in (11, 12):
        results = both.sample(logits, [0], [position])
        assert_same_tokens(results)
        assert bool(results[0].token_ids[0] == best) is (position == 12)


def test_drawn_tokens_count_for_penalties(both: Both) -> None:
    both.seat(3, temperature=0.0, frequency_penalty=1.0, history=(5,), num_prompt=1)
    logits = random_logits(8, spread=0.5)
    drawn = []
    for step in range(12):
        results = both.sample(logits, [3], [step])
        assert_same_tokens(results)
        drawn.append(int(results[0].token_ids[0]))
    assert len(set(drawn)) > 3


def test_a_seat_given_anew_forgets_history_and_bias(both: Both) -> None:
    logits = random_logits(9, spread=0.2)
    both.seat(2, temperature=0.0, logit_bias=((4, 50.0),), presence_penalty=1.0, history=(9, 9), num_prompt=0)
    assert_same_tokens(both.sample(logits, [2]))
    both.seat(2, temperature=0.0, repetition_penalty=1.2, history=(7,))
    results = both.sample(logits, [2])
    assert_same_tokens(results)
    assert results[0].token_ids[0] != 4


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_log_probabilities_are_the_oracles(both: Both, num_top: int) -> None:
    both.seat(0, temperature=0.0, num_logprobs=num_top)
    both.seat(1, temperature=1.0, num_logprobs=num_top, seed=4, logit_bias=((3, 9.0),))
    both.seat(2)
    logits = random_logits(11, rows=3)
    logits[1, 20:] = -np.inf
    logits[0, 30:40] = 5.0  # ties
    ours, oracle = both.sample(logits, [0, 1, 2])
    # The sum is of whole numbers here and of float64 there; both are rounded to float32 at the end.
    np.testing.assert_allclose(ours.logprobs[:2], oracle.logprobs[:2], rtol=0, atol=2e-6)
    for row in range(2):
        assert ours.top_ids[row, :num_top].tolist() == oracle.top_ids[row, :num_top].tolist()
        np.testing.assert_allclose(
            ours.top_logprobs[row, :num_top], oracle.top_logprobs[row, :num_top], rtol=0, atol=2e-6
        )


def test_more_log_probabilities_than_ids_are_not_made_up() -> None:
    both = Both(vocab=3)
    both.seat(0, num_logprobs=20)
    ours, oracle = both.sample(random_logits(0, 1, 3), [0])
    assert ours.top_ids[0, :3].tolist() == oracle.top_ids[0, :3].tolist()


def test_the_next_step_finds_the_token_on_the_device(both: Both) -> None:
    both.seat(5, seed=1)
    ours, _ = both.sample(random_logits(1), [5])
    host = both.backend.pinned(LIMITS.max_seats + 1, np.int32)
    both.backend.download(both.device.last_tokens, host)
    both.backend.synchronise()
    assert host[5] == ours.token_ids[0]


def test_its_memory_is_what_it_says() -> None:
    backend = EmulatorBackend()
    before = backend.memory_info()[0]
    DeviceSampler(backend, LIMITS, VOCAB)
    taken = before - backend.memory_info()[0]
    assert taken <= sampler_bytes(LIMITS, VOCAB) <= 1.1 * taken + 4096
