"""Weights on their way to the device: packed once, in order, and the memory they take."""

import threading
from pathlib import Path

import pytest

from ds4.ggml_types import GgmlType
from tests.support.tiny_model import TinyShape
from tests.workers.devices.cuda.rig import tiny_program
from workers.devices.cuda.weights import Weights, pair_type, runs_of_one_type, stored_type, weight_bytes
from workers.devices.emulator.backend import EmulatorBackend
from workers.model.program import Embed, GateUpMatmul, Logits, Program, QkvMatmul


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return tiny_program(tmp_path, "Q4_1", TinyShape(tied_head=True))


def packing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ds4-pack")]


def test_a_table_that_is_also_the_head_is_uploaded_once(program: Program) -> None:
    backend = EmulatorBackend()
    weights = Weights(backend, program)
    embed, head = program.operations[0], program.operations[-1]
    assert isinstance(embed, Embed)
    assert isinstance(head, Logits)
    table = weights.matrix([embed.table])
    before = backend.num_allocations
    assert weights.matrix([head.weight]) is table
    assert backend.num_allocations == before
    weights.close()


def test_threads_end_with_the_load_even_if_it_stops_half_way(program: Program) -> None:
    weights = Weights(EmulatorBackend(), program)
    embed = program.operations[0]
    assert isinstance(embed, Embed)
    weights.matrix([embed.table])
    assert packing_threads()
    weights.close()
    assert not packing_threads()


def test_gate_and_up_count_as_pairs(program: Program) -> None:
    weights = Weights(EmulatorBackend(), program)
    for operation in program.operations:
        match operation:
            case Embed():
                weights.matrix([operation.table])
            case QkvMatmul():
                weights.matrix([operation.q, operation.k, operation.v])
            case GateUpMatmul():
                pair = weights.gate_up(operation.gate, operation.up)
                assert (pair.num_outputs, pair.num_weight_rows, pair.num_inputs) == (128, 256, 64)
                break
    weights.close()


def test_types_without_a_kernel_become_float16(tmp_path: Path) -> None:
    shape = TinyShape(hidden_size=256, num_heads=4, head_size=64, ffn_size=256, num_layers=1)
    program = tiny_program(tmp_path, "TQ2_0", shape)
    gate_up = next(operation for operation in program.operations if isinstance(operation, GateUpMatmul))
    assert stored_type(gate_up.gate) is GgmlType.F16
    assert pair_type(gate_up.gate, gate_up.up) is GgmlType.F16
    assert weight_bytes(program) > 2 * 2 * 256 * 256


def test_runs_are_cut_where_the_type_changes(tmp_path: Path) -> None:
    first, second = tiny_program(tmp_path, "Q8_0"), tiny_program(tmp_path, "Q4_1")
    ours = next(operation for operation in first.operations if isinstance(operation, QkvMatmul))
    theirs = next(operation for operation in second.operations if isinstance(operation, QkvMatmul))
    assert [len(run) for run in runs_of_one_type([ours.q, ours.k, theirs.v])] == [2, 1]
    assert [len(run) for run in runs_of_one_type([ours.q, theirs.k, ours.v])] == [1, 1, 1]
