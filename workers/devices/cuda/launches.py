"""A program as launches: what each operation becomes, in which buffers, with which grid.

Owns: weights, KV pages and step buffers on the device. Runs in: the worker's thread; `run` queues one step.
Source: `workers/model/program.py` for the operations, `workers/kernels/catalogue.py` for the kernels.

Everything here is fixed at load but a step's number of rows, so that a decode step can be captured: nothing is
allocated or copied while a step is queued. Quantised weights are multiplied with int8 activations
(`quantise` and `norm` make them), float weights with float ones.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError
from workers.devices.cuda.backend import Argument, Backend, DeviceArray
from workers.devices.cuda.dense import DenseProducts, dense_bytes, may_be_dense
from workers.devices.cuda.inputs import Block
from workers.devices.cuda.weights import DeviceMatrix, Weights, pair_type, runs_of_one_type, stored_type
from workers.devices.interface import PAGE_TOKENS, Limits
from workers.kernels import catalogue
from workers.kernels.sources import Kernel
from workers.model.program import (
    Attention,
    Dimensions,
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
)
from workers.quant.repack import FLOAT_TYPES, padded_inputs

KV_VALUE_BYTES: Final = 2
_RECORD_BYTES: Final = 8  # of 32 quantised activations
_LONG_CONTEXT: Final = 32_768
_ATTENTION_BLOCKS: Final = 2048  # wanted in all of a step, to fill a large GPU

Launch = Callable[[Block], None]


def split_tokens(limits: Limits) -> int:
    """How long the pieces are that attention cuts a context into: part of a row's order of sums."""
    return 128 if limits.max_context_tokens <= _LONG_CONTEXT else 256


def check_shape(sizes: Dimensions) -> None:
    """Raises ConfigError for a model that the kernels cannot run."""
    inputs = (sizes.hidden_size, sizes.num_heads * sizes.head_size, sizes.ffn_size)
    faults = []
    if sizes.head_size % 16 or sizes.head_size > 128:
        faults.append(f"heads of {sizes.head_size} (a multiple of 16 up to 128)")
    if any(size % 32 for size in inputs):
        faults.append(f"matrices with rows of {', '.join(map(str, inputs))} (multiples of 32)")
    if catalogue.chunk_rows(sizes.num_heads, sizes.num_kv_heads) == 0:
        faults.append(
            f"{sizes.num_heads} heads on {sizes.num_kv_heads} key-value heads (64 times as many at most)"
        )
    if faults:
        raise ConfigError(
            f"the GPU's kernels do not run {'; '.join(faults)}; use --device cpu or reference",
            setting="device",
        )


def has_decode_attention(sizes: Dimensions) -> bool:
    """Whether decode rows have a kernel of their own; else they are tiles of one row."""
    return sizes.num_heads // sizes.num_kv_heads <= catalogue.MAX_DECODE_GROUP


class _Size(msgspec.Struct, frozen=True):
    """Bytes of each step buffer."""

    hidden: int
    normed: int
    values: int
    records: int
    qkv: int
    queries: int
    attn: int
    act: int
    logits: int
    partials: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)


