"""A program as memory: packed weights, step buffers, KV pages, and the records the machine code walks.

Owns: every array the machine code touches, except the batch's. Runs in the worker process; built once by
the device. The arrays never move: the records hold their addresses.
"""

import itertools
from collections.abc import Sequence
from typing import Final, assert_never

import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError
from workers.devices.cpu.blocks import runtime_kind
from workers.devices.cpu.control import RECORD_WORDS, Code, Control
from workers.devices.cpu.formats import (
    BLOCK_INPUTS,
    FLOAT_BYTES,
    LOGITS_BLOCK,
    OUTPUT_UNIT,
    RECORD_BYTES,
    SPARE_ROWS,
    WeightKind,
    draw_bytes,
    padded_outputs,
    record_stride,
    tile_bytes,
)
from workers.devices.cpu.groups import HEAD_UNIT, RUN_PAGES, group_sizes, page_bytes
from workers.devices.cpu.packing import Matrix, Packer, Rows
from workers.devices.cpu.spec import StepSpec
from workers.devices.cpu.target import Target
from workers.devices.interface import Limits
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
from workers.sampling.summary import DRAW

_F32_BYTES: Final = 4


def _bits(value: float) -> int:
    """A float32 as the word that the machine code loads it from."""
    return int(np.float32(value).view(np.int32))


class Buffer:
    """Memory at a multiple of 64 bytes, zeroed. Owned by the plan; written by the machine code."""

    def __init__(self, num_bytes: int) -> None:
        whole = np.zeros(num_bytes + 64, np.uint8)
        skip = -whole.ctypes.data % 64
        self.data: NDArray[np.uint8] = whole[skip : skip + num_bytes]
        self.address = int(self.data.ctypes.data)

    @classmethod
    def holding(cls, values: NDArray[np.float32]) -> "Buffer":
        """A copy of float32 values."""
        buffer = cls(values.nbytes)
        buffer.data.view(np.float32)[:] = values.ravel()
        return buffer


