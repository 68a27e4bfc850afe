"""Weights on the device: packed for the kernels, uploaded once, a few tensors of host memory at a time.

Owns: the device memory of all weights, and threads while it loads. Runs in: the worker, at load. Source:
`workers/quant/repack.py`.

Types that no kernel reads are widened to float16. So are parts that must be one matrix (gate and up)
where a file gives them different types; q, k and v may differ, each run of one type is a matrix.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import groupby
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.ggml_types import GgmlType
from workers.devices.cuda.backend import Backend, DeviceArray, taken_bytes
from workers.model.program import (
    DownMatmul,
    Embed,
    GateUpMatmul,
    Logits,
    OutputMatmul,
    Program,
    QkvMatmul,
    Tensor,
)
from workers.quant.dequantise import dequantise, row_bytes
from workers.quant.repack import (
    FLOAT_TYPES,
    PACKABLE_TYPES,
    TILE_OUTPUTS,
    PackedMatrix,
    iq2_xxs_codebook,
    repack,
    repack_gate_up,
)

_WIDE: Final = GgmlType.F16
_MAX_THREADS: Final = 8


class DeviceMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """A weight [num_outputs, num_inputs] as the kernels take it. Gate and up count as pairs."""

    ggml_type: GgmlType
    data: DeviceArray
    codebook: DeviceArray | None
    num_outputs: int
    num_weight_rows: int  # of the packed matrix: gate and up each count, with their padding
    num_inputs: int
    num_tiles: int
    num_units: int
    # bfloat16 [num_weight_rows, num_inputs], where there was memory for a copy.
    dense: DeviceArray | None = None

    @property
    def is_float(self) -> bool:
        """Whether it is multiplied with float activations rather than int8 ones."""
        return self.ggml_type in FLOAT_TYPES


def stored_type(tensor: Tensor) -> GgmlType:
    """The type it has on the device."""
    kind = GgmlType(tensor.ggml_type)
    return kind if kind in PACKABLE_TYPES else _WIDE


def runs_of_one_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors, in order, cut where the type changes."""
    return [list(run) for _, run in groupby(tensors, key=stored_type)]


def _blocks(tensor: Tensor, kind: GgmlType) -> NDArray[np.uint8]:
    """Raw blocks of `kind`: the file's own, or widened ones."""
    if tensor.ggml_type == kind:
        return tensor.data
    assert kind is _WIDE
    values = dequantise(tensor.data, tensor.ggml_type, tensor.shape)
    return values.astype(np.float16).reshape(-1).view(np.uint8)


def pair_type(gate: Tensor, up: Tensor) -> GgmlType:
    """The type of gate and up as one matrix."""
    return stored_type(gate) if stored_type(gate) == stored_type(up) else _WIDE


@cache
def _tile_bytes(kind: GgmlType, num_inputs: int) -> int:
    """Bytes of 16 packed outputs: asked of the packing itself."""
    row = np.zeros(TILE_OUTPUTS * row_bytes(kind, num_inputs), np.uint8)
    return repack([(row, (TILE_OUTPUTS, num_inputs))], kind).data.nbytes


