"""The matmul kernels of every instruction set, called on their own."""

import itertools

import numpy as np
import pytest

pytest.importorskip("numba", reason="the CPU engine needs numba")

from ds4.model_file import GgmlType
from tests.workers.devices.cpu.rig import Kernels, can_run
from tests.workers.devices.cpu.test_blocks import random_rows
from workers.devices.cpu import target as target_module
from workers.devices.cpu.blocks import runtime_kind
from workers.devices.cpu.elementwise import Elementwise
from workers.devices.cpu.emit import ADDRESS, V16I32, V32I16, Emitter, Library, Value
from workers.devices.cpu.formats import (
    FLOAT_BYTES,
    RECORD_BYTES,
    SUMS_BYTES,
    TILE_ROWS,
    WeightKind,
    block_bytes,
    record_stride,
    tile_bytes,
)
from workers.devices.cpu.matmul import float_kernel, quantised_kernel
from workers.devices.cpu.memory import Memory
from workers.devices.cpu.packing import Matrix, Packer, Rows
from workers.devices.cpu.target import Isa, restricted_target
from workers.devices.cpu.tiles import (
    TILE_KINDS,
    configure_kernel,
    release_kernel,
    tile_kernel,
    widen_kernel,
)
from workers.model.program import Tensor
from workers.quant.dequantise import dequantise

INPUTS, OUTPUTS = 256, 64
TYPES = {
    WeightKind.U4: GgmlType.Q4_0,
    WeightKind.U4_MIN: GgmlType.Q4_1,
    WeightKind.S8: GgmlType.Q8_0,
    WeightKind.U8_MIN: GgmlType.Q5_1,
    WeightKind.U8_HALVES: GgmlType.Q6_K,
}


def tensor_of(ggml_type: GgmlType) -> Tensor:
    rng = np.random.default_rng(3)
    if ggml_type in TYPES.values():
        raw = random_rows(ggml_type, OUTPUTS, INPUTS, seed=3)
    else:
        values = rng.normal(size=(OUTPUTS, INPUTS)).astype(np.float32)
        if ggml_type is GgmlType.F16:
            raw = values.astype(np.float16).view(np.uint8)
        elif ggml_type is GgmlType.BF16:
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            raw = values.view(np.uint8)
    return Tensor(name="w", ggml_type=int(ggml_type), shape=(OUTPUTS, INPUTS), data=raw.ravel())


def packed(tensor: Tensor, *, has_unsigned_dot: bool) -> tuple[np.ndarray, Matrix]:
    packer = Packer(has_unsigned_dot=has_unsigned_dot)
    matrix = packer.add([Rows(tensor=tensor)])
    return packer.pack(), matrix


