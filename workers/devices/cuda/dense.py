"""Prompt chunks of many rows: a matrix is brought to bfloat16 and multiplied by cuBLAS.

Where the memory plan finds room, every such matrix keeps a bfloat16 copy; else it is dequantised into scratch memory
each time, which costs as much as some hundred rows do. What is bfloat16 already is taken as it is, and F32 stays with
its own kernels: who keeps such weights wants their precision.

Owns: the scratch memory and the copies. Runs in: the worker's thread, in steps outside any graph. Source: gpu.md: from some
hundred rows on, the library's products on bfloat16 outrun ours on int8 by more than dequantising costs.

The library adds up in an order of its own, so with `--batch-invariant` none of this is used. Logits never go
this way: their rows are samples.
"""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from ds4.ggml_types import GgmlType
from workers.devices.cuda.backend import Backend, DeviceArray, taken_bytes
from workers.devices.cuda.weights import DeviceMatrix, pair_type, runs_of_one_type, stored_type
from workers.devices.interface import Limits
from workers.kernels import catalogue
from workers.model.program import DownMatmul, GateUpMatmul, Operation, OutputMatmul, Program, QkvMatmul

DENSE_ROWS: Final = 256  # an estimate until it is measured: dequantising costs as much as some hundred rows


class _Scratch(msgspec.Struct, frozen=True):
    """Bytes of each buffer."""

    weights: int  # bfloat16, the largest matrix
    activations: int  # bfloat16
    both: int  # float32 [rows, gate and up]

    @property
    def total(self) -> int:
        return sum(map(taken_bytes, (self.weights, self.activations, self.both)))


def is_taken(kind: GgmlType) -> bool:
    """Whether the library multiplies weights of this type."""
    return kind is not GgmlType.F32


def _shapes(operation: Operation) -> list[tuple[int, int, GgmlType]]:
    """(outputs, inputs, type) of the matrices that the operation may multiply by the library."""
    match operation:
        case QkvMatmul():
            runs = runs_of_one_type((operation.q, operation.k, operation.v))
            return [
                (sum(part.shape[0] for part in run), run[0].shape[1], stored_type(run[0]))
                for run in runs
                if is_taken(stored_type(run[0]))
            ]
        case OutputMatmul() | DownMatmul() if is_taken(kind := stored_type(operation.weight)):
            return [(operation.weight.shape[0], operation.weight.shape[1], kind)]
        case GateUpMatmul() if is_taken(kind := pair_type(operation.gate, operation.up)):
            return [(-(-operation.gate.shape[0] // 8) * 16, operation.gate.shape[1], kind)]
    return []


def _scratch(program: Program, limits: Limits) -> _Scratch:
    weights = inputs = pairs = 0
    for operation in program.operations:
        for outputs, size, kind in _shapes(operation):
            inputs = max(inputs, size)
            if kind is not GgmlType.BF16:
                weights = max(weights, outputs * size)
            if isinstance(operation, GateUpMatmul):
                pairs = max(pairs, outputs)
    return _Scratch(2 * weights, 2 * limits.max_rows * inputs, 4 * limits.max_rows * pairs)


def copy_bytes(program: Program) -> int:
    """Device memory of bfloat16 copies of all matrices that may be multiplied by the library."""
    return sum(
        taken_bytes(2 * outputs * inputs)
        for operation in program.operations
        if may_be_dense(operation)
        for outputs, inputs, kind in _shapes(operation)
        if kind is not GgmlType.BF16
    )


def dense_bytes(program: Program, limits: Limits, *, batch_invariant: bool) -> int:
    """Device memory for dense products; none where no step is large enough or they are not allowed."""
    if batch_invariant or limits.max_rows < DENSE_ROWS:
        return 0
    return _scratch(program, limits).total


def may_be_dense(operation: Operation) -> bool:
    """Whether its product may go through the library, which adds no bias."""
    if isinstance(operation, QkvMatmul):
        return operation.q_bias is operation.k_bias is operation.v_bias is None
    return True


class DenseProducts:
    """Multiplies whole chunks. Owned by `Launches`, which lends its way to launch."""

    def __init__(
        self,
        program: Program,
        limits: Limits,
        backend: Backend,
        launch: Callable[..., None],
        *,
        keeps_copies: bool,
    ) -> None:
        memory = _scratch(program, limits)
        self._keeps_copies = keeps_copies
        self._backend = backend
        self._launch = launch
        self._weights = None if keeps_copies else backend.allocate(memory.weights, np.uint8)
        self._activations = backend.allocate(memory.activations, np.uint8)
        self._both = backend.allocate(memory.both, np.uint8)

    def with_copy(self, matrix: DeviceMatrix) -> DeviceMatrix:
        """The matrix with what it keeps for its products. Raises MemoryError."""
        if matrix.ggml_type is GgmlType.BF16:
            return msgspec.structs.replace(matrix, dense=matrix.data)
        if not self._keeps_copies or not is_taken(matrix.ggml_type):
            return matrix
        copy = self._backend.allocate((matrix.num_weight_rows, matrix.num_inputs), np.uint16)
        self._dequantise(matrix, copy)
        return msgspec.structs.replace(matrix, dense=copy)

    def _dequantise(self, matrix: DeviceMatrix, out: DeviceArray) -> None:
        self._launch(
            catalogue.dequantise(int(matrix.ggml_type), matrix.num_weight_rows),
            *(out, matrix.data, matrix.codebook),
            *(matrix.num_weight_rows, matrix.num_tiles, matrix.num_units, matrix.num_inputs),
        )

    def bring(self, floats: DeviceArray, num_rows: int, size: int) -> None:
        """Take the rows that the next products multiply, [num_rows, size] float32."""
        count = num_rows * size
        self._launch(catalogue.to_bfloat16(count), self._activations, floats, count)

    def multiply(
        self,
        matrix: DeviceMatrix,
        out: DeviceArray,
        num_rows: int,
        *,
        stride: int,
        offset: int,
        epilogue: int,
        multiplies: bool,
    ) -> None:
        """out[:, offset:] = (out +) the rows times `matrix`, or for gate and up what becomes of both.

        `multiplies` False: only what is launched, to know which kernels that takes.
        """
        weights = matrix.dense
        if weights is None:
            weights = self._weights
            assert weights is not None
            self._dequantise(matrix, weights)
        is_pair = epilogue == catalogue.EPILOGUE_GATE_UP
        target, width = (self._both, matrix.num_weight_rows) if is_pair else (out, stride)
        if offset:
            target = target.part(4 * offset, target.nbytes // 4 - offset, np.float32)
        if multiplies:
            self._backend.multiply(
                target,
                width,
                self._activations,
                weights,
                (num_rows, matrix.num_weight_rows, matrix.num_inputs),
                accumulate=epilogue == catalogue.EPILOGUE_ADD,
            )
        if is_pair:
            self._launch(
                catalogue.join_gate_up(num_rows, matrix.num_outputs),
                *(out, self._both, matrix.num_outputs, matrix.num_weight_rows),
            )
