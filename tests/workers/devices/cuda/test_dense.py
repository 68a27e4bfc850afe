"""Large prompt chunks through the library of matrix products: near the reference, and only where they may."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.device_driver import small_limits
from tests.support.tiny_model import TinyShape
from tests.workers.devices.cuda.rig import PROMPT, distance, needs_compiler, new_backend, pair, tiny_program
from workers.devices.cuda.dense import DENSE_ROWS, DenseProducts, _scratch, copy_bytes, dense_bytes
from workers.devices.cuda.weights import DeviceMatrix
from workers.devices.emulator.backend import EmulatorBackend
from workers.kernels import catalogue

pytestmark = needs_compiler

# Weights and activations with 8-bit mantissas: about 0.3 % a product.
DENSE = 0.06


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library's products, by the tensor's type."""
    seen: list[str] = []
    multiply = DenseProducts.multiply

    def count(self: DenseProducts, matrix: DeviceMatrix, *arguments: Any, **options: Any) -> None:
        if options["multiplies"]:
            seen.append(matrix.ggml_type.name)
        multiply(self, matrix, *arguments, **options)

    monkeypatch.setattr(DenseProducts, "multiply", count)
    return seen


@pytest.mark.parametrize(
    ("quant", "shape", "num_products"),
    [
        ("Q8_0", TinyShape(), 8),
        ("Q4_1", TinyShape(ffn_size=160, num_layers=1), 4),
        ("Q8_0", TinyShape(biases=True), 6),  # queries, keys and values with a bias go the usual way
        ("F16", TinyShape(), 8),
        ("BF16", TinyShape(biases=True), 6),
        ("F32", TinyShape(), 0),  # whose precision it would cost
    ],
)
def test_large_chunks_agree_with_the_reference(
    tmp_path: Path, products: list[str], quant: str, shape: TinyShape, num_products: int
) -> None:
    program = tiny_program(tmp_path, quant, shape)
    with pair(program, dense_rows=16) as both:
        assert distance(*both.logits({0: PROMPT, 1: PROMPT[:5]})) < DENSE
        assert len(products) == num_products
        both.logits({0: PROMPT[:3], 1: [4]})  # too small
        both.logits({0: [3], 1: [4]})
        assert len(products) == num_products


def _itself(backend: EmulatorBackend) -> EmulatorBackend:
    return backend


@pytest.mark.parametrize(
    ("quant", "shape"), [("Q8_0", TinyShape()), ("Q4_1", TinyShape(biases=True)), ("F16", TinyShape())]
)
def test_copies_that_are_kept_give_the_same_bits_and_are_made_once(
    tmp_path: Path, quant: str, shape: TinyShape
) -> None:
    program = tiny_program(tmp_path, quant, shape)
    found, allocated, launched = [], [], []
    for keeps_copies in (False, True):
        backend = EmulatorBackend()
        with pair(
            program, make_backend=partial(_itself, backend), dense_rows=16, keeps_copies=keeps_copies
        ) as both:
            allocated.append(backend._used_bytes)
            backend.synchronise()
            before = backend.num_launches
            both.driver.step({0: PROMPT, 1: PROMPT[:5]})
            launched.append(backend.num_launches - before)
            found.append(both.cuda.logits())
    assert np.array_equal(found[0], found[1])
    limits = small_limits(max_seats=8)
    scratch = _scratch(program, limits).weights
    assert allocated[1] - allocated[0] == copy_bytes(program) - scratch
    assert launched[0] - launched[1] == (6 if shape.biases else 8)  # one for each product


def test_what_is_bfloat16_already_is_neither_copied_nor_brought_to_it(tmp_path: Path) -> None:
    program = tiny_program(tmp_path, "BF16")
    assert copy_bytes(program) == 0
    assert _scratch(program, small_limits(max_seats=8)).weights == 0
    with pair(program, make_backend=EmulatorBackend, dense_rows=16, keeps_copies=True) as both:
        block = msgspec.structs.replace(both.cuda._inputs.example(16, 1), is_dense=True)
        launched = {kernel.entry for kernel in both.cuda._launches.kernels([block])}
        assert "to_bfloat16" in launched
        assert "dequantise" not in launched


def test_decode_rows_never_go_through_the_library(tmp_path: Path, products: list[str]) -> None:
    limits = small_limits(max_rows=20, max_seats=20, max_context_tokens=32)
    with pair(tiny_program(tmp_path, "Q8_0"), limits=limits, dense_rows=4) as both:
        for _ in range(2):
            both.driver.step({seat: [3 + seat] for seat in range(20)})
    assert products == []


def test_rows_that_must_not_depend_on_their_batch_are_kept_from_it(
    tmp_path: Path, products: list[str]
) -> None:
    program = tiny_program(tmp_path, "Q8_0")
    with pair(program, dense_rows=4, batch_invariant=True) as both:
        both.driver.step({0: PROMPT})
    assert products == []


def test_a_gpu_without_the_library_uses_its_own_kernels(tmp_path: Path, products: list[str]) -> None:
    class Without(EmulatorBackend):
        can_multiply = False

    with pair(tiny_program(tmp_path, "Q8_0"), make_backend=Without, dense_rows=4) as both:
        both.driver.step({0: PROMPT})
    assert products == []


def test_scratch_memory_is_planned_where_it_is_taken(tmp_path: Path) -> None:
    program = tiny_program(tmp_path, "Q8_0")
    large, small = small_limits(max_rows=DENSE_ROWS), small_limits(max_rows=DENSE_ROWS - 1)
    # Gate and up 256 x 64; down has the most inputs, 128.
    expected = 2 * 256 * 64 + 2 * DENSE_ROWS * 128 + 4 * DENSE_ROWS * 256
    assert dense_bytes(program, large, batch_invariant=False) == expected
    assert dense_bytes(program, large, batch_invariant=True) == 0
    assert dense_bytes(program, small, batch_invariant=False) == 0


def test_rounding_to_bfloat16_is_to_nearest_even() -> None:
    backend = new_backend()
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159, 1e30, 0.0, np.inf, 5e-40], np.float32)
    x, out = backend.allocate(8, np.float32), backend.allocate(8, np.uint16)
    shape = catalogue.to_bfloat16(8)
    backend.upload(values, x)
    backend.launch(shape.kernel, shape.grid, shape.block, 0, (out, x, 8))
    host = backend.pinned(8, np.uint16)
    backend.download(out, host)
    backend.synchronise()
    bits = values.view(np.uint32)
    expected = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    assert host.tolist() == expected.astype(np.uint16).tolist()


def test_gate_and_up_are_joined_in_their_packed_order() -> None:
    backend = new_backend()
    rows, ffn, width = 3, 20, 48  # the last group of eight is half padding
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, rows, 24), np.float32)
    both = np.stack([gate.reshape(rows, 3, 8), up.reshape(rows, 3, 8)], axis=2).reshape(rows, width)
    device_both, act = backend.allocate((rows, width), np.float32), backend.allocate((rows, ffn), np.float32)
    shape = catalogue.join_gate_up(rows, ffn)
    backend.upload(np.ascontiguousarray(both), device_both)
    backend.launch(shape.kernel, shape.grid, shape.block, 0, (act, device_both, ffn, width))
    host = backend.pinned((rows, ffn), np.float32)
    backend.download(act, host)
    backend.synchronise()
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(host, expected[:, :ffn], rtol=1e-5, atol=1e-6)