def records_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activation records [block][row] as bytes, and the values that they mean."""
    num_rows = len(rows)
    blocks = rows.reshape(num_rows, -1, 32)
    scales = (np.abs(blocks).max(-1) / np.float32(127)).astype(np.float32)
    quants = np.rint(blocks / scales[..., None]).astype(np.int8)
    stride = record_stride(num_rows)
    memory = np.zeros(stride * blocks.shape[1] + 16 * RECORD_BYTES, np.uint8)
    for row, block in np.ndindex(scales.shape):
        record = memory[block * stride + row * RECORD_BYTES :][:RECORD_BYTES]
        whole = quants[row, block].astype(np.int32)
        record[:32] = quants[row, block].view(np.uint8)
        record[32:36].view(np.float32)[:] = scales[row, block]
        record[36:40].view(np.float32)[:] = scales[row, block] * whole.sum()
        record[40:44].view(np.int32)[:] = -8 * whole.sum()
        record[44:48].view(np.float32)[:] = scales[row, block] * whole[16:].sum()
    return memory, (quants * scales[..., None]).reshape(num_rows, -1)


def run(kernels: Kernels, name: str, tensor: Tensor, rows: np.ndarray, num_tiles: int) -> np.ndarray:
    """Out = 1 + rows @ weights.T for the first tiles, by one call."""
    kind = runtime_kind(tensor.ggml_type)
    arena, matrix = packed(tensor, has_unsigned_dot=kernels.has_unsigned_dot)
    if kind in FLOAT_BYTES:
        memory, stride = rows, rows.strides[0]
    else:
        memory, stride = records_of(rows)[0], record_stride(len(rows))
    out = np.zeros((len(rows), 16 * num_tiles), np.float32)
    base = np.ones_like(out)
    tile_bytes = matrix.num_blocks * block_bytes(kind)
    kernels.call(
        name, arena.ctypes.data, tile_bytes, matrix.num_blocks, memory.ctypes.data, stride,
        out.ctypes.data, out.strides[0], base.ctypes.data, base.strides[0],
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def activations() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(4, INPUTS)).astype(np.float32)


@pytest.mark.parametrize("isa", list(Isa))
def test_a_kernel_multiplies_rows_with_dequantised_weights(isa: Isa, activations: np.ndarray) -> None:
    target = restricted_target(isa)
    if not can_run(target):
        pytest.skip(f"this machine cannot run {isa.value}")
    library = Library(target)
    for kind in WeightKind:
        make = float_kernel if kind in FLOAT_BYTES else quantised_kernel
        make(library, kind, 2, 4)
    kernels = Kernels(library)
    for kind, name in zip(WeightKind, kernels.names, strict=True):
        tensor = tensor_of(TYPES.get(kind) or GgmlType[kind.name])
        found = run(kernels, name, tensor, activations, 2)
        meant = activations if kind in FLOAT_BYTES else records_of(activations)[1]
        weights = dequantise(tensor.data, tensor.ggml_type, tensor.shape)[:32]
        expected = 1 + meant.astype(np.float64) @ weights.T.astype(np.float64)
        # Scales of 6-bit weights are rounded to float16; everything else differs by float32 sums only.
        tolerance = 2e-3 if kind is WeightKind.U8_HALVES else 2e-5
        assert np.abs(found - expected).max() < tolerance * np.abs(expected).max(), kind.name


@pytest.mark.parametrize("kind", list(WeightKind), ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_in_every_tile_size(kind: WeightKind) -> None:
    target = next(t for t in map(restricted_target, Isa) if can_run(t))
    library = Library(target)
    make = float_kernel if kind in FLOAT_BYTES else quantised_kernel
    sizes = list(itertools.product((1, 2), (1, 2, 4)))
    for tiles, rows in sizes:
        make(library, kind, tiles, rows)
    kernels = Kernels(library)
    tensor = tensor_of(TYPES.get(kind) or GgmlType[kind.name])
    values = np.random.default_rng(5).normal(size=(4, INPUTS)).astype(np.float32)
    results = [
        run(kernels, name, tensor, np.ascontiguousarray(values[:rows]), tiles)
        for name, (tiles, rows) in zip(kernels.names, sizes, strict=True)
    ]
    for result in results:
        shared = result[0, :16]
        assert np.array_equal(shared, results[0][0])


@pytest.mark.parametrize("kind", TILE_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_inputs", [INPUTS, INPUTS - 32, 64])  # whole turns of blocks, and not
def test_a_row_has_the_same_bits_on_tile_registers(kind: WeightKind, num_inputs: int) -> None:
    target = restricted_target(Isa.AMX)
    if not can_run(target):
        pytest.skip("this machine has no tile registers that it may use")
    library = Library(target)
    quantised_kernel(library, kind, 1, TILE_ROWS)
    configure_kernel(library)
    widen_kernel(library, kind)
    tile_kernel(library, kind)
    release_kernel(library)
    kernels = Kernels(library)
    plain, configure, widen, multiply, release = kernels.names
    tensor = tensor_of(TYPES[kind])
    values = np.random.default_rng(7).normal(size=(TILE_ROWS, INPUTS)).astype(np.float32)
    values *= np.geomspace(1e-3, 1e3, TILE_ROWS, dtype=np.float32)[:, None]
    arena, _ = packed(tensor, has_unsigned_dot=True)
    records, stride, num_blocks = records_of(values)[0], record_stride(TILE_ROWS), num_inputs // 32
    expected, found = np.zeros((2, TILE_ROWS, 16), np.float32)
    base = values[:, :16].copy()
    for out, run_kernel in ((expected, "plain"), (found, "tiles")):
        places = out.ctypes.data, out.strides[0], base.ctypes.data, base.strides[0]
        if run_kernel == "plain":
            kernels.call(plain, arena.ctypes.data, 0, num_blocks, records.ctypes.data, stride, *places)
            continue
        memory = np.zeros(tile_bytes(num_blocks) + 64, np.uint8)
        scratch = -(-memory.ctypes.data // 64) * 64
        kernels.call(configure)
        kernels.call(widen, arena.ctypes.data, num_blocks, scratch + SUMS_BYTES)
        kernels.call(
            multiply, scratch + SUMS_BYTES, num_blocks, records.ctypes.data, stride, *places, scratch
        )
        kernels.call(release)
    assert np.abs(expected).max() > 1
    assert np.array_equal(found, expected)


def test_tile_registers_multiply_bytes() -> None:
    library = Library(restricted_target(Isa.AMX))
    tile_kernel(library, WeightKind.U4)
    assert "tdpbssd" in Kernels(library).assembly


@pytest.mark.parametrize(
    ("isa", "instruction"),
    [
        (Isa.AVX512_VNNI, "vpdpbusd"),
        (Isa.AVX_VNNI, "vpdpbusd"),
        (Isa.AVX2, "vpmaddubsw"),
        (Isa.NEON_DOT, "sdot"),
    ],
)
def test_the_dot_product_is_the_instruction_of_its_set(isa: Isa, instruction: str) -> None:
    library = Library(restricted_target(isa))
    quantised_kernel(library, WeightKind.S8, 1, 2)
    kernels = Kernels(library)
    # Eight dot products of four inputs for each of two rows, of 64 bytes: some are split.
    assert kernels.assembly.count(instruction) >= 16


@pytest.mark.parametrize("isa", [isa for isa in Isa if can_run(restricted_target(isa))])
def test_halves_are_widened(isa: Isa) -> None:
    library = Library(restricted_target(isa))

    @library.kernel(ADDRESS, ADDRESS)
    def widen(e: Emitter, source: Value, place: Value) -> None:
        e.store(e.load_halves(source), place, 4)

    kernels = Kernels(library)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = np.ascontiguousarray(halves[np.isfinite(halves)])
    wide = np.zeros(16, np.float32)
    for first in range(0, len(halves), 16 * 37):
        part = np.ascontiguousarray(halves[first : first + 16])
        kernels.call(kernels.names[0], part.ctypes.data, wide.ctypes.data)
        assert np.array_equal(wide, part.astype(np.float32))


@pytest.mark.parametrize("isa", [isa for isa in Isa if can_run(restricted_target(isa))])
def test_pairs_of_whole_numbers_are_multiplied_exactly(isa: Isa) -> None:
    library = Library(restricted_target(isa))

    @library.kernel(ADDRESS, ADDRESS, ADDRESS)
    def multiply(e: Emitter, left: Value, right: Value, sums: Value) -> None:
        product = e.dot_pairs(e.load(sums, V16I32), e.load(left, V32I16), e.load(right, V32I16))
        e.store(product, sums)

    kernels = Kernels(library)
    rng = np.random.default_rng(2)
    left, right = rng.integers(-23170, 23171, (2, 32)).astype(np.int16)
    left[:4], right[:4] = (32767, 0, -32767, 1), (-32767, 5, -32767, 32767)
    sums = rng.integers(-1000, 1000, 16).astype(np.int32)
    expected = sums + (left.astype(np.int32) * right).reshape(16, 2).sum(1)
    kernels.call(kernels.names[0], left.ctypes.data, right.ctypes.data, sums.ctypes.data)
    assert np.array_equal(sums, expected)


@pytest.mark.parametrize("isa", [isa for isa in Isa if can_run(restricted_target(isa))])
def test_powers_of_two_are_exact_at_zero_and_close_elsewhere(isa: Isa) -> None:
    library = Library(restricted_target(isa))

    @library.kernel(ADDRESS)
    def power(e: Emitter, place: Value) -> None:
        e.store(e.exp2(e.load_floats(place)), place, 4)

    kernels = Kernels(library)
    for first in np.linspace(0, -125, 1000):
        values = np.float32(first) - np.linspace(0, 1, 16, dtype=np.float32)
        expected = np.exp2(values.astype(np.float64))
        kernels.call(kernels.names[0], values.ctypes.data)
        assert np.abs(values / expected - 1).max() < 4e-7
    values = np.array([0, -0.0, -1e9, -np.inf, np.nan] + [0] * 11, np.float32)
    kernels.call(kernels.names[0], values.ctypes.data)
    assert list(values[:4]) == [1, 1, 2.0**-126, 2.0**-126]
    assert np.isnan(values[4])


@pytest.fixture(scope="module", params=[isa for isa in Isa if can_run(restricted_target(isa))])
def elementwise(request: pytest.FixtureRequest) -> Kernels:
    library = Library(restricted_target(request.param))
    Elementwise(library, Memory(library), 16)
    return Kernels(library)


def silu_of(
    kernels: Kernels, gates: np.ndarray, ups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of 32 as `silu_store` writes them, and the quants and scales of `silu_quantise`."""
    store, quantise = (
        next(name for name in kernels.names if f"silu_{to}_" in name) for to in ("store", "quantise")
    )
    pairs = np.concatenate([gates, ups], axis=1)
    floats, records = np.zeros_like(gates), np.zeros((len(gates), RECORD_BYTES), np.uint8)
    kernels.call(store, pairs.ctypes.data, len(gates), floats.ctypes.data, floats.strides[0])
    kernels.call(quantise, pairs.ctypes.data, len(gates), records.ctypes.data)
    scales = np.ascontiguousarray(records[:, 32:36]).view(np.float32)
    return floats, records[:, :32].view(np.int8), scales


