"""Rows whose tokens have to match a constraint: drawn under the masks of their own tokens so far."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.generation import SamplingParams
from tests.support.device_driver import small_limits
from tests.workers.devices.cuda.rig import PROMPT, Pair, needs_compiler, pair, tiny_program
from workers.devices.interface import PREVIOUS_SAMPLE, Device, SeatParams, StepBatch, StepResult
from workers.model.program import Program
from workers.sampling.interface import Constraint, MaskSource

pytestmark = needs_compiler

GREEDY = SamplingParams(temperature=0.0)
FREE, OTHER = 1, 2  # seats without and with constraints beside seat 0


class Steps:
    """Allows in turn the ids that leave a given rest; fails after `limit` tokens."""

    def __init__(self, source: "Source", limit: int = 1000) -> None:
        self._source = source
        self.tokens: list[int] = []
        self.limit = limit
        self.failure = ""

    @property
    def source(self) -> MaskSource:
        return self._source


class Source:
    def __init__(self, modulus: int = 5) -> None:
        self.modulus = modulus

    def accept(self, drawn: Sequence[tuple[Constraint, int]]) -> list[Sequence[int]]:
        for steps, token_id in drawn:
            assert isinstance(steps, Steps)
            steps.tokens.append(token_id)
        return [()] * len(drawn)

    def compute(self, wanted: Sequence[tuple[Constraint, int]], masks: NDArray[np.uint32]) -> None:
        for steps, seat in wanted:
            assert isinstance(steps, Steps)
            if len(steps.tokens) >= steps.limit:
                steps.failure = "no way on"
            allowed = np.arange(masks.shape[1] * 32) % self.modulus == len(steps.tokens) % self.modulus
            masks[seat] = np.packbits(allowed, bitorder="little").view(np.uint32)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return tiny_program(tmp_path_factory.mktemp("tiny"), "F32")


def seat(device: Device, number: int, constraint: Steps | None, sampling: SamplingParams = GREEDY) -> None:
    params = SeatParams(
        sampling=sampling,
        history=np.array(PROMPT, np.uint32),
        num_prompt_tokens=len(PROMPT),
        constraint=constraint,
    )
    device.seat(number, params)


class Ahead:
    """Decodes one step ahead, as the runner does. Seats are fed `PROMPT` first."""

    def __init__(self, both: Pair) -> None:
        self._device = both.cuda
        self._tables = both.driver._tables
        self._queued = 0
        self._buffers = [StepBatch(small_limits(max_seats=8)) for _ in range(3)]
        self._next = 0

    def submit(self, seats: Sequence[int], first: int, count: int) -> None:
        batch = self._buffers[self._next]
        self._next = (self._next + 1) % 3
        batch.num_sequences = batch.num_samples = len(seats)
        batch.num_rows = count * len(seats)
        for index, number in enumerate(seats):
            rows = slice(index * count, (index + 1) * count)
            batch.token_ids[rows] = PREVIOUS_SAMPLE if first else PROMPT
            batch.positions[rows] = np.arange(first, first + count)
            batch.sequence_seats[index] = batch.sample_seats[index] = number
            batch.sequence_starts[index : index + 2] = index * count, (index + 1) * count
            batch.sample_rows[index] = (index + 1) * count - 1
            batch.page_tables[index] = self._tables[number]
        self._device.submit(batch)

    def generate(self, seats: Sequence[int], num_tokens: int) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in seats]

        def collect() -> StepResult:
            result = self._device.collect()
            for index in range(len(seats)):
                tokens[index].append(int(result.token_ids[index]))
            return result

        self.submit(seats, 0, len(PROMPT))
        for step in range(1, num_tokens):
            self.submit(seats, len(PROMPT) + step - 1, 1)
            collect()
        collect()
        return tokens


def test_every_token_is_one_that_its_own_mask_allows(program: Program) -> None:
    with pair(program) as both:
        ours, theirs = Steps(Source()), Steps(Source())
        seat(both.cuda, 0, ours)
        seat(both.cuda, OTHER, theirs, SamplingParams(temperature=1.5, seed=3))
        seat(both.cuda, FREE, None)
        tokens = Ahead(both).generate([0, FREE, OTHER], 12)
        for constraint, drawn in ((ours, tokens[0]), (theirs, tokens[2])):
            assert [token % 5 for token in drawn] == [step % 5 for step in range(12)]
            both.cuda._sampler.host_masks.wait()  # they are read in the background
            assert constraint.tokens == drawn
        seat(both.cuda, FREE, None)
        assert Ahead(both).generate([FREE], 12)[0] == tokens[1]  # who is free notices nothing


def test_the_tokens_are_those_of_the_reference(program: Program) -> None:
    with pair(program) as both:
        for device in (both.cuda, both.reference):
            seat(device, 0, Steps(Source()))
        both.driver.lengths[0] = both.oracle.lengths[0] = 0
        ours, theirs = [], []
        for step in range(8):
            rows = {0: PROMPT if step == 0 else [PREVIOUS_SAMPLE]}
            ours.append(int(both.driver.step(rows).token_ids[0]))
            theirs.append(int(both.oracle.step(rows).token_ids[0]))
        assert ours == theirs


def test_a_constraint_that_knows_no_way_on_fails_its_row_only(program: Program) -> None:
    with pair(program) as both:
        seat(both.cuda, 0, Steps(Source(), limit=2))
        seat(both.cuda, OTHER, Steps(Source()))
        both.driver.lengths[0] = both.driver.lengths[OTHER] = 0
        sound = []
        for step in range(4):
            rows = dict.fromkeys((0, OTHER), PROMPT if step == 0 else [PREVIOUS_SAMPLE])
            sound.append(both.driver.step(rows).ok[:2].tolist())
        assert sound == [[True, True], [True, True], [False, True], [False, True]]


def test_a_late_token_of_the_sequence_before_is_not_read_by_the_constraint_of_the_next(
    program: Program,
) -> None:
    with pair(program) as both:
        ahead = Ahead(both)
        before, after = Steps(Source()), Steps(Source())
        seat(both.cuda, 0, before)
        ahead.submit([0], 0, len(PROMPT))
        ahead.submit([0], len(PROMPT), 1)
        both.cuda.collect()
        seat(both.cuda, 0, after)  # the sequence ended; its row of the step in flight is discarded
        both.cuda.collect()
        tokens = ahead.generate([0], 4)[0]
        both.cuda._sampler.host_masks.wait()
        assert after.tokens == tokens
        assert [token % 5 for token in tokens] == [0, 1, 2, 3]


def test_suppressed_ids_give_way_where_the_mask_leaves_nothing_else(program: Program) -> None:
    with pair(program) as both:
        suppressed = tuple(range(0, program.dimensions.vocab_size, 5))
        for device in (both.cuda, both.reference):
            params = SeatParams(
                sampling=GREEDY,
                history=np.array(PROMPT, np.uint32),
                num_prompt_tokens=len(PROMPT),
                constraint=Steps(Source()),
                suppressed_ids=suppressed,
                suppress_below=1000,
            )
            device.seat(0, params)
        both.driver.lengths[0] = both.oracle.lengths[0] = 0
        ours, theirs = both.driver.step({0: PROMPT}), both.oracle.step({0: PROMPT})
        assert ours.ok[0]
        assert ours.token_ids[0] == theirs.token_ids[0]
