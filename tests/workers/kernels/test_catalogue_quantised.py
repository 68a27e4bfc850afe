"""Quantised products and the embedding, against the reference, for every weight type."""

from typing import Any, Final, get_args

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.ggml_types import BLOCK_SIZES, GgmlType
from tests.workers.kernels import reference
from tests.workers.kernels.raw_weights import raw_weights
from tests.workers.kernels.rig import Rig, emulator, needs_compiler
from workers.devices.cuda.backend import Argument, DeviceArray
from workers.kernels import catalogue
from workers.kernels.catalogue import MatmulVariant, MatrixVariant, VectorVariant
from workers.quant.dequantise import dequantise
from workers.quant.repack import (
    PACKABLE_TYPES,
    QUANTISED_TYPES,
    PackedMatrix,
    iq2_xxs_codebook,
    repack,
    repack_gate_up,
)

pytestmark = needs_compiler

Array = NDArray[Any]
TYPES: Final = sorted(QUANTISED_TYPES)
MATRIX_VARIANTS: Final[tuple[MatrixVariant, ...]] = get_args(MatrixVariant)
VECTOR_VARIANTS: Final[tuple[VectorVariant, ...]] = get_args(VectorVariant)
VARIANTS: Final[tuple[MatmulVariant, ...]] = (*VECTOR_VARIANTS, *MATRIX_VARIANTS)


def tolerance(variant: MatmulVariant) -> float:
    """Vectors: both sides round activations alike and add exact integers; only float32 sums of some terms
    differ. Matrices: weights, their scales and minimums are rounded to 11 bits too.
    """
    return 1e-6 if variant in VECTOR_VARIANTS else 5e-4


def wanted_of(variant: MatmulVariant, x: Array, weight: Array) -> Array:
    """The reference's product for this kernel's kind of activations."""
    multiply = reference.quantised_matmul if variant in VECTOR_VARIANTS else reference.halved_matmul
    return multiply(x, weight)


def odd_inputs(kind: GgmlType) -> int:
    """An input size that fills no whole unit where the blocks allow it."""
    return 512 if BLOCK_SIZES[kind][0] == 256 else 96


class Product:
    """One weight and some rows on a backend."""

    def __init__(self, kind: GgmlType, packed: PackedMatrix, x: Array, rig: Rig | None = None) -> None:
        self.rig = rig or Rig()
        self._kind, self._packed = kind, packed
        self._num_rows = len(x)
        put = self.rig.put
        self._weight, self._codebook = put(packed.data), put(iq2_xxs_codebook())
        self.rounded = [put(part) for part in reference.pack_activations(*reference.quantise(x))]
        values, scales = reference.halve(x)
        self._halved = [put(reference.pack_halves(values)), put(scales)]

    def run(
        self,
        variant: MatmulVariant,
        out: DeviceArray,
        num_outputs: int,
        *,
        stride: int | None = None,
        offset: int = 0,
        bias: DeviceArray | None = None,
        epilogue: int = catalogue.EPILOGUE_STORE,
        splits: int = 1,
    ) -> Array:
        """`out` after the product."""
        tiles, rows = self._packed.num_tiles, self._num_rows
        arguments: list[Argument] = [out, stride or num_outputs, offset, self._weight, self._codebook, bias]
        arguments += [num_outputs, tiles, self._packed.num_units]
        if variant == "vector_1" or variant == "vector_2":
            shape = catalogue.vector_matmul(self._kind, variant, rows, tiles)
            self.rig.run(shape, [*arguments, *self.rounded, rows, epilogue])
            return self.rig.get(out)
        shape = catalogue.matrix_matmul(self._kind, variant, rows, tiles, splits)
        scratch, tickets = None, self.rig.put(np.zeros(catalogue.num_tickets(tiles, rows), np.int32))
        if splits > 1:
            scratch = self.rig.empty((splits, rows, 16 * tiles))
        self.rig.run(shape, [*arguments, *self._halved, rows, epilogue, scratch, tickets])
        assert not self.rig.get(tickets, np.int32).any()
        return self.rig.get(out)


