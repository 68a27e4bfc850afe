"""Every GGML type that is taken apart means what the reference dequantisation says."""

import numpy as np
import pytest

from ds4.model_file import BLOCK_SIZES, GgmlType
from workers.devices.cpu.blocks import Blocks, has_reader, quantise_rows, read_blocks, runtime_kind
from workers.devices.cpu.formats import QUANTISED, WeightKind
from workers.quant.dequantise import DEQUANTISABLE, dequantise

READABLE = [kind for kind in sorted(DEQUANTISABLE) if has_reader(kind)]
# Where the halves that are scales (or factors of scales) lie in a block.
HALVES = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q3_K: (108,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
}


def random_rows(ggml_type: GgmlType, num_rows: int, num_inputs: int, seed: int) -> np.ndarray:
    """Random bytes with scales of ordinary size."""
    rng = np.random.default_rng(seed)
    block_inputs, block_bytes = BLOCK_SIZES[ggml_type]
    raw = rng.integers(0, 256, (num_rows, num_inputs // block_inputs, block_bytes), np.uint8)
    for offset in HALVES[ggml_type]:
        scales = rng.uniform(-0.1, 0.1, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., offset : offset + 2] = scales.view(np.uint8)
    return raw.reshape(num_rows, -1)


def values_of(blocks: Blocks, kind: WeightKind) -> np.ndarray:
    quants = blocks.values
    if QUANTISED[kind].bits == 4:
        quants = np.concatenate([quants & 15, quants >> 4], axis=-1)
    signed = quants.view(np.int8).astype(np.float32) if kind is WeightKind.S8 else quants.astype(np.float32)
    if kind is WeightKind.U4:
        signed -= 8
    by_scale = signed.reshape(*signed.shape[:2], blocks.scales.shape[-1], -1)
    values = by_scale * blocks.scales[..., None].astype(np.float32)
    if blocks.minima is not None:
        values += blocks.minima[..., None].astype(np.float32)
    return values.reshape(len(values), -1)


@pytest.mark.parametrize("ggml_type", READABLE, ids=lambda kind: kind.name)
def test_a_type_taken_apart_has_the_values_of_its_dequantisation(ggml_type: GgmlType) -> None:
    raw = random_rows(ggml_type, 8, 512, seed=int(ggml_type))
    found = values_of(read_blocks(ggml_type, raw), runtime_kind(ggml_type))
    expected = dequantise(raw, ggml_type, (8, 512))
    # Scales of K types are products that are rounded to float16: 2^-11 of a term.
    largest = np.abs(expected).max()
    assert np.abs(found - expected).max() <= largest * 2.0**-10


@pytest.mark.parametrize("ggml_type", [GgmlType.Q4_0, GgmlType.Q5_0, GgmlType.Q8_0], ids=lambda k: k.name)
def test_types_with_one_scale_are_kept_exactly(ggml_type: GgmlType) -> None:
    raw = random_rows(ggml_type, 4, 256, seed=1)
    found = values_of(read_blocks(ggml_type, raw), runtime_kind(ggml_type))
    assert np.array_equal(found, dequantise(raw, ggml_type, (4, 256)))


def test_values_that_feed_an_unsigned_dot_product_fit_seven_bits() -> None:
    for ggml_type in READABLE:
        kind = runtime_kind(ggml_type)
        if QUANTISED[kind].bits == 8 and kind is not WeightKind.S8:
            assert read_blocks(ggml_type, random_rows(ggml_type, 4, 512, seed=2)).values.max() < 128


def test_rows_of_other_types_are_quantised_to_within_half_a_step() -> None:
    rows = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
    rows[1, :32] = 0
    blocks = quantise_rows(rows)
    steps = np.repeat(blocks.scales[..., 0].astype(np.float32), 32, axis=1)
    assert (np.abs(values_of(blocks, WeightKind.S8) - rows) <= 0.51 * steps).all()


def test_every_readable_type_has_a_runtime_kind() -> None:
    assert {runtime_kind(ggml_type) for ggml_type in DEQUANTISABLE} == set(WeightKind)
