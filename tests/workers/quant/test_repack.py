"""The packed layout: nothing is lost, padding is zero, and sizes are those that the kernels expect."""

from typing import Final

import numpy as np
import pytest

from ds4.ggml_types import BLOCK_SIZES, GgmlType
from tests.workers.kernels.raw_weights import raw_weights
from workers.quant.repack import (
    FLOAT_TYPES,
    QUANTISED_TYPES,
    iq2_xxs_codebook,
    padded_inputs,
    repack,
    repack_gate_up,
)

# Bytes of a unit of 16 outputs and 64 inputs, and of a super-block of 256 inputs: what formats.cuh says.
UNIT_BYTES: Final = {
    GgmlType.Q4_0: (512 + 64, 0),
    GgmlType.Q4_1: (512 + 128, 0),
    GgmlType.Q5_0: (512 + 128 + 64, 0),
    GgmlType.Q5_1: (512 + 128 + 128, 0),
    GgmlType.Q8_0: (1024 + 64, 0),
    GgmlType.Q2_K: (256 + 64, 64),
    GgmlType.Q3_K: (256 + 128 + 64, 32),
    GgmlType.Q4_K: (512 + 64, 64),
    GgmlType.Q5_K: (512 + 128 + 64, 64),
    GgmlType.Q6_K: (512 + 256 + 64, 32),
    GgmlType.IQ2_XXS: (256 + 32, 32),
    GgmlType.IQ4_NL: (512 + 64, 0),
    GgmlType.IQ4_XS: (512 + 32, 32),
    GgmlType.MXFP4: (512 + 32, 0),
}
TYPES: Final = sorted(QUANTISED_TYPES)


def _inputs(kind: GgmlType) -> int:
    return 512 if BLOCK_SIZES[kind][0] == 256 else 96


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_a_packed_matrix_has_the_size_that_the_kernels_read(kind: GgmlType) -> None:
    inputs = _inputs(kind)
    packed = repack([(raw_weights(kind, 41, inputs), (41, inputs))], kind)
    assert (packed.num_tiles, packed.num_units) == (3, padded_inputs(inputs) // 64)
    unit, super_block = UNIT_BYTES[kind]
    cells = packed.num_tiles * packed.num_units
    assert packed.data.nbytes == cells * unit + cells // 4 * super_block


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_bit_of_every_block_is_kept(kind: GgmlType) -> None:
    inputs = BLOCK_SIZES[kind][0]
    raw = raw_weights(kind, 1, inputs)
    plain = repack([(raw, (1, inputs))], kind).data
    for bit in range(8 * raw.size):
        changed = raw.copy()
        changed[bit // 8] ^= np.uint8(1 << bit % 8)
        assert not np.array_equal(repack([(changed, (1, inputs))], kind).data, plain), bit


def test_many_tiles_are_packed_like_few() -> None:
    kind, outputs, inputs = GgmlType.Q4_K, 16 * 130, 256
    raw = raw_weights(kind, outputs, inputs)
    whole = repack([(raw, (outputs, inputs))], kind)
    rows = raw.reshape(outputs, -1)
    values = [
        repack([(rows[i : i + 16].reshape(-1), (16, inputs))], kind).data[: 4 * 512]
        for i in range(0, outputs, 16)
    ]
    assert np.array_equal(whole.data[: len(values) * 4 * 512], np.concatenate(values))


def test_parts_become_one_matrix() -> None:
    kind, inputs = GgmlType.Q8_0, 64
    raw = raw_weights(kind, 40, inputs)
    rows = raw.reshape(40, -1)
    parts = [(rows[a:b].reshape(-1), (b - a, inputs)) for a, b in ((0, 8), (8, 11), (11, 40))]
    assert np.array_equal(repack(parts, kind).data, repack([(raw, (40, inputs))], kind).data)


@pytest.mark.parametrize("kind", sorted(FLOAT_TYPES), ids=lambda kind: kind.name)
def test_float_matrices_stay_as_they_are(kind: GgmlType) -> None:
    raw = raw_weights(kind, 3, 40)
    packed = repack([(raw, (3, 40))], kind)
    assert np.array_equal(packed.data, raw)
    assert packed.num_units == 1


@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.Q4_1], ids=lambda kind: kind.name)
def test_gate_and_up_alternate_in_groups_of_eight(kind: GgmlType) -> None:
    inputs, ffn = 32, 10
    gate, up = raw_weights(kind, ffn, inputs, 1), raw_weights(kind, ffn, inputs, 2)
    rows = [data.reshape(ffn, -1) for data in (gate, up)]
    padding = np.zeros((6, rows[0].shape[1]), np.uint8)
    order = [rows[0][:8], rows[1][:8], rows[0][8:], padding, rows[1][8:], padding]
    wanted = repack([(np.concatenate(order).reshape(-1), (32, inputs))], kind)
    packed = repack_gate_up(gate, up, (ffn, inputs), kind)
    assert packed.num_outputs == 32
    assert np.array_equal(packed.data, wanted.data)


def test_the_codebook_has_three_magnitudes() -> None:
    book = iq2_xxs_codebook()
    assert book.shape == (256, 8)
    assert np.unique(book).tolist() == [8, 25, 43]
