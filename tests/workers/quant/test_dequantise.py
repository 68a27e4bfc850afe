"""Weight types: known blocks to known values, and every type the gguf package can dequantise."""

import struct

import gguf
import numpy as np
import pytest

from ds4.ggml_types import BLOCK_SIZES, GgmlType
from workers.quant.dequantise import DEQUANTISABLE, dequantise, row_bytes

NIBBLES = bytes(range(0x10, 0x20))  # low nibbles 0..15, high nibbles all 1


def as_bytes(raw: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(raw, np.uint8)


@pytest.mark.parametrize(
    ("ggml_type", "block", "values"),
    [
        (GgmlType.F32, struct.pack("<2f", 1.5, -2.0), [1.5, -2.0]),
        (GgmlType.F16, struct.pack("<2e", 1.5, -2.0), [1.5, -2.0]),
        (GgmlType.BF16, b"\xc0\x3f\x00\xc0", [1.5, -2.0]),
        (GgmlType.Q8_0, struct.pack("<e32b", 0.5, *range(-16, 16)), [n / 2 for n in range(-16, 16)]),
        (GgmlType.Q4_0, struct.pack("<e", 2.0) + NIBBLES, [2.0 * (n - 8) for n in [*range(16), *[1] * 16]]),
        (
            GgmlType.Q4_1,
            struct.pack("<2e", 2.0, -3.0) + NIBBLES,
            [2.0 * n - 3 for n in [*range(16), *[1] * 16]],
        ),
        (
            # The fifth bits, one for each value: set for the even ones.
            GgmlType.Q5_1,
            struct.pack("<2eI", 1.0, 0.0, 0x55555555) + NIBBLES,
            [n + 16 * (index % 2 == 0) for index, n in enumerate([*range(16), *[1] * 16])],
        ),
    ],
)
def test_a_known_block_gives_its_values(ggml_type: GgmlType, block: bytes, values: list[float]) -> None:
    result = dequantise(as_bytes(block * 3), ggml_type, (3, len(values)))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, np.tile(np.array(values, np.float32), (3, 1)))


@pytest.mark.parametrize("ggml_type", sorted(DEQUANTISABLE), ids=lambda ggml_type: ggml_type.name)
def test_every_type_fills_its_shape(ggml_type: GgmlType) -> None:
    block_values, block_bytes = BLOCK_SIZES[ggml_type]
    columns = 2 * block_values
    assert row_bytes(ggml_type, columns) == 2 * block_bytes
    raw = np.random.default_rng(3).integers(0, 256, 3 * 2 * block_bytes, np.uint8)
    result = dequantise(raw, ggml_type, (3, columns))
    assert result.shape == (3, columns)
    assert result.dtype == np.float32
    assert result.flags.c_contiguous
    one = dequantise(raw[: row_bytes(ggml_type, columns)], ggml_type, (columns,))
    np.testing.assert_array_equal(one, result[0])


def test_exactly_the_types_of_the_gguf_package_are_dequantisable() -> None:
    possible = set()
    for ggml_type in GgmlType:
        raw = np.zeros((1, BLOCK_SIZES[ggml_type][1]), np.uint8)
        try:
            gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(ggml_type))
        except NotImplementedError:
            continue
        possible.add(ggml_type)
    assert possible == DEQUANTISABLE


def test_the_result_is_no_view_of_the_file() -> None:
    raw = as_bytes(struct.pack("<2f", 1.0, 2.0))
    assert not np.shares_memory(raw, dequantise(raw, GgmlType.F32, (2,)))