def _buffer_sizes(sizes: Dimensions, limits: Limits) -> _Size:
    rows = limits.max_rows
    heads, kv = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    widest = padded_inputs(max(sizes.hidden_size, heads, sizes.ffn_size))
    splits = -(-limits.max_context_tokens // split_tokens(limits))
    return _Size(
        hidden=4 * rows * sizes.hidden_size,
        normed=4 * rows * sizes.hidden_size,
        values=rows * widest,
        records=rows * widest // 32 * _RECORD_BYTES,
        qkv=4 * rows * (heads + 2 * kv),
        queries=2 * rows * heads,
        attn=4 * rows * heads,
        act=4 * rows * sizes.ffn_size,
        logits=4 * limits.max_seats * sizes.vocab_size,
        partials=4 * limits.max_seats * sizes.num_heads * splits * (sizes.head_size + 2),
    )


def buffer_bytes(program: Program, limits: Limits, *, batch_invariant: bool) -> int:
    """Device memory of the step buffers, rotation tables and scratch memory included."""
    tables = {
        id(operation.inverse_frequencies): len(operation.inverse_frequencies)
        for operation in program.operations
        if isinstance(operation, RopeAppend)
    }
    rotations = 8 * limits.max_context_tokens * sum(tables.values())
    scratch = dense_bytes(program, limits, batch_invariant=batch_invariant)
    return _buffer_sizes(program.dimensions, limits).total + rotations + scratch


class Launches:
    """One program on one device. Owned by its device."""

    def __init__(
        self,
        program: Program,
        limits: Limits,
        backend: Backend,
        *,
        last_tokens: DeviceArray,
        page_tables: DeviceArray,
        table_pitch: int,
        batch_invariant: bool,
        has_dense: bool,
    ) -> None:
        """`has_dense`: steps that are marked so go through cuBLAS.

        Raises ConfigError for a shape without kernels, MemoryError where memory runs out.
        """
        self._sizes = sizes = program.dimensions
        check_shape(sizes)
        self._limits = limits
        self._backend = backend
        self._batch_invariant = batch_invariant
        self._last_tokens = last_tokens
        self._page_tables = page_tables
        self._pitch = table_pitch
        self._split_tokens = split_tokens(limits)
        self._max_splits = -(-limits.max_context_tokens // self._split_tokens)
        memory = _buffer_sizes(sizes, limits)
        buffers = {
            name: backend.allocate(getattr(memory, name), np.uint8) for name in memory.__struct_fields__
        }
        self._hidden, self._normed = buffers["hidden"], buffers["normed"]
        self._values, self._records = buffers["values"], buffers["records"]
        self._qkv, self._queries = buffers["qkv"], buffers["queries"]
        self._attn, self._act = buffers["attn"], buffers["act"]
        self._partials = buffers["partials"]
        self.logits = buffers["logits"]
        page = sizes.num_kv_heads * PAGE_TOKENS * sizes.head_size
        cache = [
            backend.allocate((limits.num_pages + 1) * page, np.float16) for _ in range(2 * sizes.num_layers)
        ]
        self._keys, self._cached_values = cache[0::2], cache[1::2]
        self._tables: dict[int, DeviceArray] = {}
        self._recorded: dict[Kernel, None] | None = None  # in order; not None while nothing is launched
        self._dense = DenseProducts(program, limits, backend, self._launch) if has_dense else None
        self._weights = Weights(backend, program)
        try:
            self._steps: list[Launch] = [
                self._load(operation, program.operations[index + 1 :])
                for index, operation in enumerate(program.operations)
            ]
        finally:
            self._weights.close()

    def kernels(self, blocks: Sequence[Block]) -> list[Kernel]:
        """What steps of these sizes launch, without launching it."""
        recorded: dict[Kernel, None] = {}
        self._recorded = recorded
        for block in blocks:
            self.run(block)
        self._recorded = None
        return [*recorded, catalogue.update_pages(1).kernel]

    def run(self, block: Block) -> None:
        """Queue a step, up to the logits of its sampled rows."""
        for launch in self._steps:
            launch(block)

    def update_pages(self, count: int, entries: DeviceArray) -> None:
        """Queue the entry of new pages into the tables."""
        self._launch(catalogue.update_pages(count), self._page_tables, self._pitch, entries, count)

    def _launch(self, shape: catalogue.Shape, *arguments: Argument) -> None:
        if self._recorded is not None:
            self._recorded[shape.kernel] = None
            return
        self._backend.launch(shape.kernel, shape.grid, shape.block, shape.shared_bytes, arguments)

    # -- load --------------------------------------------------------------------------------------

    def _load(self, operation: Operation, rest: Sequence[Operation]) -> Launch:
        """The operation as launches. `rest` is what follows it."""
        match operation:
            case Embed():
                return self._embed(operation)
            case Norm():
                return self._norm(operation, rest[0])
            case QkvMatmul():
                return self._qkv_matmul(operation)
            case RopeAppend():
                attention = next(later for later in rest if isinstance(later, Attention))
                return self._rope_append(operation, attention.scale)
            case Attention():
                return self._attention(operation)
            case OutputMatmul():
                return self._matmul_add(operation, self._attn)
            case DownMatmul():
                return self._matmul_add(operation, self._act)
            case GateUpMatmul():
                return self._gate_up_matmul(operation)
            case Logits():
                return self._logits(operation)

    def _embed(self, operation: Embed) -> Launch:
        table = self._weights.matrix([operation.table])
        kind, size, scale = int(table.ggml_type), table.num_inputs, operation.scale

        def launch(block: Block) -> None:
            self._launch(
                catalogue.embed(kind, block.num_rows),
                *(self._hidden, block.tokens, block.row_seats, self._last_tokens),
                *(table.data, table.codebook, table.num_tiles, table.num_units, size, scale),
            )

        return launch

    def _norm(self, operation: Norm, reader: Operation) -> Launch:
        weight, size, eps = self._weights.vector(operation.weight), self._sizes.hidden_size, operation.eps
        out, values = self._norm_outputs(_read_matrices(reader))
        may = may_be_dense(reader)

        def launch(block: Block) -> None:
            outputs = (self._normed, None) if may and block.is_dense else (out, values)
            self._launch(
                catalogue.norm(block.num_rows),
                *(self._hidden, None, weight, size, eps, *outputs, self._records),
            )

        return launch

    def _norm_outputs(self, is_float: Sequence[bool]) -> tuple[DeviceArray | None, DeviceArray | None]:
        """Where a norm writes floats and int8, as those who read it need."""
        return self._normed if any(is_float) else None, None if all(is_float) else self._values

    def _qkv_matmul(self, operation: QkvMatmul) -> Launch:
        sizes = self._sizes
        parts = (operation.q, operation.k, operation.v)
        stride = sum(part.shape[0] for part in parts)
        biases = (operation.q_bias, operation.k_bias, operation.v_bias)
        bias = None
        if any(part is not None for part in biases):
            bias = self._weights.vector(*biases, sizes=[part.shape[0] for part in parts])
        products, offset = [], 0
        for run in runs_of_one_type(parts):
            matrix = self._weights.matrix(run)
            own_bias = None if bias is None else bias.part(4 * offset, matrix.num_outputs, np.float32)
            products.append((matrix, offset, own_bias))
            offset += matrix.num_outputs
        may, has_quantised = may_be_dense(operation), not all(matrix.is_float for matrix, _, _ in products)
        assert offset == (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size

        def launch(block: Block) -> None:
            dense = self._dense if may and block.is_dense else None
            if dense is not None and has_quantised:
                dense.bring(self._normed, block.num_rows, sizes.hidden_size)
            for matrix, start, own_bias in products:
                self._multiply(
                    matrix,
                    self._normed,
                    self._qkv,
                    block.num_rows,
                    dense=dense,
                    stride=stride,
                    offset=start,
                    bias=own_bias,
                )

        return launch

    def _rope_append(self, operation: RopeAppend, attention_scale: float) -> Launch:
        sizes, layer = self._sizes, operation.layer
        table, num_pairs = self._rotations(operation), len(operation.inverse_frequencies)
        q_scale = attention_scale * math.log2(math.e)

        def launch(block: Block) -> None:
            self._launch(
                catalogue.rope_append(block.num_rows, sizes.num_heads, sizes.num_kv_heads),
                *(self._qkv, table, block.positions, block.row_seats, self._page_tables, self._pitch),
                *(self._queries, self._keys[layer], self._cached_values[layer]),
                *(sizes.num_heads, sizes.num_kv_heads, sizes.head_size, num_pairs),
                *(int(operation.interleaved), q_scale),
            )

        return launch

    def _rotations(self, rope: RopeAppend) -> DeviceArray:
        """Cos and sin of every position, [max_context_tokens, pairs, 2]; shared between layers."""
        key = id(rope.inverse_frequencies)
        if key not in self._tables:
            positions = np.arange(self._limits.max_context_tokens, dtype=np.float64)
            angles = positions[:, None] * rope.inverse_frequencies.astype(np.float64)
            table: NDArray[np.float32] = np.stack(
                [np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude], axis=-1, dtype=np.float32
            )
            self._tables[key] = self._weights.table(table)
        return self._tables[key]

    def _attention(self, operation: Attention) -> Launch:
        sizes, layer = self._sizes, operation.layer
        heads, kv_heads, head_size = sizes.num_heads, sizes.num_kv_heads, sizes.head_size

        def launch(block: Block) -> None:
            cache = (self._queries, self._keys[layer], self._cached_values[layer])
            rows = (block.positions, block.row_seats, self._page_tables, self._pitch, heads)
            if block.num_decode:
                share = _ATTENTION_BLOCKS // (kv_heads * block.num_decode)
                blocks = min(self._max_splits, max(1, share))
                self._launch(
                    catalogue.attend_row(head_size, self._split_tokens, blocks, kv_heads, block.num_decode),
                    *(self._partials, self._max_splits, *cache, *rows),
                )
                self._launch(
                    catalogue.combine(head_size, self._split_tokens, heads, block.num_decode),
                    *(self._attn, self._partials, self._max_splits, block.positions),
                )
            if block.num_chunks:
                self._launch(
                    catalogue.attend_chunk(head_size, self._split_tokens, kv_heads, block.num_chunks),
                    *(self._attn, block.chunks, *cache, *rows),
                )

        return launch

    def _matmul_add(self, operation: OutputMatmul | DownMatmul, source: DeviceArray) -> Launch:
        matrix = self._weights.matrix([operation.weight])

        def launch(block: Block) -> None:
            dense = self._dense if block.is_dense else None
            if matrix.is_float:
                pass
            elif dense is not None:
                dense.bring(source, block.num_rows, matrix.num_inputs)
            else:
                self._launch(
                    catalogue.quantise(block.num_rows), source, matrix.num_inputs, self._values, self._records
                )
            self._multiply(
                matrix,
                source,
                self._hidden,
                block.num_rows,
                dense=dense,
                stride=matrix.num_outputs,
                epilogue=catalogue.EPILOGUE_ADD,
            )

        return launch

    def _gate_up_matmul(self, operation: GateUpMatmul) -> Launch:
        matrix = self._weights.gate_up(operation.gate, operation.up)

        def launch(block: Block) -> None:
            dense = self._dense if block.is_dense else None
            if dense is not None and not matrix.is_float:
                dense.bring(self._normed, block.num_rows, matrix.num_inputs)
            self._multiply(
                matrix,
                self._normed,
                self._act,
                block.num_rows,
                dense=dense,
                stride=matrix.num_outputs,
                epilogue=catalogue.EPILOGUE_GATE_UP,
            )

        return launch

    def _logits(self, operation: Logits) -> Launch:
        weight, size, eps = (
            self._weights.vector(operation.norm_weight),
            self._sizes.hidden_size,
            operation.eps,
        )
        matrix = self._weights.matrix([operation.weight])
        out, values = self._norm_outputs([matrix.is_float])

        def launch(block: Block) -> None:
            if block.num_samples == 0:
                return
            self._launch(
                catalogue.norm(block.num_samples),
                *(self._hidden, block.sample_rows, weight, size, eps, out, values, self._records),
            )
            self._multiply(
                matrix, self._normed, self.logits, block.num_samples, stride=self._sizes.vocab_size
            )

        return launch

    # -- products ----------------------------------------------------------------------------------

    def _multiply(
        self,
        matrix: DeviceMatrix,
        floats: DeviceArray,
        out: DeviceArray,
        num_rows: int,
        *,
        stride: int,
        offset: int = 0,
        bias: DeviceArray | None = None,
        epilogue: int = catalogue.EPILOGUE_STORE,
        dense: DenseProducts | None = None,
    ) -> None:
        """out[:, offset:] = rows times matrix. The rows are `floats`, or what was quantised or brought last."""
        kind = int(matrix.ggml_type)
        target = (out, stride, offset, matrix.data)
        if matrix.is_float:
            float_variant = catalogue.default_float_variant(num_rows, batch_invariant=self._batch_invariant)
            self._launch(
                catalogue.float_matmul(kind, float_variant, num_rows, matrix.num_weight_rows),
                *(*target, bias, matrix.num_outputs, matrix.num_weight_rows, matrix.num_inputs),
                *(floats, num_rows, epilogue),
            )
            return
        if dense is not None:
            multiplies = self._recorded is None
            dense.multiply(
                *(matrix, out, num_rows),
                stride=stride,
                offset=offset,
                epilogue=epilogue,
                multiplies=multiplies,
            )
            return
        variant = catalogue.default_variant(num_rows, batch_invariant=self._batch_invariant)
        self._launch(
            catalogue.quantised_matmul(kind, variant, num_rows, matrix.num_tiles),
            *(*target, matrix.codebook, bias, matrix.num_outputs, matrix.num_tiles, matrix.num_units),
            *(self._values, self._records, num_rows, epilogue),
        )


def _read_matrices(reader: Operation) -> list[bool]:
    """Whether each matrix that reads a norm's output is a float one."""
    match reader:
        case QkvMatmul():
            return [stored_type(part) in FLOAT_TYPES for part in (reader.q, reader.k, reader.v)]
        case GateUpMatmul():
            return [pair_type(reader.gate, reader.up) in FLOAT_TYPES]
    raise AssertionError(f"nothing is known to read a norm before {type(reader).__name__}")