class Plan:
    """Built once; then only the machine code writes to its buffers."""

    def __init__(self, program: Program, limits: Limits, target: Target, max_threads: int) -> None:
        self.sizes = sizes = program.dimensions
        if problem := unsupported(program):
            raise ConfigError(f"{problem}; use --device reference", setting="device")
        self._limits = limits
        self._packer = Packer(has_unsigned_dot=target.has_unsigned_dot)
        self._matrices: dict[tuple[str, ...], Matrix] = {}
        self._kept: list[Buffer] = []  # small vectors
        self._rotations: dict[bytes, int] = {}
        self._kinds: set[WeightKind] = set()
        self._table_kinds: set[WeightKind] = set()
        self._consumers = self._count_consumers(program)
        self._pair_order = self._find_pair_orders(program)
        self._quantised_attention = self._find_quantised_attention(program)

        rows, samples = limits.max_rows + SPARE_ROWS, limits.max_seats + SPARE_ROWS
        heads_size, kv_size = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
        self._keys_at = padded_outputs(heads_size)
        self._values_at = self._keys_at + padded_outputs(kv_size)
        self._qkv_size = self._values_at + padded_outputs(kv_size)
        second_size = max(heads_size, sizes.ffn_size)
        self.hidden = Buffer(rows * padded_outputs(sizes.hidden_size) * _F32_BYTES)
        self.hidden_stride = padded_outputs(sizes.hidden_size) * _F32_BYTES
        self.qkv = Buffer(rows * self._qkv_size * _F32_BYTES)
        self.qkv_stride = self._qkv_size * _F32_BYTES
        self._normed = self._records(limits.max_rows, sizes.hidden_size)
        self._second = self._records(limits.max_rows, second_size)  # attention output, then act
        self._sampled = self._records(limits.max_seats, sizes.hidden_size)
        has_floats = self._consumers["normed_floats"] or self._consumers["sampled_floats"]
        self._normed_floats = Buffer(rows * sizes.hidden_size * _F32_BYTES if has_floats else 0)
        self._sampled_floats = Buffer(samples * sizes.hidden_size * _F32_BYTES if has_floats else 0)
        act_floats = rows * sizes.ffn_size * _F32_BYTES if self._consumers["act_floats"] else 0
        self._act_floats = Buffer(act_floats)
        num_blocks = -(-sizes.vocab_size // LOGITS_BLOCK)
        self.vocab_stride = num_blocks * LOGITS_BLOCK  # whole units of outputs, too
        self._logits = Buffer(samples * self.vocab_stride * _F32_BYTES)
        self.logits: NDArray[np.float32] = self._logits.data.view(np.float32).reshape(samples, -1)
        self._maxima = Buffer(samples * num_blocks * _F32_BYTES)
        self.maxima: NDArray[np.float32] = self._maxima.data.view(np.float32).reshape(samples, -1)
        self._draws = Buffer(samples * DRAW.itemsize)
        self.draws: NDArray[np.void] = self._draws.data.view(DRAW)
        run, single = group_sizes(target, sizes.num_heads // sizes.num_kv_heads, sizes.head_size)
        pair_bytes = 2 * OUTPUT_UNIT * _F32_BYTES  # of a row's gates and ups
        drawing = draw_bytes(self.vocab_stride)
        scratch = max(run.scratch_bytes, single.scratch_bytes, rows * pair_bytes, drawing)
        self._tiles_at = -(-scratch // 64) * 64
        if target.has_tiles:
            scratch = self._tiles_at + tile_bytes(max(sizes.hidden_size, second_size) // BLOCK_INPUTS)
        self.scratch_stride = -(-scratch // 128) * 128 + 64
        self.scratch = Buffer(self.scratch_stride * max_threads)
        self.zeros = Buffer(pair_bytes)
        self.head_bytes = RUN_PAGES * page_bytes(sizes.head_size)
        self.layer_bytes = 2 * sizes.num_kv_heads * self.head_bytes
        self.run_bytes = sizes.num_layers * self.layer_bytes
        self.cache = Buffer(-(-limits.num_pages // RUN_PAGES) * self.run_bytes)

        records = [record for operation in program.operations for record in self._plan(operation)]
        self._arena = self._packer.pack()
        self._arena_address = int(self._arena.ctypes.data)
        self.records = np.zeros((len(records), RECORD_WORDS), np.int64)
        for index, record in enumerate(records):
            words = [self._word(value) for value in record]
            self.records[index, : len(words)] = words
        self.spec = StepSpec(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_size=sizes.head_size,
            kinds=tuple(sorted(int(kind) for kind in self._kinds)),
            table_kinds=tuple(sorted(int(kind) for kind in self._table_kinds)),
        )

    @property
    def packed_bytes(self) -> int:
        """Size of the weights in memory."""
        return len(self._arena)

    @staticmethod
    def _count_consumers(program: Program) -> dict[str, bool]:
        """Which form of which activations some matmul reads."""
        found = {f"{name}_{form}": False for name in ("normed", "act", "sampled") for form in _FORMS}
        for operation in program.operations:
            match operation:
                case QkvMatmul():
                    uses = [("normed", tensor) for tensor in (operation.q, operation.k, operation.v)]
                case GateUpMatmul():
                    uses = [("normed", operation.gate), ("normed", operation.up)]
                case DownMatmul():
                    uses = [("act", operation.weight)]
                case Logits():
                    uses = [("sampled", operation.weight)]
                case _:
                    uses = []
            for name, tensor in uses:
                is_float = runtime_kind(tensor.ggml_type) in FLOAT_BYTES
                found[f"{name}_{'floats' if is_float else 'records'}"] = True
        return found

    @staticmethod
    def _find_pair_orders(program: Program) -> dict[int, NDArray[np.int64]]:
        """By identity of the QKV operation: how its rows must lie for rotations of adjacent pairs."""
        sizes, orders = program.dimensions, {}
        for before, operation in itertools.pairwise(program.operations):
            if isinstance(operation, RopeAppend) and not operation.interleaved:
                assert isinstance(before, QkvMatmul)
                rotary_size = 2 * len(operation.inverse_frequencies)
                orders[id(before)] = adjacent_pairs(sizes.num_heads, sizes.head_size, rotary_size)
        return orders

    @staticmethod
    def _find_quantised_attention(program: Program) -> set[int]:
        """By identity: the attention operations whose own output product reads records, not floats.

        Not of the program as a whole: only a last layer that reads records may run on sampled rows alone.
        """
        found = set()
        for before, operation in itertools.pairwise(program.operations):
            if isinstance(operation, OutputMatmul):
                assert isinstance(before, Attention)
                if runtime_kind(operation.weight.ggml_type) not in FLOAT_BYTES:
                    found.add(id(before))
        return found

    def _records(self, num_rows: int, size: int) -> Buffer:
        blocks = size // BLOCK_INPUTS
        return Buffer(record_stride(num_rows) * blocks + (num_rows + SPARE_ROWS) * RECORD_BYTES)

    def _vector(self, values: NDArray[np.float32]) -> int:
        self._kept.append(Buffer.holding(values))
        return self._kept[-1].address

    def _tensor_vector(self, tensor: Tensor) -> int:
        return self._vector(np.ascontiguousarray(tensor.data).view(np.float32))

    def _matrix(self, segments: Sequence[Rows]) -> Matrix:
        """Planned once for each set of tensors: a tied head shares the embedding's."""
        key = tuple(name for rows in segments for name in (rows.tensor.name, str(rows.order is not None)))
        if key not in self._matrices:
            self._matrices[key] = self._packer.add(segments)
        matrix = self._matrices[key]
        self._kinds.add(matrix.kind)
        return matrix

    def _word(self, value: "int | Matrix") -> int:
        return self._arena_address + value.offset if isinstance(value, Matrix) else value

    def _plan(self, operation: Operation) -> "list[list[int | Matrix]]":
        match operation:
            case Embed():
                return [self._embed(operation)]
            case Norm():
                return [self._norm(self._tensor_vector(operation.weight), operation.eps)]
            case QkvMatmul():
                return self._qkv(operation)
            case RopeAppend():
                return [self._rope(operation)]
            case Attention():
                return self._attention(operation)
            case OutputMatmul():
                qkv = self.qkv
                return [self._residual(operation.weight, self._second, qkv.address, self.qkv_stride)]
            case GateUpMatmul():
                return [self._gate_up(operation)]
            case DownMatmul():
                stride = self.sizes.ffn_size * _F32_BYTES
                return [self._residual(operation.weight, self._second, self._act_floats.address, stride)]
            case Logits():
                return self._head(operation)
        assert_never(operation)

    def _embed(self, operation: Embed) -> "list[int | Matrix]":
        matrix = self._matrix([Rows(tensor=operation.table)])
        self._table_kinds.add(matrix.kind)
        return [Code.EMBED, 1, matrix, matrix.kind, matrix.num_blocks, _bits(operation.scale)]

    def _norm(self, weight: int, eps: float, *, sampled: bool = False) -> "list[int | Matrix]":
        name = "sampled" if sampled else "normed"
        records, floats = (
            (self._sampled, self._sampled_floats) if sampled else (self._normed, self._normed_floats)
        )
        return [
            Code.NORM,
            1,
            weight,
            self.sizes.hidden_size // BLOCK_INPUTS,
            _bits(eps),
            records.address if self._consumers[f"{name}_records"] else 0,
            floats.address if self._consumers[f"{name}_floats"] else 0,
            self.sizes.hidden_size * _F32_BYTES,
            int(sampled),
        ]

    def _matmul(
        self,
        matrix: Matrix,
        records: Buffer,
        floats: tuple[int, int],
        out: tuple[int, int],
        base: tuple[int, int, int],
        *,
        sampled: bool = False,
        last: bool = True,
    ) -> "list[int | Matrix]":
        head: list[int | Matrix] = [
            Code.MATMUL,
            int(last),
            matrix,
            matrix.kind,
            matrix.num_blocks,
            matrix.num_outputs,
        ]
        return [*head, records.address, *floats, *out, *base, int(sampled)]

    def _qkv(self, operation: QkvMatmul) -> "list[list[int | Matrix]]":
        sizes = self.sizes
        order = self._pair_order.get(id(operation))
        parts = []
        for tensor, bias, at in (
            (operation.q, operation.q_bias, 0),
            (operation.k, operation.k_bias, self._keys_at),
            (operation.v, operation.v_bias, self._values_at),
        ):
            rows_order = None if order is None or tensor is operation.v else order[: tensor.shape[0]]
            parts.append((Rows(tensor=tensor, order=rows_order), bias, at))
        base = self.zeros.address, 0, 0
        if any(bias is not None for _, bias, _ in parts):
            values = np.zeros(self._qkv_size, np.float32)
            for rows, bias, at in parts:
                if bias is not None:
                    of_segment = np.ascontiguousarray(bias.data).view(np.float32)
                    ordered = of_segment if rows.order is None else of_segment[rows.order]
                    values[at : at + len(ordered)] = ordered
            base = self._vector(values), 0, _F32_BYTES
        runs: list[tuple[list[Rows], int]] = []
        for rows, _, at in parts:
            previous = runs[-1][0][0].tensor.ggml_type if runs else -1
            if runs and runtime_kind(previous) == runtime_kind(rows.tensor.ggml_type):
                runs[-1][0].append(rows)
            else:
                runs.append(([rows], at))
        floats = self._normed_floats.address, sizes.hidden_size * _F32_BYTES
        return [
            self._matmul(
                self._matrix(segments),
                self._normed,
                floats,
                (self.qkv.address + at * _F32_BYTES, self.qkv_stride),
                (base[0] + at * base[2], base[1], base[2]),
                last=index == len(runs) - 1,
            )
            for index, (segments, at) in enumerate(runs)
        ]

    def _rope(self, operation: RopeAppend) -> "list[int | Matrix]":
        key = operation.inverse_frequencies.tobytes() + bytes(f"{operation.magnitude}", "ascii")
        if key not in self._rotations:
            table = rotation_table(operation, self._limits.max_context_tokens, self.sizes.head_size)
            self._rotations[key] = self._vector(table)
        keys_at, values_at = self._keys_at * _F32_BYTES, self._values_at * _F32_BYTES
        return [Code.ROPE, 1, self._cache_of(operation.layer), self._rotations[key], keys_at, values_at]

    def _cache_of(self, layer: int) -> int:
        return self.cache.address + layer * self.layer_bytes

    def _attention(self, operation: Attention) -> "list[list[int | Matrix]]":
        wanted = self._second.address if id(operation) in self._quantised_attention else 0
        by_head = self.sizes.head_size % BLOCK_INPUTS == 0  # else blocks straddle heads
        head: list[int | Matrix] = [
            Code.ATTENTION,
            1,
            self._cache_of(operation.layer),
            _bits(operation.scale),
        ]
        if by_head or not wanted:
            return [[*head, wanted]]
        blocks = self.sizes.num_heads * self.sizes.head_size // BLOCK_INPUTS
        return [[*head, 0], [Code.QUANTISE, 1, self.qkv.address, self.qkv_stride, blocks, wanted]]

    def _residual(
        self, weight: Tensor, records: Buffer, floats: int, float_stride: int
    ) -> "list[int | Matrix]":
        to = self.hidden.address, self.hidden_stride
        matrix = self._matrix([Rows(tensor=weight)])
        return self._matmul(matrix, records, (floats, float_stride), to, (*to, _F32_BYTES))

    def _gate_up(self, operation: GateUpMatmul) -> "list[int | Matrix]":
        sizes = self.sizes
        if operation.gate.ggml_type == operation.up.ggml_type:
            gate = self._matrix([Rows(tensor=operation.gate, other=operation.up)])
            weights: list[int | Matrix] = [gate, gate.kind, 0, 0]
        else:
            gate, up = (self._matrix([Rows(tensor=tensor)]) for tensor in (operation.gate, operation.up))
            weights = [gate, gate.kind, up, up.kind]
        return [
            Code.GATE_UP,
            1,
            *weights,
            sizes.hidden_size // BLOCK_INPUTS,
            sizes.ffn_size // OUTPUT_UNIT,
            self._normed.address,
            self._normed_floats.address,
            sizes.hidden_size * _F32_BYTES,
            self._second.address if self._consumers["act_records"] else 0,
            self._act_floats.address if self._consumers["act_floats"] else 0,
            sizes.ffn_size * _F32_BYTES,
        ]

    def _head(self, operation: Logits) -> "list[list[int | Matrix]]":
        norm = self._norm(self._tensor_vector(operation.norm_weight), operation.eps, sampled=True)
        floats = self._sampled_floats.address, self.sizes.hidden_size * _F32_BYTES
        matmul = self._matmul(
            self._matrix([Rows(tensor=operation.weight)]),
            self._sampled,
            floats,
            (self._logits.address, self.vocab_stride * _F32_BYTES),
            (self.zeros.address, 0, 0),
            sampled=True,
        )
        summary: list[int | Matrix] = [
            Code.SUMMARISE,
            1,
            self._logits.address,
            self.vocab_stride * _F32_BYTES,
            self.sizes.vocab_size,
            self._maxima.address,
            self.maxima.strides[0],
            self._draws.address,
        ]
        return [norm, matmul, summary]

    def fill(self, control: NDArray[np.int64]) -> None:
        """The words of the control block that no step changes."""
        for word, value in (
            (Control.OPERATIONS, int(self.records.ctypes.data)),
            (Control.NUM_OPERATIONS, len(self.records)),
            (Control.HIDDEN, self.hidden.address),
            (Control.HIDDEN_STRIDE, self.hidden_stride),
            (Control.QKV, self.qkv.address),
            (Control.QKV_STRIDE, self.qkv_stride),
            (Control.SCRATCH, self.scratch.address),
            (Control.SCRATCH_STRIDE, self.scratch_stride),
            (Control.TILES, self._tiles_at),
            (Control.ZEROS, self.zeros.address),
            (Control.RUN_BYTES, self.run_bytes),
            (Control.HEAD_BYTES, self.head_bytes),
            (Control.VALUES, self.sizes.num_kv_heads * self.head_bytes),
        ):
            control[word] = value


_FORMS: Final = ("records", "floats")


def unsupported(program: Program) -> str | None:
    """What of `program` the engine has no kernels for; None where it runs all of it."""
    sizes = program.dimensions
    for name, size, unit in (
        ("hidden size", sizes.hidden_size, BLOCK_INPUTS),
        ("feed-forward size", sizes.ffn_size, BLOCK_INPUTS),
        ("attention size", sizes.num_heads * sizes.head_size, BLOCK_INPUTS),
        ("head size", sizes.head_size, HEAD_UNIT),
    ):
        if size % unit:
            return f"the cpu device needs a {name} that is a multiple of {unit}, and this model has {size}"
    return None


def adjacent_pairs(num_heads: int, head_size: int, rotary_size: int) -> NDArray[np.int64]:
    """The order of rows that puts the pairs (i, i + rotary_size / 2) of each head side by side.

    Scores are sums over dimensions, so queries and keys may be stored in any order they share.
    """
    half = rotary_size // 2
    head = np.arange(head_size)
    head[:rotary_size:2], head[1:rotary_size:2] = np.arange(half), np.arange(half, rotary_size)
    return (np.arange(num_heads)[:, None] * head_size + head).ravel()


def rotation_table(operation: RopeAppend, num_positions: int, head_size: int) -> NDArray[np.float32]:
    """float32 [positions, 2, head_size]: cos, then -sin and sin in turn, for adjacent pairs."""
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * operation.inverse_frequencies
    rotary_size = 2 * angles.shape[1]
    table = np.zeros((num_positions, 2, head_size), np.float32)
    table[:, 0, rotary_size:] = 1  # dimensions past the rotary size pass unchanged
    table[:, 0, :rotary_size] = np.repeat(np.cos(angles) * operation.magnitude, 2, axis=1)
    sines = np.sin(angles) * operation.magnitude
    table[:, 1, 0:rotary_size:2], table[:, 1, 1:rotary_size:2] = -sines, sines
    return table
