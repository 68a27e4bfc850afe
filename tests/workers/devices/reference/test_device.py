"""The reference device against a dense forward pass, and the promises every device makes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.generation import SamplingParams
from ds4.model_file import ModelFile
from tests.support.device_driver import DeviceDriver, small_limits
from tests.support.tiny_model import TinyShape, vocabulary, write_tiny_model
from workers.devices.interface import Limits
from workers.devices.reference.device import ReferenceDevice
from workers.model.program import (
    Attention,
    DownMatmul,
    Embed,
    GateUpMatmul,
    Logits,
    Norm,
    OutputMatmul,
    Program,
    QkvMatmul,
    RopeAppend,
    Tensor,
)
from workers.model.registry import load_program
from workers.quant.dequantise import dequantise

VOCAB = len(vocabulary())
LIMITS = small_limits(max_rows=512, max_seats=32, max_context_tokens=320)


def values(tensor: Tensor) -> NDArray[np.float64]:
    return dequantise(tensor.data, tensor.ggml_type, tensor.shape).astype(np.float64)


def dense_logits(program: Program, ids: list[int]) -> NDArray[np.float64]:
    """Logits of the last token by the textbook: one sequence, no cache, no pages, float64."""
    sizes, count = program.dimensions, len(ids)
    heads, kv_heads, head = sizes.num_heads, sizes.num_kv_heads, sizes.head_size
    empty: NDArray[np.float64] = np.zeros(0)
    x = normed = attn = act = logits = q = k = v = empty

    def norm(of: NDArray[np.float64], weight: Tensor, eps: float) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = of / np.sqrt((of**2).mean(axis=1, keepdims=True) + eps) * values(weight)
        return scaled

    def rotate(of: NDArray[np.float64], rope: RopeAppend) -> NDArray[np.float64]:
        turned = of.copy()
        pairs = len(rope.inverse_frequencies)
        for position in range(count):
            turn = rope.magnitude * np.exp(1j * position * rope.inverse_frequencies.astype(np.float64))
            first = slice(0, 2 * pairs, 2) if rope.interleaved else slice(0, pairs)
            second = slice(1, 2 * pairs, 2) if rope.interleaved else slice(pairs, 2 * pairs)
            pair = (of[position, :, first] + 1j * of[position, :, second]) * turn
            turned[position, :, first], turned[position, :, second] = pair.real, pair.imag
        return turned

    for operation in program.operations:
        match operation:
            case Embed():
                x = values(operation.table)[ids] * operation.scale
            case Norm():
                normed = norm(x, operation.weight, operation.eps)
            case QkvMatmul():
                parts = []
                for weight, bias in (
                    (operation.q, operation.q_bias),
                    (operation.k, operation.k_bias),
                    (operation.v, operation.v_bias),
                ):
                    part = normed @ values(weight).T + (0 if bias is None else values(bias))
                    parts.append(part.reshape(count, -1, head))
                q, k, v = parts
            case RopeAppend():
                q, k = rotate(q, operation), rotate(k, operation)
            case Attention():
                attended: NDArray[np.float64] = np.zeros((count, heads, head))
                for row in range(count):
                    for index in range(heads):
                        shared = index // (heads // kv_heads)
                        scores = operation.scale * k[: row + 1, shared] @ q[row, index]
                        weights = np.exp(scores - scores.max())
                        attended[row, index] = weights / weights.sum() @ v[: row + 1, shared]
                attn = attended.reshape(count, -1)
            case OutputMatmul():
                x = x + attn @ values(operation.weight).T
            case GateUpMatmul():
                gate = normed @ values(operation.gate).T
                act = gate / (1 + np.exp(-gate)) * (normed @ values(operation.up).T)
            case DownMatmul():
                x = x + act @ values(operation.weight).T
            case Logits():
                logits = norm(x[-1:], operation.norm_weight, operation.eps) @ values(operation.weight).T
    last: NDArray[np.float64] = logits[0]
    return last


def open_tiny(tmp_path: Path, limits: Limits = LIMITS, **options: Any) -> tuple[Program, DeviceDriver]:
    program = load_program(ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf", **options)))
    return program, DeviceDriver(ReferenceDevice(program, limits, threads=1), limits)


def logits_of(driver: DeviceDriver, index: int = 0) -> NDArray[np.float32]:
    device = driver.device
    assert isinstance(device, ReferenceDevice)
    logits: NDArray[np.float32] = device.logits()[index].copy()
    return logits


def random_ids(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return ids


@pytest.mark.parametrize(
    "options",
    [
        {"quant": "F32"},
        {"quant": "Q4_1", "shape": TinyShape(tied_head=True)},
        {"quant": "Q8_0", "shape": TinyShape(biases=True, num_kv_heads=1)},
        {"quant": "F16", "shape": TinyShape(num_heads=5, num_kv_heads=5, head_size=32)},
        {
            "quant": "BF16",
            "extra_string": {"llama.rope.scaling.type": "yarn"},
            "extra_float32": {"llama.rope.scaling.factor": 4.0},
        },
    ],
    ids=["plain", "tied", "biases", "wide heads", "yarn"],
)
def test_logits_are_those_of_a_dense_forward_pass(tmp_path: Path, options: dict[str, Any]) -> None:
    program, driver = open_tiny(tmp_path, **options)
    ids = random_ids(1, 150)  # more than a tile of keys
    driver.seat(3)
    driver.step({3: ids[:70]})
    driver.step({3: ids[70:]})
    expected = dense_logits(program, ids)
    # float32 sums of up to 150 terms, and logits of a few units: measured errors are near 1e-5.
    np.testing.assert_allclose(logits_of(driver), expected, rtol=0, atol=2e-4)
    assert int(expected.argmax()) == int(logits_of(driver).argmax())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DeviceDriver:
    return open_tiny(tmp_path_factory.mktemp("model"))[1]


def run_among(
    driver: DeviceDriver, prompt: list[int], chunks: list[int], seat: int, num_mates: int
) -> tuple[list[int], list[bytes]]:
    """Eight tokens of `prompt` and the bits of their logits, beside `num_mates` other sequences."""
    mates = [other for other in range(num_mates + 1) if other != seat]
    for each in (*mates, seat):
        driver.seat(each)
    tokens, bits, start = [], [], 0

    def step(new: list[int]) -> None:
        rows: dict[int, list[int]] = {}
        for other in sorted((*mates, seat)):
            started = driver.lengths[other] > 0
            rows[other] = new if other == seat else [-1] if started else random_ids(other, 1 + other % 12)
        result = driver.step(rows)
        index = sorted(rows).index(seat)
        tokens.append(int(result.token_ids[index]))
        bits.append(logits_of(driver, index).tobytes())

    for chunk in chunks:
        step(prompt[start : start + chunk])
        start += chunk
    tokens, bits = tokens[-1:], bits[-1:]
    for _ in range(7):
        step([-1])
    return tokens, bits


PROMPT_TOKENS = 150


@pytest.fixture(scope="module")
def alone(tiny: DeviceDriver) -> tuple[list[int], list[bytes]]:
    return run_among(tiny, random_ids(9, PROMPT_TOKENS), [PROMPT_TOKENS], 0, 0)


@pytest.mark.parametrize(
    ("chunks", "seat", "num_mates"),
    [
        ([150], 0, 31),
        ([150], 31, 31),
        ([1, 149], 0, 0),
        ([149, 1], 5, 7),
        ([50, 50, 50], 1, 2),
        ([7, 143], 16, 31),
        ([16] * 9 + [6], 2, 3),
        ([1] * 150, 0, 0),
    ],
)
def test_a_request_has_the_same_bits_alone_and_in_any_company(
    tiny: DeviceDriver, alone: tuple[list[int], list[bytes]], chunks: list[int], seat: int, num_mates: int
) -> None:
    assert run_among(tiny, random_ids(9, PROMPT_TOKENS), chunks, seat, num_mates) == alone


def test_a_shared_prefix_gives_the_bits_of_a_computed_one(tiny: DeviceDriver) -> None:
    ids = random_ids(10, 100)
    tiny.seat(0)
    tiny.step({0: ids})
    expected = logits_of(tiny).tobytes()
    driver = DeviceDriver(tiny.device, LIMITS)
    driver.seat(4)
    driver.step({4: ids[:90]})
    driver.seat(7)
    driver.share_prefix(4, 7, 80)
    driver.step({7: ids[80:]})
    assert logits_of(driver).tobytes() == expected


def test_the_previous_sample_stands_for_the_token_it_was(tiny: DeviceDriver) -> None:
    for seat in (0, 1):
        tiny.seat(seat)
        token = int(tiny.step({seat: random_ids(11, 20)}).token_ids[0])
    result = tiny.step({0: [-1], 1: [token]})
    assert result.token_ids[0] == result.token_ids[1]
    assert logits_of(tiny, 0).tobytes() == logits_of(tiny, 1).tobytes()


def test_a_sampled_sequence_is_a_function_of_its_seed(tiny: DeviceDriver) -> None:
    def tokens(seat: int, seed: int, company: list[int]) -> list[int]:
        tiny.seat(seat, SamplingParams(temperature=1.5, seed=seed))
        for other in company:
            tiny.seat(other, SamplingParams(temperature=1.0, seed=other))
            tiny.step({other: random_ids(other, 5)})
        drawn = [int(tiny.step({seat: random_ids(12, 30)}).token_ids[0])]
        return drawn + [int(tiny.decode([seat, *company]).token_ids[0]) for _ in range(15)]

    first = tokens(0, 1, [])
    assert tokens(5, 1, [2, 9, 11]) == first
    assert tokens(0, 2, []) != first


def test_a_row_of_nan_is_reported_and_harms_nobody(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", quant="F32")
    info = ModelFile.open(path).tensors["token_embd.weight"]
    content = bytearray(path.read_bytes())
    poison = 40  # this token's embedding is not a number
    row = info.num_bytes // VOCAB
    start = info.offset + poison * row
    content[start : start + row] = np.full(row // 4, np.nan, np.float32).tobytes()
    path.write_bytes(content)
    program = load_program(ModelFile.open(path))
    driver = DeviceDriver(ReferenceDevice(program, LIMITS, threads=1), LIMITS)
    good = [token for token in random_ids(13, 40) if token != poison]
    driver.seat(0)
    driver.step({0: good})
    expected = logits_of(driver).tobytes()
    for seat in range(3):
        driver.seat(seat)
    result = driver.step({0: [*good[:5], poison, *good[5:]], 1: good, 2: [poison]})
    assert result.ok[:3].tolist() == [False, True, False]
    assert logits_of(driver, 1).tobytes() == expected
    # The pages of the first sequence still hold NaN past the end of the next one.
    driver.seat(0)
    result = driver.step({0: good[:4]})
    assert result.ok[0]
    clean = DeviceDriver(ReferenceDevice(program, LIMITS, threads=1), LIMITS)
    clean.seat(0)
    clean.step({0: good[:4]})
    assert logits_of(driver).tobytes() == logits_of(clean).tobytes()
