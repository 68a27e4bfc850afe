"""Quantised products and the embedding, against the reference, for every weight type."""

from typing import Any, Final, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.ggml_types import BLOCK_SIZES, GgmlType
from tests.workers.kernels import reference
from tests.workers.kernels.raw_weights import raw_weights
from tests.workers.kernels.rig import Rig, emulator, needs_compiler
from workers.devices.cuda.backend import Argument, DeviceArray
from workers.kernels import catalogue
from workers.kernels.catalogue import MatmulVariant
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
VARIANTS: Final[tuple[MatmulVariant, ...]] = get_args(MatmulVariant)
MATRIX_VARIANTS: Final = tuple(v for v in VARIANTS if v.startswith("matrix"))
VECTOR_VARIANTS: Final = tuple(v for v in VARIANTS if v.startswith("vector"))
# Both sides round activations alike and add exact integers; only float32 sums of some terms differ.
TOLERANCE: Final = 1e-6


def odd_inputs(kind: GgmlType) -> int:
    """An input size that fills no whole unit where the blocks allow it."""
    return 512 if BLOCK_SIZES[kind][0] == 256 else 96


class Product:
    """One weight and some rows on a backend."""

    def __init__(self, kind: GgmlType, packed: PackedMatrix, x: Array, rig: Rig | None = None) -> None:
        self.rig = rig or Rig()
        self._kind, self._packed = kind, packed
        values, records = reference.pack_activations(*reference.quantise(x))
        self._num_rows = len(x)
        put = self.rig.put
        self._weight, self._codebook = put(packed.data), put(iq2_xxs_codebook())
        self._values, self._records = put(values), put(records)

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
    ) -> Array:
        """`out` after the product."""
        shape = catalogue.quantised_matmul(self._kind, variant, self._num_rows, self._packed.num_tiles)
        arguments: list[Argument] = [out, stride or num_outputs, offset, self._weight, self._codebook, bias]
        arguments += [num_outputs, self._packed.num_tiles, self._packed.num_units]
        self.rig.run(shape, [*arguments, self._values, self._records, self._num_rows, epilogue])
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
    wanted = reference.quantised_matmul(x, weight)
    results = {v: product.run(v, product.rig.empty((rows, outputs)), outputs) for v in VARIANTS}
    for variant, got in results.items():
        assert _error(got, wanted) < TOLERANCE, variant
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
    wanted = reference.quantised_matmul(x, dequantise(raw, kind, (outputs, inputs))) + bias
    assert _error(got[:, 25:45], wanted) < TOLERANCE
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
    wanted = reference.quantised_matmul(x, dequantise(raw, kind, (outputs, inputs))) + residual
    assert _error(got, wanted) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_gate_and_up_become_their_activated_product(variant: MatmulVariant) -> None:
    kind, ffn, inputs, rows = GgmlType.Q4_1, 20, 96, 5
    gate, up = raw_weights(kind, ffn, inputs, 5), raw_weights(kind, ffn, inputs, 6)
    x = np.random.default_rng(7).standard_normal((rows, inputs)).astype(np.float32)
    packed = repack_gate_up(gate, up, (ffn, inputs), kind)
    assert packed.num_outputs == 48
    product = Product(kind, packed, x)
    got = product.run(variant, product.rig.empty((rows, ffn)), ffn, epilogue=catalogue.EPILOGUE_GATE_UP)
    parts = [reference.quantised_matmul(x, dequantise(raw, kind, (ffn, inputs))) for raw in (gate, up)]
    assert _error(got, reference.silu_product(*parts)) < 1e-5  # the exponential's own error


@pytest.mark.parametrize("order", [1, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_order_of_threads_changes_nothing(variant: MatmulVariant, order: int) -> None:
    kind, outputs, inputs, rows = GgmlType.Q5_K, 36, 512, 9
    packed = repack([(raw_weights(kind, outputs, inputs), (outputs, inputs))], kind)
    x = np.random.default_rng(8).standard_normal((rows, inputs)).astype(np.float32)
    plain, other = Product(kind, packed, x), Product(kind, packed, x, Rig(emulator(order)))
    first, second = (p.run(variant, p.rig.empty((rows, outputs)), outputs) for p in (plain, other))
    assert np.array_equal(first, second)


def test_a_broken_activation_breaks_its_own_row_only() -> None:
    kind, outputs, inputs = GgmlType.Q4_0, 16, 128
    packed = repack([(raw_weights(kind, outputs, inputs), (outputs, inputs))], kind)
    rig = Rig()
    x = np.random.default_rng(9).standard_normal((3, inputs)).astype(np.float32)
    x[1, 70] = np.nan
    values, records = rig.empty((3, inputs), np.int8), rig.empty((3, inputs // 32), reference.RECORD)
    rig.run(catalogue.quantise(3), [rig.put(x), inputs, values, records])
    out = rig.empty((3, outputs))
    weight = rig.put(packed.data)
    shape = catalogue.quantised_matmul(kind, "matrix_8", 3, packed.num_tiles)
    rig.run(shape, [out, outputs, 0, weight, None, None, outputs, 1, 2, values, records, 3, 0])
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
