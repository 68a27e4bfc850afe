"""The NumPy float32 device: a readable loop over the program, and the oracle for every other device.

Owns: dequantised weights, step buffers, seat state. Runs in: the worker's thread; computes inside
`submit`. Source: the operations as `workers/model/program.py` defines them.

Weights are widened to float32 once (four bytes a parameter). Every matrix product goes through
`FixedOrderMatmul` and every other operation works row by row, so a row's bits depend on nothing
but its own sequence.
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workers.devices.interface import (
    PREVIOUS_SAMPLE,
    DeviceFaultError,
    Limits,
    SeatParams,
    StepBatch,
    StepResult,
)
from workers.devices.reference.attention import PagedAttention
from workers.devices.reference.blas import set_threads
from workers.devices.reference.fixed_order import MAX_BLOCK_ROWS, FixedOrderMatmul
from workers.model.program import (
    Attention,
    DownMatmul,
    Embed,
    GateUpMatmul,
    Logits,
    Norm,
    Operation,
    OutputMatmul,
    Program,
    QkvMatmul,
    RopeAppend,
    Tensor,
)
from workers.quant.dequantise import dequantise
from workers.sampling.sampler import HostSampler

log = logging.getLogger(__name__)

_F32: Final = np.float32


class ReferenceDevice:
    """Runs a llama-family program in NumPy. One owner, the worker's thread; `submit` mutates it."""

    name = "reference"
    pipeline_depth = 0
    kv_value_bytes = 4
    kv_scale_bytes = 0

    def __init__(self, program: Program, limits: Limits, threads: int = 0) -> None:
        """`threads`: of the BLAS, in the whole process; 0 leaves its own default."""
        if threads and not set_threads(threads):
            log.warning("the number of threads of NumPy's BLAS cannot be set: --threads has no effect")
        self._limits = limits
        self._sizes = sizes = program.dimensions
        rows, samples = limits.max_rows + MAX_BLOCK_ROWS, limits.max_seats + MAX_BLOCK_ROWS
        self._qkv_size = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size
        self._hidden = np.zeros((rows, sizes.hidden_size), _F32)
        self._normed = np.zeros((rows, sizes.hidden_size), _F32)
        self._added = np.zeros((rows, sizes.hidden_size), _F32)
        self._qkv = np.zeros((rows, self._qkv_size), _F32)
        self._attn = np.zeros((rows, sizes.num_heads * sizes.head_size), _F32)
        self._gate_up = np.zeros((rows, 2 * sizes.ffn_size), _F32)
        self._act = np.zeros((rows, sizes.ffn_size), _F32)
        self._final = np.zeros((samples, sizes.hidden_size), _F32)
        self._logits = np.zeros((samples, sizes.vocab_size), _F32)
        self._attention = PagedAttention(sizes, limits)
        self._sampler = HostSampler(limits.max_seats, sizes.vocab_size)
        self._last_token = np.zeros(limits.max_seats, np.int32)
        self._result = StepResult(limits.max_seats)
        self._num_queued = 0
        self._batch = StepBatch(limits)  # of the step that runs; replaced by each submit
        self._tokens = np.zeros(limits.max_rows, np.int64)
        self._positions = np.zeros(limits.max_rows, np.int64)
        self._dense: dict[str, NDArray[np.float32]] = {}
        self._call_sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._rotations: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
        self._operations = [self._load(operation) for operation in program.operations]
        self._dense.clear()  # what is still needed lives in the operations now

    @staticmethod
    def weight_bytes(program: Program) -> int:
        """Memory that the weights would take; a tied table is kept once for each of its two uses."""
        return _F32().nbytes * sum(math.prod(tensor.shape) for tensor in program.tensors())

    # -- load --------------------------------------------------------------------------------------

    def _widen(self, tensor: Tensor) -> NDArray[np.float32]:
        """The tensor's values; a tied table is widened once."""
        if tensor.name not in self._dense:
            self._dense[tensor.name] = dequantise(tensor.data, tensor.ggml_type, tensor.shape)
        return self._dense[tensor.name]

    def _matmul(self, *tensors: Tensor) -> FixedOrderMatmul:
        """One product with the rows of all `tensors`."""
        parts = [self._widen(tensor) for tensor in tensors]
        for tensor in tensors:
            del self._dense[tensor.name]
        weight = np.ascontiguousarray(np.concatenate(parts).T)
        return FixedOrderMatmul(weight, self._limits.max_rows, self._call_sizes)

    def _load(self, operation: Operation) -> Callable[[], None]:
        """The operation as a call without arguments."""
        match operation:
            case Embed():
                return partial(self._embed, self._widen(operation.table), _F32(operation.scale))
            case Norm():
                return partial(self._norm, self._widen(operation.weight), operation.eps)
            case QkvMatmul():
                biases = [
                    np.zeros(part.shape[0], _F32) if bias is None else self._widen(bias)
                    for part, bias in (
                        (operation.q, operation.q_bias),
                        (operation.k, operation.k_bias),
                        (operation.v, operation.v_bias),
                    )
                ]
                bias = np.concatenate(biases)
                product = self._matmul(operation.q, operation.k, operation.v)
                return partial(self._qkv_matmul, product, bias if bias.any() else None)
            case RopeAppend():
                return partial(self._rope_append, operation, *self._rotation(operation))
            case Attention():
                return partial(self._attend, operation)
            case OutputMatmul():
                product = self._matmul(operation.weight)
                return partial(self._matmul_add, product, self._attn)
            case GateUpMatmul():
                product = self._matmul(operation.gate, operation.up)
                return partial(self._gate_up_matmul, product)
            case DownMatmul():
                product = self._matmul(operation.weight)
                return partial(self._matmul_add, product, self._act)
            case Logits():
                weight = self._widen(operation.norm_weight)
                # Not copied: the table of a tied head is the embedding's too.
                head = self._widen(operation.weight).T
                product = FixedOrderMatmul(head, self._limits.max_seats, self._call_sizes)
                return partial(self._logits_matmul, product, weight, operation.eps)

    def _rotation(self, rope: RopeAppend) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cos and sin of every position, [max_context_tokens, rotary_size / 2]; shared between layers."""
        key = id(rope.inverse_frequencies)
        if key not in self._rotations:
            positions = np.arange(self._limits.max_context_tokens, dtype=np.float64)
            angles = positions[:, None] * rope.inverse_frequencies.astype(np.float64)
            cos, sin = np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude
            self._rotations[key] = cos.astype(_F32), sin.astype(_F32)
        return self._rotations[key]

    # -- the Device protocol -----------------------------------------------------------------------

    def seat(self, seat: int, params: SeatParams) -> None:
        """Give `seat` to a new sequence before its first row is submitted."""
        self._sampler.seat(seat, params)

    def submit(self, batch: StepBatch) -> None:
        """Run one step."""
        assert self._num_queued == 0, "a device of depth 0 holds one step"
        started = time.perf_counter()
        self._batch = batch
        try:
            with np.errstate(all="ignore"):  # a row of NaN is reported, not warned about
                self._start()
                for operation in self._operations:
                    operation()
                self._sample()
        except MemoryError as error:
            raise DeviceFaultError(f"out of memory in a step of {batch.num_rows} rows") from error
        self._result.elapsed_s = time.perf_counter() - started
        self._num_queued = 1

    def collect(self) -> StepResult:
        """Results of the step that `submit` ran."""
        assert self._num_queued == 1, "nothing was submitted"
        self._num_queued = 0
        return self._result

    def close(self) -> None:
        """Drop weights and KV storage."""
        self._operations.clear()

    def logits(self) -> NDArray[np.float32]:
        """Logits [num_samples, vocab_size] of the latest step, valid until the next: for tests of this device."""
        return self._logits[: self._batch.num_samples]

    # -- one step ----------------------------------------------------------------------------------

    def _start(self) -> None:
        batch = self._batch
        rows = batch.num_rows
        self._positions[:rows] = batch.positions[:rows]
        tokens = self._tokens[:rows]
        tokens[:] = batch.token_ids[:rows]
        previous = tokens == PREVIOUS_SAMPLE
        if previous.any():
            lengths = np.diff(batch.sequence_starts[: batch.num_sequences + 1])
            seats = np.repeat(batch.sequence_seats[: batch.num_sequences], lengths)
            tokens[previous] = self._last_token[seats[previous]]
        self._attention.plan(batch)

    def _sample(self) -> None:
        batch, result = self._batch, self._result
        count = batch.num_samples
        seats = batch.sample_seats[:count]
        positions = batch.positions[batch.sample_rows[:count]] + 1
        self._sampler.sample(self._logits[:count], seats, positions, result)
        self._last_token[seats] = result.token_ids[:count]

    def _embed(self, table: NDArray[np.float32], scale: np.float32) -> None:
        rows = self._batch.num_rows
        np.take(table, self._tokens[:rows], axis=0, out=self._hidden[:rows], mode="clip")
        if scale != 1:
            self._hidden[:rows] *= scale

    def _normalise(
        self, x: NDArray[np.float32], weight: NDArray[np.float32], eps: float, out: NDArray[np.float32]
    ) -> None:
        """RMS norm of each row; NumPy's pairwise sum along a row has a fixed order."""
        np.multiply(x, x, out=out)
        scale = 1 / np.sqrt(out.sum(axis=1, keepdims=True) / _F32(x.shape[1]) + _F32(eps))
        np.multiply(x, scale, out=out)
        out *= weight

    def _norm(self, weight: NDArray[np.float32], eps: float) -> None:
        rows = self._batch.num_rows
        self._normalise(self._hidden[:rows], weight, eps, self._normed[:rows])

    def _qkv_matmul(self, product: FixedOrderMatmul, bias: NDArray[np.float32] | None) -> None:
        rows = self._batch.num_rows
        product(self._normed, rows, self._qkv)
        if bias is not None:
            self._qkv[:rows] += bias

    def _heads(self, first: int, count: int) -> NDArray[np.float32]:
        """A view [rows, count, head] of the step's qkv buffer."""
        rows, size = self._batch.num_rows, self._sizes.head_size
        return self._qkv[:rows].reshape(rows, -1, size)[:, first : first + count]

    def _rope_append(self, rope: RopeAppend, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        sizes, pairs = self._sizes, cos.shape[1]
        x = self._heads(0, sizes.num_heads + sizes.num_kv_heads)
        positions = self._positions[: self._batch.num_rows]
        c, s = cos[positions][:, None], sin[positions][:, None]
        if rope.interleaved:
            a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        else:
            a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        rotated = a * c - b * s
        b[...] = a * s + b * c
        a[...] = rotated
        first = sizes.num_heads
        self._attention.append(
            rope.layer,
            self._heads(first, sizes.num_kv_heads),
            self._heads(first + sizes.num_kv_heads, sizes.num_kv_heads),
        )

    def _attend(self, attention: Attention) -> None:
        rows, sizes = self._batch.num_rows, self._sizes
        out = self._attn[:rows].reshape(rows, sizes.num_heads, sizes.head_size)
        self._attention.attend(attention.layer, attention.scale, self._heads(0, sizes.num_heads), out)

    def _matmul_add(self, product: FixedOrderMatmul, x: NDArray[np.float32]) -> None:
        rows = self._batch.num_rows
        product(x, rows, self._added)
        self._hidden[:rows] += self._added[:rows]

    def _gate_up_matmul(self, product: FixedOrderMatmul) -> None:
        rows, size = self._batch.num_rows, self._sizes.ffn_size
        product(self._normed, rows, self._gate_up)
        gate, up, act = self._gate_up[:rows, :size], self._gate_up[:rows, size:], self._act[:rows]
        np.negative(gate, out=act)
        np.exp(act, out=act)
        act += 1
        np.divide(gate, act, out=act)  # silu: gate * sigmoid(gate)
        act *= up

    def _logits_matmul(self, product: FixedOrderMatmul, weight: NDArray[np.float32], eps: float) -> None:
        count = self._batch.num_samples
        if count == 0:
            return
        sampled = self._hidden[self._batch.sample_rows[:count]]
        self._normalise(sampled, weight, eps, self._final[:count])
        product(self._final, count, self._logits)