def _error(got: Array, wanted: Array) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_kernel_multiplies_every_type_at_odd_sizes(kind: GgmlType) -> None:
    outputs, inputs, rows = 41, odd_inputs(kind), 11
    raw = raw_weights(kind, outputs, inputs)
    weight = dequantise(raw, kind, (outputs, inputs))
    x = np.random.default_rng(1).standard_normal((rows, inputs)).astype(np.float32)
    x[3] = 0  # a row whose scales are zero
    product = Product(kind, repack([(raw, (outputs, inputs))], kind), x)
    results = {v: product.run(v, product.rig.empty((rows, outputs)), outputs) for v in VARIANTS}
    for variant, got in results.items():
        assert _error(got, wanted_of(variant, x, weight)) < tolerance(variant), variant
    # A row's bits depend neither on the batch nor on which of these kernels computes it.
    for family in (MATRIX_VARIANTS, VECTOR_VARIANTS):
        for variant in family[1:]:
            assert np.array_equal(results[variant], results[family[0]]), variant


@pytest.mark.parametrize("kind", [GgmlType.Q4_1, GgmlType.Q6_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_is_the_same_alone(kind: GgmlType, variant: MatmulVariant) -> None:
    outputs, inputs = 16, 256
    packed = repack([(raw_weights(kind, outputs, inputs), (outputs, inputs))], kind)
    x = np.random.default_rng(2).standard_normal((9, inputs)).astype(np.float32)
    together = Product(kind, packed, x)
    alone = Product(kind, packed, x[8:])
    all_rows = together.run(variant, together.rig.empty((9, outputs)), outputs)
    assert np.array_equal(all_rows[8:], alone.run(variant, alone.rig.empty((1, outputs)), outputs))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_with_bias_lands_in_its_columns(variant: MatmulVariant) -> None:
    kind, outputs, inputs, rows = GgmlType.Q8_0, 20, 64, 3
    raw = raw_weights(kind, outputs, inputs)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32)
    product = Product(kind, repack([(raw, (outputs, inputs))], kind), x)
    out = product.rig.put(np.full((rows, 50), 7, np.float32))
    got = product.run(variant, out, outputs, stride=50, offset=25, bias=product.rig.put(bias))
    wanted = wanted_of(variant, x, dequantise(raw, kind, (outputs, inputs))) + bias
    assert _error(got[:, 25:45], wanted) < tolerance(variant)
    assert (got[:, :25] == 7).all()
    assert (got[:, 45:] == 7).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_is_added_to_the_residual(variant: MatmulVariant) -> None:
    kind, outputs, inputs, rows = GgmlType.Q4_K, 32, 256, 2
    raw = raw_weights(kind, outputs, inputs)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    residual = rng.standard_normal((rows, outputs)).astype(np.float32)
    product = Product(kind, repack([(raw, (outputs, inputs))], kind), x)
    got = product.run(variant, product.rig.put(residual), outputs, epilogue=catalogue.EPILOGUE_ADD)
    wanted = wanted_of(variant, x, dequantise(raw, kind, (outputs, inputs))) + residual
    assert _error(got, wanted) < tolerance(variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gate_and_up_become_their_activated_product(variant: MatmulVariant) -> None:
    kind, ffn, inputs, rows = GgmlType.Q4_1, 20, 96, 5
    gate, up = raw_weights(kind, ffn, inputs, 5), raw_weights(kind, ffn, inputs, 6)
    x = np.random.default_rng(7).standard_normal((rows, inputs)).astype(np.float32)
    packed = repack_gate_up(gate, up, (ffn, inputs), kind)
    assert packed.num_outputs == 48
    product = Product(kind, packed, x)
    got = product.run(variant, product.rig.empty((rows, ffn)), ffn, epilogue=catalogue.EPILOGUE_GATE_UP)
    parts = [wanted_of(variant, x, dequantise(raw, kind, (ffn, inputs))) for raw in (gate, up)]
    # The exponential's own error on top.
    assert _error(got, reference.silu_product(*parts)) < 1e-5 + 2 * tolerance(variant)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("variant", VECTOR_VARIANTS)
def test_gate_and_up_of_few_rows_come_rounded(kind: GgmlType, variant: VectorVariant) -> None:
    ffn, inputs, rows = 96, odd_inputs(kind), 3  # a unit that is half padding, a row too many for pairs
    gate, up = raw_weights(kind, ffn, inputs, 5), raw_weights(kind, ffn, inputs, 6)
    x = np.random.default_rng(7).standard_normal((rows, inputs)).astype(np.float32)
    packed = repack_gate_up(gate, up, (ffn, inputs), kind)
    product = Product(kind, packed, x, Rig(emulator(3)))
    rig = product.rig
    floats = product.run(variant, rig.empty((rows, ffn)), ffn, epilogue=catalogue.EPILOGUE_GATE_UP)
    values, records = rig.empty((rows, 128), np.int8), rig.empty((rows, 4), reference.RECORD)
    sizes: list[Argument] = [ffn, packed.num_tiles, packed.num_units]
    weight: list[Argument] = [rig.put(packed.data), rig.put(iq2_xxs_codebook())]
    shape = catalogue.vector_gate_up(kind, variant, rows, ffn)
    rig.run(shape, [values, records, *weight, *sizes, *product.rounded, rows])
    got = rig.get(values, np.int8), rig.get(records, reference.RECORD)
    wanted_values, wanted_records = reference.pack_activations(*reference.quantise(floats))
    # Sums of eight warps in one kernel and of four in the other: a value may be rounded the other way.
    assert np.abs(got[0].astype(int) - wanted_values).max() <= 1
    assert (got[0] != wanted_values).mean() < 0.01
    np.testing.assert_allclose(got[1]["scale"], wanted_records["scale"], rtol=1e-4)
    assert np.abs(got[1]["sums"] - wanted_records["sums"]).max() <= 2
    assert not got[1]["scale"][:, 3].any()


@pytest.mark.parametrize("kind", [GgmlType.Q4_K, GgmlType.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("epilogue", [catalogue.EPILOGUE_STORE, catalogue.EPILOGUE_ADD])
def test_inputs_that_are_split_give_the_same_product(kind: GgmlType, epilogue: int) -> None:
    outputs, inputs, rows = 150, 1280, 19  # two blocks of tiles, splits of unequal length
    raw = raw_weights(kind, outputs, inputs)
    rng = np.random.default_rng(10)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    before = rng.standard_normal((rows, outputs)).astype(np.float32)
    product = Product(kind, repack([(raw, (outputs, inputs))], kind), x, Rig(emulator(3)))
    wanted = reference.halved_matmul(x, dequantise(raw, kind, (outputs, inputs)))
    wanted = wanted + before if epilogue == catalogue.EPILOGUE_ADD else wanted
    results = [
        product.run(variant, product.rig.put(before), outputs, epilogue=epilogue, splits=3)
        for variant in MATRIX_VARIANTS
    ]
    assert _error(results[0], wanted) < tolerance("matrix_8")
    assert all(np.array_equal(got, results[0]) for got in results[1:])


def test_narrow_matrices_are_split_and_wide_or_short_ones_are_not() -> None:
    llama = {
        "qkv": (384, 64),
        "output": (256, 64),
        "gate and up": (1792, 64),
        "down": (256, 224),
        "head": (8016, 64),
    }
    splits = {name: catalogue.matrix_splits(*shape) for name, shape in llama.items()}
    assert splits == {"qkv": 4, "output": 4, "gate and up": 1, "down": 6, "head": 1}
    assert catalogue.matrix_splits(4, 2) == 1


@pytest.mark.parametrize("magnitude", [1e-5, 1.0, 20.0])
def test_weights_of_any_usual_magnitude_keep_their_precision(magnitude: float) -> None:
    """Float16 has fewer bits below 6e-5: the kernel raises weights above that."""
    kind, outputs, inputs = GgmlType.Q8_0, 32, 256
    weights = np.random.default_rng(11).standard_normal((outputs, inputs)).astype(np.float32) * np.float32(
        magnitude
    )
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0).reshape(-1)
    x = 1e6 * np.random.default_rng(12).standard_normal((3, inputs)).astype(
        np.float32
    )  # past float16's range
    product = Product(kind, repack([(raw, (outputs, inputs))], kind), x)
    got = product.run("matrix_8", product.rig.empty((3, outputs)), outputs)
    assert _error(got, reference.halved_matmul(x, dequantise(raw, kind, (outputs, inputs)))) < tolerance(
        "matrix_8"
    )


@pytest.mark.parametrize("order", [1, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_order_of_threads_changes_nothing(variant: MatmulVariant, order: int) -> None:
    kind, outputs, inputs, rows = GgmlType.Q5_K, 36, 512, 9
    packed = repack([(raw_weights(kind, outputs, inputs), (outputs, inputs))], kind)
    x = np.random.default_rng(8).standard_normal((rows, inputs)).astype(np.float32)
    plain, other = Product(kind, packed, x), Product(kind, packed, x, Rig(emulator(order)))
    first, second = (p.run(variant, p.rig.empty((rows, outputs)), outputs) for p in (plain, other))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("halves", [0, 1])
def test_a_broken_activation_breaks_its_own_row_only(halves: int) -> None:
    kind, outputs, inputs = GgmlType.Q4_0, 16, 128
    packed = repack([(raw_weights(kind, outputs, inputs), (outputs, inputs))], kind)
    rig = Rig()
    x = np.random.default_rng(9).standard_normal((3, inputs)).astype(np.float32)
    x[1, 70] = np.nan
    values, records = rig.empty((3, 2 * inputs), np.int8), rig.empty((3, inputs // 32), reference.RECORD)
    rig.run(catalogue.quantise(3), [rig.put(x), inputs, values, records, halves])
    out = rig.empty((3, outputs))
    weight = rig.put(packed.data)
    arguments: list[Argument] = [out, outputs, 0, weight, None, None, outputs, 1, 2, values, records, 3, 0]
    if halves:
        rig.run(catalogue.matrix_matmul(kind, "matrix_8", 3, packed.num_tiles, 1), [*arguments, None, None])
    else:
        rig.run(catalogue.vector_matmul(kind, "vector_2", 3, packed.num_tiles), arguments)
    assert np.isnan(rig.get(out)).all(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("kind", sorted(PACKABLE_TYPES), ids=lambda kind: kind.name)
def test_the_embedding_has_exactly_the_values_of_the_format(kind: GgmlType) -> None:
    outputs, inputs = 41, odd_inputs(kind)
    raw = raw_weights(kind, outputs, inputs)
    packed = repack([(raw, (outputs, inputs))], kind)
    rig = Rig()
    hidden = rig.empty((4, inputs))
    tokens = rig.put(np.array([0, 40, 17, -1], np.int32))
    seats, last = rig.put(np.array([0, 0, 0, 2], np.int32)), rig.put(np.array([9, 9, 23], np.int32))
    tables: list[Argument] = [rig.put(packed.data), rig.put(iq2_xxs_codebook())]
    sizes: list[Argument] = [packed.num_tiles, packed.num_units, inputs, 2.0]
    rig.run(catalogue.embed(kind, 4), [hidden, tokens, seats, last, *tables, *sizes])
    wanted = dequantise(raw, kind, (outputs, inputs))[[0, 40, 17, 23]] * np.float32(2)
    # Scales below float32's normal numbers are zeros on a GPU; they can be multiplied by 12 and by 2.
    wanted[np.abs(wanted) < 24 * 2.0**-126] = 0
    assert np.array_equal(rig.get(hidden), wanted)


@pytest.mark.parametrize("kind", [GgmlType.Q6_K, GgmlType.F16], ids=lambda kind: kind.name)
def test_a_whole_matrix_becomes_bfloat16(kind: GgmlType) -> None:
    outputs, inputs = 35, 256
    raw = raw_weights(kind, outputs, inputs)
    packed = repack([(raw, (outputs, inputs))], kind)
    rig = Rig()
    out = rig.empty((outputs, inputs), np.uint16)
    arguments: list[Argument] = [out, rig.put(packed.data), None, outputs, packed.num_tiles, packed.num_units]
    rig.run(catalogue.dequantise(kind, outputs), [*arguments, inputs])
    got = (rig.get(out, np.uint16).astype(np.uint32) << 16).view(np.float32)
    wanted = dequantise(raw, kind, (outputs, inputs))
    assert np.allclose(got, wanted, rtol=2.0**-8, atol=0)
