"""Operations as records: weights shared, ordered and padded as the kernels expect."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("numba", reason="the CPU engine needs numba")

from ds4.ggml_types import BLOCK_SIZES, GgmlType
from tests.support.device_driver import small_limits
from tests.support.tiny_model import TinyShape
from tests.workers.devices.cpu.rig import distance, pair, tiny_program
from workers.devices.cpu.control import Code
from workers.devices.cpu.device import CpuDevice
from workers.devices.cpu.plan import Plan, adjacent_pairs, rotation_table
from workers.devices.cpu.target import host_target
from workers.model.program import GateUpMatmul, Operation, Program, QkvMatmul, RopeAppend, Tensor

PROMPT = [5, 9, 200, 31, 77, 12, 250, 8, 64, 3, 119]
FLOAT, INT8 = 0.004, 0.12


def plan(program: Program) -> Plan:
    return Plan(program, small_limits(max_seats=4), host_target(), 2)


def file_bytes(program: Program) -> int:
    tensors: dict[str, int] = {}
    for operation in program.operations:
        for field in operation.__struct_fields__:
            value = getattr(operation, field)
            if isinstance(value, Tensor) and len(value.shape) == 2:
                tensors[value.name] = value.data.size
    return sum(tensors.values())


@pytest.mark.parametrize(("quant", "share"), [("Q4_0", 1.0), ("Q4_1", 1.0), ("Q8_0", 1.0), ("F16", 1.0)])
def test_packed_weights_take_the_bytes_of_the_file(tmp_path: Path, quant: str, share: float) -> None:
    program = tiny_program(tmp_path, quant, TinyShape(ffn_size=256))
    # The tiny vocabulary and 32 rows of keys are padded to whole tiles.
    assert plan(program).packed_bytes <= 1.1 * share * file_bytes(program)


def test_a_tied_head_is_packed_once(tmp_path: Path) -> None:
    apart = plan(tiny_program(tmp_path, "Q8_0", TinyShape(tied_head=False))).packed_bytes
    tied = plan(tiny_program(tmp_path, "Q8_0", TinyShape(tied_head=True), seed=1)).packed_bytes
    assert tied < apart


def with_weights_of(program: Program, kind: GgmlType) -> Program:
    """The same program with zeros of this type in its matrices."""
    block, num_bytes = BLOCK_SIZES[kind]

    def changed(value: object) -> object:
        if not isinstance(value, Tensor) or len(value.shape) == 1:
            return value
        size = value.shape[0] * value.shape[1] // block * num_bytes
        return msgspec.structs.replace(value, ggml_type=int(kind), data=np.zeros(size, np.uint8))

    def with_changes(operation: Operation) -> Operation:
        fields: dict[str, Any] = {
            name: changed(getattr(operation, name)) for name in operation.__struct_fields__
        }
        return msgspec.structs.replace(operation, **fields)

    operations = tuple(map(with_changes, program.operations))
    return msgspec.structs.replace(program, operations=operations)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "IQ4_NL", "F16"])
def test_the_memory_that_weights_take_is_known_before_they_are_loaded(tmp_path: Path, kind: str) -> None:
    shape = TinyShape(
        hidden_size=256, num_heads=4, num_kv_heads=4, head_size=64, ffn_size=256, tied_head=True
    )
    program = with_weights_of(tiny_program(tmp_path, "F16", shape), GgmlType[kind])
    vectors = sum(tensor.data.size for tensor in program.tensors() if len(tensor.shape) == 1)
    assert CpuDevice.weight_bytes(program) == plan(program).packed_bytes + vectors


def test_gate_and_up_of_one_type_become_one_matrix(tmp_path: Path) -> None:
    records = plan(tiny_program(tmp_path, "Q4_1")).records
    gate_up = records[records[:, 0] == Code.GATE_UP]
    assert len(gate_up) == 2
    assert (gate_up[:, 4] == 0).all()


def test_mixed_types_in_one_layer_agree_with_the_reference(tmp_path: Path) -> None:
    low, high = tiny_program(tmp_path, "Q4_1"), tiny_program(tmp_path, "F16", seed=2)
    mixed = []
    for left, right in zip(low.operations, high.operations, strict=True):
        if isinstance(left, QkvMatmul) and isinstance(right, QkvMatmul):
            left = msgspec.structs.replace(left, k=right.k)
        if isinstance(left, GateUpMatmul) and isinstance(right, GateUpMatmul):
            left = msgspec.structs.replace(left, up=right.up)
        mixed.append(left)
    with pair(msgspec.structs.replace(low, operations=tuple(mixed))) as both:
        cpu, reference = both.logits({0: PROMPT})
        assert distance(cpu, reference) < INT8


def test_pairs_that_lie_apart_and_biases_agree_with_the_reference(tmp_path: Path) -> None:
    program = tiny_program(tmp_path, "F32")
    rng = np.random.default_rng(0)
    changed: list[Operation] = []
    for operation in program.operations:
        if isinstance(operation, QkvMatmul):
            biases = {}
            for name in "qkv":
                size = getattr(operation, name).shape[0]
                values = rng.normal(size=size).astype(np.float32)
                biases[f"{name}_bias"] = Tensor(
                    name=f"{len(changed)}.{name}.bias", ggml_type=0, shape=(size,), data=values.view(np.uint8)
                )
            operation = msgspec.structs.replace(operation, **biases)
        if isinstance(operation, RopeAppend):
            partial = operation.inverse_frequencies[:6]  # 12 of 16 dimensions turn
            operation = msgspec.structs.replace(
                operation, interleaved=False, inverse_frequencies=partial, magnitude=1.25
            )
        changed.append(operation)
    with pair(msgspec.structs.replace(program, operations=tuple(changed))) as both:
        cpu, reference = both.logits({0: PROMPT})
        assert distance(cpu, reference) < FLOAT
        cpu, reference = both.logits({0: [17]})
        assert distance(cpu, reference) < FLOAT


def test_adjacent_pairs_interleave_each_head() -> None:
    assert list(adjacent_pairs(2, 6, 4)) == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def test_the_rotation_table_turns_by_position_times_frequency() -> None:
    frequencies = np.array([1.0, 0.5], np.float32)
    rope = RopeAppend(layer=0, inverse_frequencies=frequencies, interleaved=True)
    table = rotation_table(rope, 4, 6)
    angles = np.array([3.0, 1.5])
    assert np.allclose(table[3, 0], [*np.repeat(np.cos(angles), 2), 1, 1])
    sines = np.sin(angles)
    assert np.allclose(table[3, 1], [-sines[0], sines[0], -sines[1], sines[1], 0, 0])
