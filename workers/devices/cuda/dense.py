"""Prompt chunks of many rows: a quantised matrix is dequantised into scratch memory and multiplied by cuBLAS.

Owns: the scratch memory. Runs in: the worker's thread, in steps outside any graph. Source: gpu.md: from some
hundred rows on, the library's products on bfloat16 outrun ours on int8 by more than dequantising costs.

The library adds up in an order of its own, so with `--batch-invariant` none of this is used. Logits never go
this way: their rows are samples.
"""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from workers.devices.cuda.backend import Backend, DeviceArray
from workers.devices.cuda.weights import DeviceMatrix, pair_type, runs_of_one_type, stored_type
from workers.devices.interface import Limits
from workers.kernels import catalogue
from workers.model.program import DownMatmul, GateUpMatmul, Operation, OutputMatmul, Program, QkvMatmul
from workers.quant.repack import FLOAT_TYPES

DENSE_ROWS: Final = 256  # an estimate until it is measured: dequantising costs as much as some hundred rows


class _Scratch(msgspec.Struct, frozen=True):
    """Bytes of each buffer."""

    weights: int  # bfloat16, the largest matrix
    activations: int  # bfloat16
    both: int  # float32 [rows, gate and up]

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.both


def _scratch(program: Program, limits: Limits) -> _Scratch:
    weights = inputs = pairs = 0
    for operation in program.operations:
        match operation:
            case QkvMatmul():
                runs = runs_of_one_type((operation.q, operation.k, operation.v))
                shapes = [
                    (sum(part.shape[0] for part in run), run[0].shape[1])
                    for run in runs
                    if stored_type(run[0]) not in FLOAT_TYPES
                ]
            case OutputMatmul() | DownMatmul() if stored_type(operation.weight) not in FLOAT_TYPES:
                shapes = [(operation.weight.shape[0], operation.weight.shape[1])]
            case GateUpMatmul() if pair_type(operation.gate, operation.up) not in FLOAT_TYPES:
                rows = -(-operation.gate.shape[0] // 8) * 16
                shapes = [(rows, operation.gate.shape[1])]
                pairs = max(pairs, rows)
            case _:
                continue
        for outputs, size in shapes:
            weights, inputs = max(weights, outputs * size), max(inputs, size)
    return _Scratch(2 * weights, 2 * limits.max_rows * inputs, 4 * limits.max_rows * pairs)


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
        self, program: Program, limits: Limits, backend: Backend, launch: Callable[..., None]
    ) -> None:
        memory = _scratch(program, limits)
        self._backend = backend
        self._launch = launch
        self._weights = backend.allocate(memory.weights, np.uint8)
        self._activations = backend.allocate(memory.activations, np.uint8)
        self._both = backend.allocate(memory.both, np.uint8)

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
        self._launch(
            catalogue.dequantise(int(matrix.ggml_type), matrix.num_weight_rows),
            *(self._weights, matrix.data, matrix.codebook),
            *(matrix.num_weight_rows, matrix.num_tiles, matrix.num_units, matrix.num_inputs),
        )
        is_pair = epilogue == catalogue.EPILOGUE_GATE_UP
        target, width = (self._both, matrix.num_weight_rows) if is_pair else (out, stride)
        if offset:
            target = target.part(4 * offset, target.nbytes // 4 - offset, np.float32)
        if multiplies:
            self._backend.multiply(
                target,
                width,
                self._activations,
                self._weights,
                (num_rows, matrix.num_weight_rows, matrix.num_inputs),
                accumulate=epilogue == catalogue.EPILOGUE_ADD,
            )
        if is_pair:
            self._launch(
                catalogue.join_gate_up(num_rows, matrix.num_outputs),
                *(out, self._both, matrix.num_outputs, matrix.num_weight_rows),
            )
