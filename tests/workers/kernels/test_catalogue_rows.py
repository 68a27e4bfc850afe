"""Norm, activation rounding, rotation, page tables and float products, against the reference."""

from typing import Final, get_args

import numpy as np
import pytest

from ds4.config import TABLE
from ds4.ggml_types import GgmlType
from tests.workers.kernels import reference
from tests.workers.kernels.raw_weights import raw_weights
from tests.workers.kernels.rig import Rig, emulator, needs_compiler
from workers.devices.cuda.backend import Argument
from workers.kernels import catalogue
from workers.kernels.catalogue import FloatVariant
from workers.quant.dequantise import dequantise
from workers.quant.repack import FLOAT_TYPES, padded_inputs, repack, repack_gate_up

pytestmark = needs_compiler

# No GPU takes more blocks.
MOST_BLOCKS: Final = (2**31 - 1, 65_535, 65_535)
FLOAT_VARIANTS: Final[tuple[FloatVariant, ...]] = get_args(FloatVariant)


def _normal(*shape: int, seed: int = 0) -> reference.Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [32, 96, 160, 576])
def test_rows_are_rounded_as_in_the_reference(size: int) -> None:
    rig = Rig(emulator(thread_order=3))
    x = _normal(3, size)
    x[1] = 0
    values = rig.empty((3, padded_inputs(size)), np.int8)
    records = rig.empty((3, padded_inputs(size) // 32), reference.RECORD)
    rig.run(catalogue.quantise(3), [rig.put(x), size, values, records, 0])
    wanted_values, wanted_records = reference.pack_activations(*reference.quantise(x))
    assert np.array_equal(rig.get(values, np.int8), wanted_values)
    assert np.array_equal(rig.get(records, reference.RECORD), wanted_records)


def test_rows_too_small_for_a_scale_are_zeros() -> None:
    """Their scale would be below float32's normal numbers, which a GPU takes for zero."""
    rig = Rig()
    values, records = rig.empty((2, 64), np.int8), rig.empty((2, 2), reference.RECORD)
    x = _normal(2, 64) * np.array([[1e-37], [1e-40]], np.float32)
    rig.run(catalogue.quantise(2), [rig.put(x), 64, values, records, 0])
    assert not rig.get(values, np.int8).any()
    assert not rig.get(records, reference.RECORD)["scale"].any()
    assert not rig.get(records, reference.RECORD)["sums"].any()


@pytest.mark.parametrize("size", [32, 96, 576])
def test_rows_are_halved_as_in_the_reference(size: int) -> None:
    rig = Rig(emulator(thread_order=3))
    x = _normal(4, size)
    x[1] = 0
    x[2] *= np.float32(1e9)  # past float16's range
    x[3] *= np.float32(1e-9)
    values, scales = rig.empty((4, padded_inputs(size)), np.float16), rig.empty(4)
    rig.run(catalogue.quantise(4), [rig.put(x), size, values, scales, 1])
    wanted_values, wanted_scales = reference.halve(x)
    assert np.array_equal(rig.get(values, np.float16), reference.pack_halves(wanted_values))
    assert np.array_equal(rig.get(scales), wanted_scales)


@pytest.mark.parametrize("size", [64, 576])
def test_the_norm_is_halved(size: int) -> None:
    rig = Rig(emulator(thread_order=5))
    hidden, weight = _normal(3, size) * 10, _normal(size, seed=1)
    values, scales = rig.empty((3, padded_inputs(size)), np.float16), rig.empty(3)
    rig.run(
        catalogue.norm(3, size), [rig.put(hidden), None, rig.put(weight), size, 1e-5, None, values, scales, 1]
    )
    wanted_values, wanted_scales = reference.halve(reference.norm(hidden, weight, 1e-5))
    assert np.array_equal(rig.get(scales), wanted_scales)
    difference = rig.get(values, np.float16).astype(np.float32) - reference.pack_halves(wanted_values)
    assert np.abs(difference).max() <= 2.0**-10  # one unit in the last place of values below 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_breaks_its_halved_row(bad: float) -> None:
    rig = Rig()
    x = _normal(2, 64)
    x[0, 40] = bad
    values, scales = rig.empty((2, 64), np.float16), rig.empty(2)
    rig.run(catalogue.quantise(2), [rig.put(x), 64, values, scales, 1])
    assert np.isfinite(rig.get(scales)).tolist() == [False, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_not_rounded_away(bad: float) -> None:
    rig = Rig()
    x = _normal(1, 64)
    x[0, 40] = bad
    values, records = rig.empty((1, 64), np.int8), rig.empty((1, 2), reference.RECORD)
    rig.run(catalogue.quantise(1), [rig.put(x), 64, values, records, 0])
    scales = rig.get(records, reference.RECORD)["scale"]
    assert np.isfinite(scales[0]).tolist() == [True, False]


@pytest.mark.parametrize("size", [64, 576])
def test_the_norm_is_right_as_floats_and_rounded(size: int) -> None:
    rig = Rig(emulator(thread_order=1))
    hidden, weight = _normal(5, size) * 10, _normal(size, seed=1)
    out = rig.empty((2, size))
    values = rig.empty((2, padded_inputs(size)), np.int8)
    records = rig.empty((2, padded_inputs(size) // 32), reference.RECORD)
    rows = rig.put(np.array([4, 1], np.int32))
    arguments: list[Argument] = [rig.put(hidden), rows, rig.put(weight), size, 1e-5, out, values, records, 0]
    rig.run(catalogue.norm(2, size), arguments)
    normed = rig.get(out)
    wanted = reference.norm(hidden[[4, 1]], weight, 1e-5)
    assert np.abs(normed - wanted).max() < 1e-6 * np.abs(wanted).max()
    wanted_values, wanted_records = reference.pack_activations(*reference.quantise(normed))
    assert np.array_equal(rig.get(values, np.int8), wanted_values)
    assert np.array_equal(rig.get(records, reference.RECORD), wanted_records)


def test_the_norm_without_a_choice_of_rows_takes_them_in_order() -> None:
    rig = Rig()
    hidden, weight = _normal(3, 64), _normal(64, seed=1)
    out = rig.empty((3, 64))
    rig.run(catalogue.norm(3, 64), [rig.put(hidden), None, rig.put(weight), 64, 1e-6, out, None, None, 0])
    assert np.allclose(rig.get(out), reference.norm(hidden, weight, 1e-6), rtol=1e-6)


@pytest.mark.parametrize("order", [0, 1, 4, 5])
@pytest.mark.parametrize("kind", sorted(FLOAT_TYPES), ids=lambda kind: kind.name)
@pytest.mark.parametrize("variant", FLOAT_VARIANTS)
def test_float_products_at_odd_sizes(kind: GgmlType, variant: FloatVariant, order: int) -> None:
    outputs, inputs, rows = 41, 72, 11
    raw = raw_weights(kind, outputs, inputs)
    x, bias = _normal(rows, inputs), _normal(outputs, seed=2)
    weight = repack([(raw, (outputs, inputs))], kind)
    rig = Rig(emulator(order))
    out = rig.empty((rows, outputs))
    shape = catalogue.float_matmul(kind, variant, rows, weight.num_outputs)
    arguments: list[Argument] = [
        out,
        outputs,
        0,
        rig.put(weight.data),
        rig.put(bias),
        outputs,
        weight.num_outputs,
    ]
    rig.run(shape, [*arguments, inputs, rig.put(x), rows, catalogue.EPILOGUE_STORE])
    wanted = x @ dequantise(raw, kind, (outputs, inputs)).T + bias
    # The matrix kernel rounds operands to 11 significant bits.
    tolerance = 1e-3 if variant == "float_matrix" else 1e-6
    assert np.abs(rig.get(out) - wanted).max() < tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("variant", FLOAT_VARIANTS)
def test_float_gate_and_up(variant: FloatVariant) -> None:
    kind, ffn, inputs, rows = GgmlType.F16, 20, 64, 5
    gate, up = raw_weights(kind, ffn, inputs, 1), raw_weights(kind, ffn, inputs, 2)
    packed = repack_gate_up(gate, up, (ffn, inputs), kind)
    x = _normal(rows, inputs)
    rig = Rig()
    out = rig.empty((rows, ffn))
    shape = catalogue.float_matmul(kind, variant, rows, packed.num_outputs)
    arguments: list[Argument] = [out, ffn, 0, rig.put(packed.data), None, ffn, packed.num_outputs, inputs]
    rig.run(shape, [*arguments, rig.put(x), rows, catalogue.EPILOGUE_GATE_UP])
    wanted = reference.silu_product(*(x @ dequantise(raw, kind, (ffn, inputs)).T for raw in (gate, up)))
    tolerance = 2e-3 if variant == "float_matrix" else 1e-5
    assert np.abs(rig.get(out) - wanted).max() < tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_size", "num_pairs"), [(16, 8), (64, 32), (48, 16)])
def test_rotated_heads_land_in_the_cache_and_the_queries(
    head_size: int, num_pairs: int, *, interleaved: bool
) -> None:
    num_heads, num_kv_heads, pitch, num_pages = 3, 1, 4, 6
    positions, seats = np.array([0, 17, 33, 63], np.int32), np.array([0, 1, 1, 0], np.int32)
    tables = np.array([[5, 9, 9, 1], [9, 0, 3, 9]], np.int32)
    qkv = _normal(4, num_heads + 2 * num_kv_heads, head_size)
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(num_pairs) / num_pairs)
    rotations = np.stack([np.cos(angles), np.sin(angles)], axis=2).astype(np.float32)
    rig = Rig()
    q = rig.empty((4, num_heads, head_size), np.float16)
    shape = (num_pages, num_kv_heads, 16, head_size)
    keys, values = (rig.put(np.full(shape, np.nan, np.float16)) for _ in range(2))
    inputs: list[Argument] = [
        rig.put(qkv),
        rig.put(rotations),
        rig.put(positions),
        rig.put(seats),
        rig.put(tables),
    ]
    sizes: list[Argument] = [num_heads, num_kv_heads, head_size, num_pairs, int(interleaved), 0.25]
    rig.run(catalogue.rope_append(4, num_heads, num_kv_heads), [*inputs, pitch, q, keys, values, *sizes])
    rotated = reference.rope(qkv, rotations[positions], interleaved=interleaved)
    wanted_q = (rotated[:, :num_heads] * np.float32(0.25)).astype(np.float16)
    assert np.array_equal(rig.get(q, np.float16), wanted_q)
    pages = tables[seats, positions // 16]
    got_keys, got_values = rig.get(keys, np.float16), rig.get(values, np.float16)
    assert np.array_equal(got_keys[pages, :, positions % 16], rotated[:, 3:4].astype(np.float16))
    assert np.array_equal(got_values[pages, :, positions % 16], qkv[:, 4:].astype(np.float16))
    assert np.isnan(got_keys).sum() == (num_pages * 16 - 4) * num_kv_heads * head_size  # and nowhere else


def test_pages_are_entered_and_rows_advance() -> None:
    rig = Rig()
    tables = rig.put(np.zeros((3, 4), np.int32))
    rig.run(catalogue.update_pages(2), [tables, 4, rig.put(np.array([[2, 1, 7], [0, 3, 8]], np.int32)), 2])
    assert rig.get(tables, np.int32).tolist() == [[0, 0, 0, 8], [0, 0, 0, 0], [0, 7, 0, 0]]
    tokens, positions = rig.put(np.array([5, 6, 7], np.int32)), rig.put(np.array([1, 2, 3], np.int32))
    rig.run(catalogue.advance(2), [tokens, positions, 2])
    assert rig.get(tokens, np.int32).tolist() == [-1, -1, 7]
    assert rig.get(positions, np.int32).tolist() == [2, 3, 3]


def test_the_most_rows_that_a_step_may_have_fit_every_grid() -> None:
    """With a group so large that a tile of attention is one row, and a vocabulary and layers larger than any."""
    most = {setting.name: int(setting.high or 0) for setting in TABLE}
    rows, seats = most["max_batch_tokens"], most["batched_sessions"]
    kind, heads, kv_heads, ffn = int(GgmlType.Q4_K), 128, 2, 65_536
    shapes = [
        catalogue.embed(kind, rows),
        catalogue.quantise(rows),
        catalogue.norm(rows, 16_384),
        catalogue.rope_append(rows, heads, kv_heads),
        catalogue.attend_chunk(128, 128, kv_heads, rows // catalogue.chunk_rows(heads, kv_heads)),
        catalogue.attend_row(128, 256, 1024, kv_heads, seats),
        catalogue.combine(128, 256, heads, seats),
        catalogue.matrix_matmul(kind, "matrix_64", rows, 2 * ffn // 16, 8),
        *(catalogue.float_matmul(1, variant, rows, 2 * ffn) for variant in FLOAT_VARIANTS[1:]),
        catalogue.to_bfloat16(rows * ffn),
        catalogue.join_gate_up(rows, ffn),
        catalogue.dequantise(kind, 2 * ffn),
        catalogue.adjust(seats),
        catalogue.sample(seats),
    ]
    for shape in shapes:
        assert all(count <= limit for count, limit in zip(shape.grid, MOST_BLOCKS, strict=True)), shape