def test_silu_is_close_for_gates_of_any_size(elementwise: Kernels) -> None:
    rng = np.random.default_rng(4)
    gates = rng.normal(0, 6, (40, 32)).astype(np.float32)
    ups = rng.normal(0, 3, (40, 32)).astype(np.float32)
    gates[1, ::2], gates[2, ::5], gates[3], gates[4], gates[5, ::3] = -1e4, -1e9, -80, -1e18, 1e4
    gates[6, :16], gates[6, 16:] = -1e4, 1e4  # these share a division
    ups[4] = 1
    wide = gates.astype(np.float64)
    expected = wide * np.exp(np.minimum(wide, 0)) / (1 + np.exp(-np.abs(wide))) * ups
    floats, quants, scales = silu_of(elementwise, gates, ups)
    # e^-gate counts as no more than 2^60, which leaves so little of a gate far below zero.
    left = np.abs(wide * ups) * 2.0**-60
    # The power of a gate is rounded in proportion to its size.
    tolerance = (4e-7 + 2.0**-24 * np.minimum(np.abs(wide), 60)) * np.abs(expected) + 1.001 * left
    assert (np.abs(floats - expected) <= tolerance).all()
    assert (np.abs(quants * scales - floats) <= 0.501 * scales).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_silu_shows_what_is_not_a_number_and_spares_other_rows(elementwise: Kernels, value: float) -> None:
    gates, ups = np.random.default_rng(4).normal(0, 6, (2, 40, 32)).astype(np.float32)
    clean = silu_of(elementwise, gates, ups)
    places = {3: 0, 17: 15, 31: 16, 32: 31}  # rows and columns of either half, in both turns
    for harmed in (gates, ups):
        values = harmed.copy()
        for row, column in places.items():
            values[row, column] = value
        found = silu_of(elementwise, *((values, ups) if harmed is gates else (gates, values)))
        for row, column in places.items():
            assert not np.isfinite(found[0][row, column])
            assert not np.isfinite(found[2][row, 0])
        for part, whole in zip(found, clean, strict=True):
            assert np.array_equal(np.delete(part, list(places), 0), np.delete(whole, list(places), 0))


@pytest.mark.parametrize(("granted", "expected"), [(True, Isa.AMX), (False, Isa.AVX512_VNNI)])
def test_tile_registers_need_the_kernels_permission(
    granted: bool, expected: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "_may_use_tiles", lambda: granted)
    features = {"amx-tile", "amx-int8", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "f16c", "fma"}
    assert target_module._best_isa("x86_64-unknown-linux-gnu", features) is expected