def _matrix_bytes(kind: GgmlType, num_outputs: int, num_inputs: int) -> int:
    if kind in FLOAT_TYPES:
        return num_outputs * row_bytes(kind, num_inputs)
    return -(-num_outputs // TILE_OUTPUTS) * _tile_bytes(kind, num_inputs)


def weight_bytes(program: Program) -> int:
    """Device memory that a program's weights take. Tensors used twice count once."""
    found: dict[str, int] = {}
    for operation in program.operations:
        pair = None
        if isinstance(operation, GateUpMatmul):
            pair = pair_type(operation.gate, operation.up)
        for field in operation.__struct_fields__:
            tensor = getattr(operation, field)
            if not isinstance(tensor, Tensor):
                continue
            if len(tensor.shape) == 1:
                found[tensor.name] = 4 * tensor.shape[0]
                continue
            kind = stored_type(tensor) if pair is None else pair
            padding = TILE_OUTPUTS * row_bytes(kind, tensor.shape[1])
            found[tensor.name] = taken_bytes(_matrix_bytes(kind, *tensor.shape) + padding)
    return sum(found.values())


class _Packer:
    """Packs a program's matrices ahead of their use, a few at a time, on threads of its own.

    NumPy works without the interpreter's lock for the most part, and packing is what loading takes.
    """

    def __init__(self, jobs: Mapping[str, Callable[[], PackedMatrix]]) -> None:
        self._waiting = deque(jobs.items())
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ds4-pack")
        self._packed: dict[str, Future[PackedMatrix]] = {}
        for _ in range(threads + 1):  # so many matrices are in host memory at once
            self._start_next()

    def _start_next(self) -> None:
        if self._waiting:
            name, job = self._waiting.popleft()
            self._packed[name] = self._pool.submit(job)

    def take(self, name: str) -> PackedMatrix:
        """The matrix, which must be the next in order or one of the few after it. Once each."""
        packed = self._packed.pop(name).result()
        self._start_next()
        return packed

    def close(self) -> None:
        """End the threads."""
        self._waiting.clear()
        self._pool.shutdown(cancel_futures=True)


def _name(tensors: Sequence[Tensor]) -> str:
    return "|".join(tensor.name for tensor in tensors)


def _jobs(program: Program) -> dict[str, Callable[[], PackedMatrix]]:
    """How each matrix of a program is packed, by name, in the order of their use."""
    jobs: dict[str, Callable[[], PackedMatrix]] = {}
    for operation in program.operations:
        match operation:
            case Embed():
                runs = [[operation.table]]
            case QkvMatmul():
                runs = runs_of_one_type((operation.q, operation.k, operation.v))
            case OutputMatmul() | DownMatmul() | Logits():
                runs = [[operation.weight]]
            case GateUpMatmul():
                both = [operation.gate, operation.up]
                jobs[_name(both)] = partial(_pack_pair, operation.gate, operation.up)
                continue
            case _:
                continue
        for run in runs:
            jobs.setdefault(_name(run), partial(_pack, run))
    return jobs


def _pack(tensors: Sequence[Tensor]) -> PackedMatrix:
    kind = stored_type(tensors[0])
    return repack([(_blocks(tensor, kind), tensor.shape) for tensor in tensors], kind)


def _pack_pair(gate: Tensor, up: Tensor) -> PackedMatrix:
    kind = pair_type(gate, up)
    return repack_gate_up(_blocks(gate, kind), _blocks(up, kind), gate.shape, kind)


class Weights:
    """Uploads a program's tensors in its order; what is used twice is uploaded once. Owned by one device."""

    def __init__(self, backend: Backend, program: Program) -> None:
        self._backend = backend
        self._packer = _Packer(_jobs(program))
        self._matrices: dict[str, DeviceMatrix] = {}
        self._codebook: DeviceArray | None = None

    def close(self) -> None:
        """Everything is loaded, or nothing will be: end the threads."""
        self._packer.close()

    def _upload(self, host: NDArray[np.generic]) -> DeviceArray:
        array = self._backend.allocate(host.nbytes, np.uint8)
        self._backend.upload(np.ascontiguousarray(host).reshape(-1).view(np.uint8), array)
        return array

    def vector(self, *tensors: Tensor | None, sizes: Sequence[int] = ()) -> DeviceArray:
        """Float32 values one after the other; `sizes` says how many zeros stand for one that is not there."""
        parts = [
            np.zeros(sizes[index], np.float32)
            if tensor is None
            else dequantise(tensor.data, tensor.ggml_type, tensor.shape)
            for index, tensor in enumerate(tensors)
        ]
        return self._upload(np.concatenate(parts))

    def table(self, values: NDArray[np.float32]) -> DeviceArray:
        """Values as they are."""
        return self._upload(values)

    def matrix(self, tensors: Sequence[Tensor]) -> DeviceMatrix:
        """All outputs of tensors of one type, as one matrix."""
        name = _name(tensors)
        if name not in self._matrices:
            packed = self._packer.take(name)
            self._matrices[name] = self._device_matrix(packed, packed.num_outputs)
        return self._matrices[name]

    def gate_up(self, gate: Tensor, up: Tensor) -> DeviceMatrix:
        """Both as one matrix whose tiles hold eight outputs of each."""
        return self._device_matrix(self._packer.take(_name([gate, up])), gate.shape[0])

    def _device_matrix(self, packed: PackedMatrix, num_outputs: int) -> DeviceMatrix:
        codebook = None
        if packed.ggml_type is GgmlType.IQ2_XXS:
            if self._codebook is None:
                self._codebook = self._upload(iq2_xxs_codebook())
            codebook = self._codebook
        return DeviceMatrix(
            ggml_type=packed.ggml_type,
            data=self._upload(packed.data),
            codebook=codebook,
            num_outputs=num_outputs,
            num_weight_rows=packed.num_outputs,
            num_inputs=packed.num_inputs,
            num_tiles=packed.num_tiles,
            num_units=packed.num_units,
        )
