"""What the machine code finds out about logits, and that sampling with it draws the same tokens."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("numba", reason="the CPU engine needs numba")

from ds4.generation import SamplingParams
from ds4.model_file import ModelFile
from tests.support.tiny_model import write_tiny_model
from tests.workers.devices.cpu.rig import cpu_driver, tiny_program
from tests.workers.devices.cpu.test_device import PROMPT, poison
from workers.devices.cpu.device import CpuDevice
from workers.devices.interface import SeatParams, StepResult
from workers.model.program import Program
from workers.model.registry import load_program
from workers.sampling import filters
from workers.sampling.sampler import HostSampler

# With the tiny model's own not a multiple of the block of 64, and enough blocks for 64 candidates.
MORE_TOKENS = [f"<|{number}|>" for number in range(4722)]
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.95, seed=2),
    SamplingParams(temperature=1.3, min_p=0.05, seed=3),
    SamplingParams(temperature=0.9, top_p=0.8, seed=4),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=5),
    SamplingParams(temperature=1.0, num_logprobs=3, seed=6),
    SamplingParams(temperature=1.2, typical_p=0.7, seed=7),
]
# Draws that end among the best, deep in the tail, at a cut of the tail, beyond what the machine code does.
DEPTHS = [
    SamplingParams(temperature=0.02, seed=1),
    SamplingParams(temperature=8.0, seed=2),
    SamplingParams(temperature=5.0, min_p=0.02, seed=3),
    SamplingParams(temperature=6.0, top_p=0.97, seed=4),
    SamplingParams(temperature=4.0, min_p=0.01, top_p=0.9, seed=5),
    SamplingParams(temperature=6.0, top_k=20, seed=6),
    SamplingParams(temperature=6.0, top_k=900, top_p=0.9, seed=7),
]
TOO_LARGE_TOP_K = 6  # of DEPTHS


def large_vocabulary(directory: Path) -> Program:
    path = write_tiny_model(directory / "large.gguf", quant="Q8_0", extra_controls=MORE_TOKENS)
    return load_program(ModelFile.open(path))


def by_numpy(
    device: CpuDevice, seats: list[int], positions: list[int], samplings: list[SamplingParams] = SAMPLINGS
) -> StepResult:
    """The tokens that the sampler draws from the device's logits on its own."""
    logits = device.logits()
    sampler, result = HostSampler(len(samplings), logits.shape[1]), StepResult(len(samplings))
    for seat, sampling in enumerate(samplings):
        history = np.zeros(0, np.uint32)
        sampler.seat(seat, SeatParams(sampling=sampling, history=history, num_prompt_tokens=0))
    sampler.sample(logits, np.array(seats, np.int32), np.array(positions, np.int32), result)
    return result


def test_tokens_are_those_of_numpys_sampler(tmp_path: Path) -> None:
    with cpu_driver(large_vocabulary(tmp_path)) as (device, driver):
        seats = list(range(len(SAMPLINGS)))
        for number in range(20):
            for seat, sampling in enumerate(SAMPLINGS):
                driver.seat(seat, sampling)
            prompts = {seat: [3 + number, *PROMPT[: 2 + seat]] for seat in seats}
            result = driver.step(prompts)
            expected = by_numpy(device, seats, [len(prompts[seat]) for seat in seats])
            assert result.token_ids[: len(seats)].tolist() == expected.token_ids[: len(seats)].tolist()


