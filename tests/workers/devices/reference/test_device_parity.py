"""Against llama.cpp: greedy tokens of the real embedded model, logits of every variant of the llama program."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.model_file import ModelFile
from tests.support.device_driver import DeviceDriver, small_limits
from tests.support.embedded_model import embedded_model
from tests.support.tiny_model import write_tiny_model
from tests.vectors.make_logits import SHOWN_IDS, VARIANTS, prompt
from workers.devices.reference.device import ReferenceDevice
from workers.model.registry import load_program

VECTORS: Final = Path(__file__).parents[3] / "vectors"


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    document = json.loads((VECTORS / "greedy_smollm2.json").read_text())
    found: list[dict[str, Any]] = document["cases"]
    return found


@pytest.fixture(scope="module")
def driver() -> DeviceDriver:
    limits = small_limits(max_rows=256, max_seats=64, max_context_tokens=176)
    program = load_program(ModelFile.open(embedded_model()))
    return DeviceDriver(ReferenceDevice(program, limits, threads=1), limits)


def test_greedy_tokens_are_those_of_llama_cpp(driver: DeviceDriver, cases: list[dict[str, Any]]) -> None:
    # One step for each prompt with its continuation: every row must choose the next token of the vector.
    # Rows have the same bits whether computed so or one by one (below), so this is generation, only faster.
    assert len(cases) >= 10
    for case in cases:
        expected = case["greedy_ids"]
        result = driver.score([*case["prompt_ids"], *expected[:-1]], len(expected))
        assert result.token_ids[: len(expected)].tolist() == expected, case["name"]


def test_generating_step_by_step_gives_the_same_tokens(
    driver: DeviceDriver, cases: list[dict[str, Any]]
) -> None:
    generated = driver.generate([case["prompt_ids"] for case in cases], 8)
    assert generated == [case["greedy_ids"][:8] for case in cases]


def test_logits_are_those_of_llama_cpp(driver: DeviceDriver, cases: list[dict[str, Any]]) -> None:
    device = driver.device
    assert isinstance(device, ReferenceDevice)
    for case in cases[:1] + cases[-1:]:
        driver.seat(0)
        driver.step({0: case["prompt_ids"]})
        ids = [int(token) for token in case["first_logits"]]
        # Both sides sum in float32, in different orders; the vectors have four decimals. Measured: 7e-5.
        np.testing.assert_allclose(
            device.logits()[0, ids], list(case["first_logits"].values()), rtol=0, atol=1e-3
        )


def test_a_request_has_the_same_bits_alone_and_among_31_others(
    driver: DeviceDriver, cases: list[dict[str, Any]]
) -> None:
    device = driver.device
    assert isinstance(device, ReferenceDevice)
    prompt = cases[-1]["prompt_ids"]

    def bits(index: int) -> bytes:
        logits: NDArray[np.float32] = device.logits()[index]
        return logits.tobytes()

    driver.seat(0)
    driver.step({0: prompt})
    alone = [bits(0)]
    for _ in range(3):
        driver.decode([0])
        alone.append(bits(0))
    seat = 19
    for each in range(32):
        driver.seat(each)
    rows = {each: cases[each % len(cases)]["prompt_ids"][: 1 + each % 7] for each in range(32)}
    driver.step({**rows, seat: prompt[:30]})
    rows = {each: [-1] for each in range(32)}
    driver.step({**rows, seat: prompt[30:]})
    among = [bits(seat)]
    for _ in range(3):
        driver.decode(range(32))
        among.append(bits(seat))
    assert among == alone


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_variant_are_those_of_llama_cpp(tmp_path: Path, variant: str) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", quant="F32", **VARIANTS[variant])
    limits = small_limits(max_seats=2)
    device = ReferenceDevice(load_program(ModelFile.open(path)), limits, threads=1)
    driver = DeviceDriver(device, limits)
    driver.seat(1)
    driver.step({1: prompt()})
    expected = json.loads((VECTORS / "logits_tiny.json").read_text())[variant]
    # Measured differences are up to 2e-5; the vectors have four decimals.
    np.testing.assert_allclose(device.logits()[0, list(SHOWN_IDS)], expected, rtol=0, atol=2e-4)
