"""A program as launches: what each operation becomes, in which buffers, with which grid.

Owns: weights, KV pages and step buffers on the device. Runs in: the worker's thread; `run` queues one step.
Source: `workers/model/program.py` for the operations, `workers/kernels/catalogue.py` for the kernels.

Everything here is fixed at load but a step's number of rows, so that a decode step can be captured: nothing is
allocated or copied while a step is queued. Quantised weights are multiplied with activations in int8 (few rows) or
float16 (`quantise` and `norm` make them), float weights with float ones.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workers.devices.cuda.backend import Argument, Backend, DeviceArray
from workers.devices.cuda.buffers import HALF_BYTES, SPLIT_ROWS, buffer_sizes, split_tokens
from workers.devices.cuda.dense import DenseProducts, is_taken, may_be_dense
from workers.devices.cuda.inputs import Block
from workers.devices.cuda.shapes import check_shape, read_matrices, rounds_activations
from workers.devices.cuda.weights import DeviceMatrix, Weights, runs_of_one_type, stored_type
from workers.devices.interface import PAGE_TOKENS, Limits
from workers.kernels import catalogue
from workers.kernels.sources import Kernel
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
)
from workers.quant.repack import FLOAT_TYPES

KV_VALUE_BYTES: Final = 2
_ATTENTION_BLOCKS: Final = 2048  # wanted in all of a step, to fill a large GPU

Launch = Callable[[Block], None]


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
        keeps_copies: bool,
    ) -> None:
        """`has_dense`: steps that are marked so go through cuBLAS, with copies of the weights if `keeps_copies`.

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
        memory = buffer_sizes(program, limits)
        buffers = {
            name: backend.allocate(getattr(memory, name), np.uint8) for name in memory.__struct_fields__
        }
        self._hidden, self._normed = buffers["hidden"], buffers["normed"]
        self._values, self._records = buffers["values"], buffers["records"]
        self._qkv, self._queries = buffers["qkv"], buffers["queries"]
        self._attn, self._act = buffers["attn"], buffers["act"]
        self._partials = buffers["partials"]
        self._act_values, self._act_records = buffers["act_values"], buffers["act_records"]
        self._sums, self._tickets = buffers["sums"], buffers["tickets"]
        backend.fill(self._tickets, 0)  # every product leaves them so
        self.logits = buffers["logits"]
        page = sizes.num_kv_heads * PAGE_TOKENS * sizes.head_size
        cache = [
            backend.allocate((limits.num_pages + 1) * page, np.float16) for _ in range(2 * sizes.num_layers)
        ]
        self._keys, self._cached_values = cache[0::2], cache[1::2]
        self._tables: dict[int, DeviceArray] = {}
        self._recorded: dict[Kernel, None] | None = None  # in order; not None while nothing is launched
        self._dense = None
        if has_dense:
            self._dense = DenseProducts(program, limits, backend, self._launch, keeps_copies=keeps_copies)
        self._weights = Weights(backend, program)
        try:
            self._steps: list[Launch] = [
                self._load(operation, program.operations[:index], program.operations[index + 1 :])
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

    def _load(self, operation: Operation, before: Sequence[Operation], rest: Sequence[Operation]) -> Launch:
        """The operation as launches, between those `before` and the `rest`."""
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
                return self._attention(operation, rest)
            case OutputMatmul():
                return self._output_matmul(operation)
            case DownMatmul():
                gate_up = next(earlier for earlier in reversed(before) if isinstance(earlier, GateUpMatmul))
                return self._down_matmul(operation, rounds=rounds_activations(gate_up, operation))
            case GateUpMatmul():
                down = next(later for later in rest if isinstance(later, DownMatmul))
                return self._gate_up_matmul(operation, rounds=rounds_activations(operation, down))
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
        out, values = self._norm_outputs(read_matrices(reader))
        may = may_be_dense(reader)

        def launch(block: Block) -> None:
            outputs = (self._normed, None) if may and block.is_dense else (out, values)
            self._launch(
                catalogue.norm(block.num_rows, size),
                *(self._hidden, None, weight, size, eps, *outputs, self._records),
                self._halves(block.num_rows),
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
            if may_be_dense(operation):
                matrix = self._with_copy(matrix)
            own_bias = None if bias is None else bias.part(4 * offset, matrix.num_outputs, np.float32)
            products.append((matrix, offset, own_bias))
            offset += matrix.num_outputs
        may, has_taken = may_be_dense(operation), any(is_taken(matrix.ggml_type) for matrix, _, _ in products)
        assert offset == (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size

        def launch(block: Block) -> None:
            dense = self._dense if may and block.is_dense else None
            if dense is not None and has_taken:
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

    def _attention(self, operation: Attention, rest: Sequence[Operation]) -> Launch:
        sizes, layer = self._sizes, operation.layer
        heads, kv_heads, head_size = sizes.num_heads, sizes.num_kv_heads, sizes.head_size
        reader = next(later for later in rest if isinstance(later, OutputMatmul))
        is_float = stored_type(reader.weight) in FLOAT_TYPES

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
                is_combined = not is_float and self._is_combined(block)
                out, values = (None, self._values) if is_combined else (self._attn, None)
                self._launch(
                    catalogue.combine(head_size, self._split_tokens, heads, block.num_decode),
                    *(out, self._partials, self._max_splits, block.positions),
                    *(values, self._records, self._halves(block.num_rows)),
                )
            if block.num_chunks:
                self._launch(
                    catalogue.attend_chunk(head_size, self._split_tokens, kv_heads, block.num_chunks),
                    *(self._attn, block.chunks, *cache, *rows),
                )

        return launch

    def _is_combined(self, block: Block) -> bool:
        """Whether attention's output comes as the next product takes it: steps of decode rows only."""
        sizes = self._sizes
        return (
            not block.num_chunks
            and not block.is_dense
            and catalogue.combines_as_activations(sizes.head_size, sizes.num_heads)
        )

    def _output_matmul(self, operation: OutputMatmul) -> Launch:
        matrix = self._with_copy(self._weights.matrix([operation.weight]))

        def launch(block: Block) -> None:
            rounded = (self._values, self._records)
            if not self._is_combined(block):
                rounded = self._bring(matrix, self._attn, block, catalogue.HALVES_UNSCALED)
            self._add(matrix, self._attn, rounded, block)

        return launch

    def _down_matmul(self, operation: DownMatmul, *, rounds: bool) -> Launch:
        """`rounds`: where `_gate_up_matmul` does."""
        matrix = self._with_copy(self._weights.matrix([operation.weight]))

        def launch(block: Block) -> None:
            rounded = (self._act_values, self._act_records)
            if not (rounds and self._is_small(block)):
                rounded = self._bring(matrix, self._act, block, catalogue.HALVES)
            self._add(matrix, self._act, rounded, block)

        return launch

    def _with_copy(self, matrix: DeviceMatrix) -> DeviceMatrix:
        return matrix if self._dense is None else self._dense.with_copy(matrix)

    def _is_small(self, block: Block) -> bool:
        """Whether the vector kernels multiply these rows."""
        return not block.is_dense and not self._halves(block.num_rows)

    def _bring(
        self, matrix: DeviceMatrix, source: DeviceArray, block: Block, halves: int
    ) -> tuple[DeviceArray, DeviceArray]:
        """Queue what brings rows into the form that a product with `matrix` takes. Returns values and records."""
        if self._dense is not None and block.is_dense and is_taken(matrix.ggml_type):
            self._dense.bring(source, block.num_rows, matrix.num_inputs)
        elif not matrix.is_float:
            self._launch(
                catalogue.quantise(block.num_rows),
                *(source, matrix.num_inputs, self._values, self._records),
                halves if self._halves(block.num_rows) else catalogue.INT8,
            )
        return self._values, self._records

    def _add(
        self,
        matrix: DeviceMatrix,
        floats: DeviceArray,
        rounded: tuple[DeviceArray, DeviceArray],
        block: Block,
    ) -> None:
        """Queue hidden += rows times matrix."""
        self._multiply(
            matrix,
            floats,
            self._hidden,
            block.num_rows,
            rounded=rounded,
            dense=self._dense if block.is_dense else None,
            stride=matrix.num_outputs,
            epilogue=catalogue.EPILOGUE_ADD,
        )

    def _gate_up_matmul(self, operation: GateUpMatmul, *, rounds: bool) -> Launch:
        """`rounds`: few rows become int8 for the next product in the same kernel."""
        matrix = self._with_copy(self._weights.gate_up(operation.gate, operation.up))

        def launch(block: Block) -> None:
            if rounds and self._is_small(block):
                rows = block.num_rows
                self._launch(
                    catalogue.vector_gate_up(
                        int(matrix.ggml_type), catalogue.vector_variant(rows), rows, matrix.num_outputs
                    ),
                    *(self._act_values, self._act_records, matrix.data, matrix.codebook, matrix.num_outputs),
                    *(matrix.num_tiles, matrix.num_units, self._values, self._records, rows),
                )
                return
            dense = self._dense if block.is_dense else None
            if dense is not None and is_taken(matrix.ggml_type):
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
                catalogue.norm(block.num_samples, size),
                *(self._hidden, block.sample_rows, weight, size, eps, out, values, self._records),
                self._halves(block.num_samples),
            )
            self._multiply(
                matrix, self._normed, self.logits, block.num_samples, stride=self._sizes.vocab_size
            )

        return launch

    # -- products ----------------------------------------------------------------------------------

    def _halves(self, num_rows: int) -> int:
        """What tells `quantise` and `norm` how a product of so many rows takes its activations."""
        return int(catalogue.takes_halves(num_rows, batch_invariant=self._batch_invariant))

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
        rounded: tuple[DeviceArray, DeviceArray] | None = None,
        dense: DenseProducts | None = None,
    ) -> None:
        """out[:, offset:] = rows times matrix. The rows are `floats`, or as values and records `rounded` (None: where
        they are by default), or what was brought last.
        """
        all_values, all_records = rounded or (self._values, self._records)
        kind = int(matrix.ggml_type)
        target = (out, stride, offset, matrix.data)
        if dense is not None and is_taken(matrix.ggml_type):
            multiplies = self._recorded is None
            dense.multiply(
                *(matrix, out, num_rows),
                stride=stride,
                offset=offset,
                epilogue=epilogue,
                multiplies=multiplies,
            )
            return
        if matrix.is_float:
            float_variant = catalogue.default_float_variant(num_rows, batch_invariant=self._batch_invariant)
            self._launch(
                catalogue.float_matmul(kind, float_variant, num_rows, matrix.num_weight_rows),
                *(*target, bias, matrix.num_outputs, matrix.num_weight_rows, matrix.num_inputs),
                *(floats, num_rows, epilogue),
            )
            return
        sizes = (matrix.num_outputs, matrix.num_tiles, matrix.num_units)
        if not self._halves(num_rows):
            self._launch(
                catalogue.vector_matmul(kind, catalogue.vector_variant(num_rows), num_rows, matrix.num_tiles),
                *(*target, matrix.codebook, bias, *sizes, all_values, all_records, num_rows, epilogue),
            )
            return
        splits = catalogue.matrix_splits(matrix.num_tiles, matrix.num_units)
        row_bytes = HALF_BYTES * 64 * matrix.num_units
        at_once = num_rows if splits == 1 else SPLIT_ROWS
        for first in range(0, num_rows, at_once):
            count = min(at_once, num_rows - first)
            own_out, values, scales = out, all_values, all_records
            if first:
                own_out = out.part(4 * first * stride, out.nbytes // 4 - first * stride, np.float32)
                values = values.part(first * row_bytes, count * row_bytes, np.uint8)
                scales = scales.part(4 * first, count, np.float32)
            self._launch(
                catalogue.matrix_matmul(
                    kind, catalogue.matrix_variant(count), count, matrix.num_tiles, splits
                ),
                *(own_out, stride, offset, matrix.data, matrix.codebook, bias, *sizes),
                *(values, scales, count, epilogue, self._sums, self._tickets),
            )