def test_machine_code_draws_what_numpy_draws_at_every_depth(tmp_path: Path) -> None:
    with cpu_driver(large_vocabulary(tmp_path)) as (device, driver):
        seats = list(range(len(DEPTHS)))
        seen = set()
        for number in range(60):
            samplings = [msgspec.structs.replace(each, seed=10 * number + each.seed) for each in DEPTHS]
            for seat, sampling in enumerate(samplings):
                driver.seat(seat, sampling)
            prompts = {seat: [3 + number, *PROMPT[: 2 + seat]] for seat in seats}
            result = driver.step(prompts)
            drawn = device._summary(len(seats)).draws["token"].tolist()
            expected = by_numpy(device, seats, [len(prompts[seat]) for seat in seats], samplings)
            tokens = expected.token_ids[: len(seats)].tolist()
            assert result.token_ids[: len(seats)].tolist() == tokens
            assert drawn[:TOO_LARGE_TOP_K] == tokens[:TOO_LARGE_TOP_K]
            order = (-device.logits()[1]).argsort()
            seen.add(int(np.flatnonzero(order == tokens[1])[0]) // 1000)
        assert seen == {0, 1, 2, 3, 4}  # the flattest draw reached every part of the vocabulary


def test_the_machine_code_leaves_what_is_adjusted_or_not_a_number(tmp_path: Path) -> None:
    program = poison(tiny_program(tmp_path, "F32"), token=100)
    with cpu_driver(program) as (device, driver):
        for seat, sampling in enumerate(SAMPLINGS[:2] * 2):
            params = SeatParams(
                sampling=sampling,
                history=np.zeros(0, np.uint32),
                num_prompt_tokens=0,
                suppressed_ids=(7,),
                suppress_below=4 if seat >= 2 else 0,
            )
            device.seat(seat, params)
        for length, is_left in ((3, True), (4, False)):
            result = driver.step(dict.fromkeys(range(4), PROMPT[:length]))
            chosen = device._summary(4).draws["token"]
            assert (chosen[2:] < 0).tolist() == [is_left, is_left]
            assert (chosen[:2] == result.token_ids[:2]).all()
            assert chosen[0] == device.logits()[0].argmax()
        driver.step({0: [100]})
        assert device._summary(1).draws["token"] == filters.UNDECIDED


def test_equal_logits_are_drawn_as_numpy_draws_them(tmp_path: Path) -> None:
    program = large_vocabulary(tmp_path)
    samplings = [*DEPTHS[1:], SamplingParams(temperature=0.0)]
    with cpu_driver(program) as (device, driver):
        device._plan._arena[:] = 0  # all weights: every logit is 0
        for seat, sampling in enumerate(samplings):
            driver.seat(seat, sampling)
        seats = list(range(len(samplings)))
        result = driver.step(dict.fromkeys(seats, PROMPT[:3]))
        assert not device.logits().any()
        expected = by_numpy(device, seats, [3] * len(seats), samplings)
        assert result.token_ids[: len(seats)].tolist() == expected.token_ids[: len(seats)].tolist()


def test_maxima_and_masses_are_those_of_the_logits(tmp_path: Path) -> None:
    with cpu_driver(large_vocabulary(tmp_path), threads=3) as (device, driver):
        for seat, temperature in enumerate((0.0, 0.5, 1.0, 4.0)):
            driver.seat(seat, SamplingParams(temperature=temperature))
        driver.step({seat: PROMPT[: 3 + seat] for seat in range(4)})
        logits, summary = device.logits(), device._summary(4)
        assert logits.shape[1] % 64
        padded = np.full((4, 79 * 64), -np.inf, np.float32)
        padded[:, : logits.shape[1]] = logits
        assert np.array_equal(summary.blocks.reshape(4, -1), padded)
        assert np.array_equal(summary.maxima, padded.reshape(4, 79, 64).max(2))
        for row, temperature in ((1, 0.5), (2, 1.0), (3, 4.0)):
            exact = np.exp((logits[row] - logits[row].max()).astype(np.float64) / temperature).sum()
            assert summary.draws["mass"][row] == pytest.approx(exact, rel=1e-6)


def test_a_logit_that_is_not_a_number_marks_its_row_only(tmp_path: Path) -> None:
    program = poison(tiny_program(tmp_path, "F32"), token=100)
    with cpu_driver(program) as (device, driver):
        for seat in range(3):
            driver.seat(seat)
        assert driver.step({0: [5], 1: [100], 2: [7]}).ok[:3].tolist() == [True, False, True]
        assert np.isnan(device._summary(3).best()[1]).tolist() == [False, True, False]
