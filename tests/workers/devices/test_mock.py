"""workers/devices/mock.py: words that depend on seed and position alone, at the rate that was asked for."""

import math
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.config import Settings
from ds4.errors import ModelFileError
from ds4.generation import SamplingParams
from ds4.model_file import ModelFile
from tests.support.device_driver import DeviceDriver, small_limits
from workers.devices.interface import SeatParams
from workers.devices.mock import MockDevice, word_ids
from workers.devices.registry import open_device
from workers.sampling.interface import Constraint

WORDS = np.arange(40, 90, dtype=np.int32)
VOCAB_SIZE = 100


class Clock:
    def __init__(self) -> None:
        self.now = 50.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.now += duration_s


def make_driver(step_s: float = 0.0, clock: Clock | None = None) -> DeviceDriver:
    limits, clock = small_limits(max_seats=8), clock or Clock()
    device = MockDevice(limits, WORDS, VOCAB_SIZE, step_s=step_s, clock=clock, sleep=clock.sleep)
    return DeviceDriver(device, limits)


def draw(driver: DeviceDriver, seats: Sequence[int], count: int) -> list[list[int]]:
    rows = [driver.step({seat: [1] for seat in seats}).token_ids[: len(seats)].tolist() for _ in range(count)]
    return [list(column) for column in zip(*rows, strict=True)]


def test_a_seed_gives_the_same_words_alone_and_in_company() -> None:
    alone, company = make_driver(), make_driver()
    alone.seat(3, SamplingParams(seed=7))
    for seat, seed in enumerate((9, 7, 11)):
        company.seat(seat, SamplingParams(seed=seed))
    (expected,) = draw(alone, [3], 20)
    others = draw(company, [0, 1, 2], 20)
    assert others[1] == expected
    assert len({tuple(each) for each in others}) == 3
    assert set(expected) <= set(WORDS.tolist())
    assert len(set(expected)) > 5


def test_a_resumed_sequence_goes_on_with_the_same_words() -> None:
    first, second = make_driver(), make_driver()
    first.seat(0, SamplingParams(seed=5))
    (expected,) = draw(first, [0], 12)
    second.seat(0, SamplingParams(seed=5))
    token = second.step({0: [1] * 6}).token_ids[0]
    assert [int(token), *draw(second, [0], 6)[0]] == expected[5:]


def test_steps_come_at_the_rate_that_was_asked_for_and_lateness_does_not_add_up() -> None:
    clock = Clock()
    driver = make_driver(0.01, clock)
    driver.seat(0)
    for _ in range(10):
        driver.step({0: [1]})
        clock.now += 0.004  # the worker's own time
    assert clock.now == pytest.approx(50.0 + 10 * 0.01 + 0.004)
    clock.now += 3.0
    driver.step({0: [1]})
    driver.step({0: [1]})
    assert clock.slept[-2:] == pytest.approx([0.01, 0.01]), "what an idle worker missed is not made up for"


def test_as_fast_as_asked_never_sleeps() -> None:
    clock = Clock()
    driver = make_driver(0.0, clock)
    driver.seat(0)
    draw(driver, [0], 5)
    assert clock.slept == []


def test_a_bias_forces_a_token_and_log_probabilities_are_those_of_equals() -> None:
    driver = make_driver()
    driver.seat(0, SamplingParams(logit_bias=((3, 100.0), (4, -100.0)), num_logprobs=4))
    result = driver.step({0: [1]})
    assert result.token_ids[0] == 3
    assert result.logprobs[0] == pytest.approx(-math.log(len(WORDS)))
    top = result.top_ids[0, :4].tolist()
    assert top[0] == 3
    assert len(set(top)) == 4


def test_what_is_suppressed_is_not_drawn_before_its_time() -> None:
    driver = make_driver()
    params = SeatParams(
        sampling=SamplingParams(seed=1),
        history=np.zeros(0, np.uint32),
        num_prompt_tokens=0,
        suppressed_ids=tuple(WORDS[1:].tolist()),
        suppress_below=4,
    )
    driver.device.seat(0, params)
    (words,) = draw(driver, [0], 30)
    assert words[:3] == [40, 40, 40]
    assert len(set(words)) > 5


class Source:
    """Masks that allow one id after the other."""

    def accept(self, drawn: Sequence[tuple[Constraint, int]]) -> list[Sequence[int]]:
        for constraint, token_id in drawn:
            assert isinstance(constraint, Sequentially)
            assert token_id == constraint.next_id
            constraint.next_id += 1
        return [()] * len(drawn)

    def compute(self, wanted: Sequence[tuple[Constraint, int]], masks: NDArray[np.uint32]) -> None:
        for constraint, seat in wanted:
            assert isinstance(constraint, Sequentially)
            masks[seat] = 0
            masks[seat, constraint.next_id // 32] = np.uint32(1 << constraint.next_id % 32)


class Sequentially:
    def __init__(self) -> None:
        self.source = Source()
        self.next_id = 10

    @property
    def failure(self) -> str:
        return "over" if self.next_id == 13 else ""


def test_a_constraint_is_met_and_its_failure_told() -> None:
    driver = make_driver()
    driver.seat(1)
    params = SeatParams(
        sampling=SamplingParams(),
        history=np.zeros(0, np.uint32),
        num_prompt_tokens=0,
        constraint=Sequentially(),
    )
    driver.device.seat(0, params)
    assert draw(driver, [0, 1], 3)[0] == [10, 11, 12]
    assert driver.step({0: [1], 1: [1]}).ok[:2].tolist() == [False, True]
    driver.seat(0)
    assert driver.step({0: [1]}).ok[0]


def _vocabulary_only(path: Path, tokens: Sequence[str], types: Sequence[int]) -> ModelFile:
    writer = gguf.GGUFWriter(path, "an-architecture-nobody-runs")
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFile.open(path)


def test_a_file_with_a_tokenizer_and_nothing_else_will_do(tmp_path: Path) -> None:
    model = _vocabulary_only(tmp_path / "a.gguf", ["<s>", "\u0120of", "!", "word", "ab1"], [3, 1, 1, 1, 1])
    assert word_ids(model).tolist() == [1, 3]
    settings = Settings(device="mock", batched_sessions=4, mock_tokens_per_s=50.0)
    device, limits = open_device(settings, model)
    assert (device.name, limits.max_seats, limits.max_context_tokens) == ("mock", 4, 64)
    assert limits.num_pages == 4 * 4
    device.close()


def test_without_words_any_text_will_do_and_without_text_nothing(tmp_path: Path) -> None:
    assert word_ids(_vocabulary_only(tmp_path / "a.gguf", ["<s>", "1", "2"], [3, 1, 1])).tolist() == [1, 2]
    with pytest.raises(ModelFileError, match="no text"):
        word_ids(_vocabulary_only(tmp_path / "b.gguf", ["<s>"], [3]))
