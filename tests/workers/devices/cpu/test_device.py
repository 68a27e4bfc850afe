"""The device against the reference, and the promises of the device seam."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("numba", reason="the CPU engine needs numba")

from ds4.errors import ConfigError
from tests.support.device_driver import DeviceDriver, small_limits
from tests.support.tiny_model import TinyShape
from tests.workers.devices.cpu.rig import cpu_driver, distance, pair, tiny_program
from workers.devices.cpu.device import CpuDevice
from workers.model.program import Embed, OutputMatmul, Program

PROMPT = [5, 9, 200, 31, 77, 12, 250, 8, 64, 3, 119, 40, 41, 42, 9, 9, 17, 100, 230, 1, 6, 88, 180]
# Int8 activations: about 0.5 % a product, which random layers amplify; a wrong weight would give 1.
# Floats differ by 16-bit keys and values.
INT8, FLOAT = 0.12, 0.004


# Heads of whole blocks are quantised one by one, and the last layer then computes sampled rows only.
@pytest.fixture(scope="module", params=[16, 32], ids=["half a block a head", "a block a head"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    shape = TinyShape(head_size=request.param)
    return tiny_program(tmp_path_factory.mktemp("tiny"), "Q4_1", shape)


@pytest.mark.parametrize(
    ("quant", "limit"),
    [(q, INT8) for q in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
    + [(q, FLOAT) for q in ("F16", "BF16", "F32")],
)
def test_logits_are_the_references_for_every_weight_type(tmp_path: Path, quant: str, limit: float) -> None:
    with pair(tiny_program(tmp_path, quant)) as both:
        cpu, reference = both.logits({0: PROMPT, 1: PROMPT[:3]})
        assert distance(cpu, reference) < limit
        cpu, reference = both.logits({0: [7], 1: [8]})
        assert distance(cpu, reference) < limit


@pytest.mark.parametrize(
    "shape",
    [
        TinyShape(tied_head=True),
        TinyShape(hidden_size=96, ffn_size=160),
        TinyShape(num_layers=3, max_context_tokens=64),
    ],
    ids=["tied head", "odd sizes", "more layers"],
)
def test_other_shapes_of_the_same_heads_agree_too(tmp_path: Path, shape: TinyShape) -> None:
    with pair(tiny_program(tmp_path, "Q8_0", shape)) as both:
        cpu, reference = both.logits({0: PROMPT})
        assert distance(cpu, reference) < INT8


@pytest.mark.parametrize("head_size", [16, 32])
@pytest.mark.parametrize("float_layers", [[0], [1], [0, 1]], ids=str)
def test_output_products_may_be_floats_in_some_layers(
    tmp_path: Path, head_size: int, float_layers: list[int]
) -> None:
    shape = TinyShape(head_size=head_size)
    low, high = tiny_program(tmp_path, "Q8_0", shape), tiny_program(tmp_path, "F16", shape)
    operations, layer = list(low.operations), 0
    for index, operation in enumerate(high.operations):
        if isinstance(operation, OutputMatmul):
            if layer in float_layers:
                operations[index] = operation
            layer += 1
    with pair(msgspec.structs.replace(low, operations=tuple(operations))) as both:
        cpu, reference = both.logits({0: PROMPT, 1: PROMPT[:3]})
        assert distance(cpu, reference) < INT8
        cpu, reference = both.logits({0: [7], 1: [8]})
        assert distance(cpu, reference) < INT8


def test_long_contexts_agree_across_chunks_of_the_softmax(tmp_path: Path) -> None:
    limits = small_limits(max_seats=2, max_context_tokens=1200, max_rows=512)
    program = tiny_program(tmp_path, "F32", TinyShape(max_context_tokens=2048))
    tokens = [int(token) for token in np.random.default_rng(0).integers(3, 259, 1100)]
    with pair(program, limits=limits) as both:
        for first in range(0, 1100, 500):
            cpu, reference = both.logits({0: tokens[first : first + 500]})
            assert distance(cpu, reference) < FLOAT


def test_a_row_has_the_same_bits_whatever_shares_its_step(program: Program) -> None:
    with cpu_driver(program) as (device, driver):
        driver.seat(0)
        driver.step({0: PROMPT})
        alone = np.array(device.logits()[0])
        lone_decode = decode(device, driver, {0: [77]}, 0)
        for mates in (1, 2, 3, 4, 7):
            driver.seat(0)
            rows = {seat: PROMPT[: 3 + seat] for seat in range(1, mates + 1)} | {0: PROMPT}
            for seat in rows:
                driver.seat(seat)
            driver.step(rows)
            assert np.array_equal(device.logits()[mates], alone)
            together = decode(device, driver, {seat: [77] for seat in rows}, mates)
            assert np.array_equal(together, lone_decode)


def decode(device: CpuDevice, driver: DeviceDriver, rows: dict[int, list[int]], index: int) -> np.ndarray:
    driver.step(rows)
    return np.array(device.logits()[index])


def test_a_row_has_the_same_bits_however_its_prompt_was_cut(program: Program) -> None:
    with cpu_driver(program) as (device, driver):
        results = []
        for cuts in ([len(PROMPT)], [1] * len(PROMPT), [4, 1, 3, 15], [16, 7], [2, 21]):
            driver.seat(0)
            start = 0
            for cut in cuts:
                driver.step({0: PROMPT[start : start + cut]})
                start += cut
            results.append(np.array(device.logits()[0]))
        for result in results[1:]:
            assert np.array_equal(result, results[0])


def test_a_row_has_the_same_bits_on_any_number_of_threads(program: Program) -> None:
    results = []
    for threads in (1, 2, 3, 5):
        with cpu_driver(program, threads=threads) as (device, driver):
            driver.seat(0)
            driver.seat(1)
            driver.step({0: PROMPT, 1: PROMPT[:6]})
            first = np.array(device.logits())
            driver.step({0: [9], 1: [10]})
            results.append(np.concatenate([first, device.logits()]))
    for result in results[1:]:
        assert np.array_equal(result, results[0])


def poison(program: Program, token: int) -> Program:
    """The program with a token whose embedding is not a number; its embedding table is F32."""
    embed = program.operations[0]
    assert isinstance(embed, Embed)
    values = np.array(embed.table.data).view(np.float32).reshape(embed.table.shape)
    values[token] = np.nan
    table = msgspec.structs.replace(embed.table, data=values.ravel().view(np.uint8))
    poisoned = msgspec.structs.replace(embed, table=table)
    return msgspec.structs.replace(program, operations=(poisoned, *program.operations[1:]))


def test_a_row_that_is_not_a_number_harms_nobody_else(tmp_path: Path) -> None:
    clean = tiny_program(tmp_path, "F32")
    poisoned = poison(clean, token=100)
    with cpu_driver(clean) as (device, driver):
        driver.seat(1)
        driver.step({1: PROMPT[:5]})
        expected = np.array(device.logits()[0])
    with cpu_driver(poisoned) as (device, driver):
        driver.seat(0)
        driver.seat(1)
        result = driver.step({0: [100, 5], 1: PROMPT[:5]})
        assert list(result.ok[:2]) == [False, True]
        assert np.array_equal(device.logits()[1], expected)


def test_pages_of_a_failed_sequence_are_safe_to_reuse(tmp_path: Path) -> None:
    program = poison(tiny_program(tmp_path, "F32"), token=100)
    with cpu_driver(program) as (device, driver):
        driver.seat(0)
        driver.step({0: [5, 6, 7]})
        expected = np.array(device.logits()[0])
        driver.seat(0)
        assert not driver.step({0: [100] * 40}).ok[0]
        driver.seat(0)
        assert driver.step({0: [5, 6, 7]}).ok[0]
        assert np.array_equal(device.logits()[0], expected)


def test_the_previous_sample_is_the_next_token(program: Program) -> None:
    with cpu_driver(program) as (device, driver):
        for seat in range(3):
            driver.seat(seat)
        drawn = [int(token) for token in driver.step({0: PROMPT, 1: PROMPT[:4], 2: [3]}).token_ids[:3]]
        driver.decode([0, 1, 2])
        by_reference = np.array(device.logits())
        for seat in range(3):
            driver.seat(seat)
        driver.step({0: PROMPT, 1: PROMPT[:4], 2: [3]})
        driver.step({seat: [token] for seat, token in enumerate(drawn)})
        assert np.array_equal(by_reference, device.logits())


def test_greedy_tokens_are_the_arg_max(program: Program) -> None:
    with cpu_driver(program) as (device, driver):
        driver.seat(0)
        token = driver.step({0: PROMPT}).token_ids[0]
        assert token == device.logits()[0].argmax()


def test_a_step_without_samples_only_fills_the_cache(program: Program) -> None:
    with cpu_driver(program) as (device, driver):
        driver.seat(0)
        driver.step({0: PROMPT})
        expected = np.array(device.logits()[0])
        driver.seat(0)
        batch = driver._batch
        driver.step({0: PROMPT[:10]})
        batch.num_samples = 0
        device.submit(batch)
        assert device.collect().num_samples == 0
        driver.step({0: PROMPT[10:]})
        assert np.array_equal(device.logits()[0], expected)


def test_a_row_has_the_same_bits_whichever_rows_are_sampled(program: Program) -> None:
    with cpu_driver(program) as (device, driver):
        driver.seat(0)
        driver.step({0: PROMPT})
        batch = driver._batch
        found: dict[int, np.ndarray] = {}
        for rows in ([3, 7, 22], [0, 22], list(range(8)), [22]):
            batch.num_samples = len(rows)
            batch.sample_rows[: len(rows)] = rows
            batch.sample_seats[: len(rows)] = range(len(rows))
            device.submit(batch)
            device.collect()
            for row, logits in zip(rows, device.logits(), strict=True):
                assert np.array_equal(found.setdefault(row, np.array(logits)), logits)
        driver.seat(0)
        driver.step({0: PROMPT[:4]})
        assert np.array_equal(found[3], device.logits()[0])


def test_the_most_rows_and_seats_fit(program: Program) -> None:
    limits = small_limits(max_rows=64, max_seats=64, max_context_tokens=32)
    with cpu_driver(program, limits=limits) as (device, driver):
        for seat in range(64):
            driver.seat(seat)
        result = driver.step({seat: [3 + seat] for seat in range(64)})
        assert result.num_samples == 64
        assert result.ok[:64].all()
        driver.seat(0)
        driver.step({0: [3]})
        assert np.isfinite(device.logits()).all()


def test_closing_twice_is_harmless(program: Program) -> None:
    with cpu_driver(program) as (device, _):
        device.close()
        device.close()


def test_a_shape_without_kernels_is_refused_by_name(tmp_path: Path) -> None:
    program = tiny_program(
        tmp_path, "F32", TinyShape(hidden_size=48, num_heads=2, num_kv_heads=2, head_size=24)
    )
    with pytest.raises(ConfigError, match=r"multiple of 32.*--device reference"):
        CpuDevice(program, small_limits(max_seats=2), 1)
