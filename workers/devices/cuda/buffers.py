"""The buffers of a step: what each holds for a program and its limits.

Owns: the arithmetic. Runs in: the worker, at load, for the memory plan and for `launches`, which allocates them.
"""

from typing import Final

import msgspec

from workers.devices.cuda.backend import taken_bytes
from workers.devices.cuda.dense import dense_bytes
from workers.devices.cuda.weights import runs_of_one_type
from workers.devices.interface import Limits
from workers.kernels import catalogue
from workers.model.program import (
    DownMatmul,
    GateUpMatmul,
    Logits,
    OutputMatmul,
    Program,
    QkvMatmul,
    RopeAppend,
)
from workers.quant.repack import padded_inputs

HALF_BYTES: Final = 2
# Of a product that is split by inputs: more are done in turn, to bound the scratch memory.
SPLIT_ROWS: Final = 128
_RECORD_BYTES: Final = 8  # of 32 quantised activations
_LONG_CONTEXT: Final = 32_768


def split_tokens(limits: Limits) -> int:
    """How long the pieces are that attention cuts a context into: part of a row's order of sums."""
    return 128 if limits.max_context_tokens <= _LONG_CONTEXT else 256


class BufferSizes(msgspec.Struct, frozen=True):
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
    act_values: int  # of few rows, from gate and up to down
    act_records: int
    sums: int  # of split products, before they are joined
    tickets: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(taken_bytes(getattr(self, name)) for name in self.__struct_fields__)


def _tile_shapes(program: Program) -> set[tuple[int, int]]:
    """(tiles of 16 outputs, units of 64 inputs) of every product."""
    shapes: set[tuple[int, int]] = set()
    for operation in program.operations:
        match operation:
            case QkvMatmul():
                runs = runs_of_one_type((operation.q, operation.k, operation.v))
                found = [(sum(part.shape[0] for part in run), run[0].shape[1]) for run in runs]
            case OutputMatmul() | DownMatmul() | Logits():
                found = [(operation.weight.shape[0], operation.weight.shape[1])]
            case GateUpMatmul():
                found = [(-(-operation.gate.shape[0] // 8) * 16, operation.gate.shape[1])]
            case _:
                continue
        shapes |= {(-(-outputs // 16), padded_inputs(inputs) // 64) for outputs, inputs in found}
    return shapes


def buffer_sizes(program: Program, limits: Limits) -> BufferSizes:
    """For steps within `limits`."""
    sizes, rows = program.dimensions, limits.max_rows
    split_rows = min(rows, SPLIT_ROWS)
    split = [
        (tiles, count)
        for tiles, units in _tile_shapes(program)
        if (count := catalogue.matrix_splits(tiles, units)) > 1
    ]
    heads, kv = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    widest = padded_inputs(max(sizes.hidden_size, heads, sizes.ffn_size))
    splits = -(-limits.max_context_tokens // split_tokens(limits))
    return BufferSizes(
        hidden=4 * rows * sizes.hidden_size,
        normed=4 * rows * sizes.hidden_size,
        values=HALF_BYTES * rows * widest,
        records=rows * widest // 32 * _RECORD_BYTES,
        qkv=4 * rows * (heads + 2 * kv),
        queries=2 * rows * heads,
        attn=4 * rows * heads,
        act=4 * rows * sizes.ffn_size,
        logits=4 * limits.max_seats * sizes.vocab_size,
        partials=4 * limits.max_seats * sizes.num_heads * splits * (sizes.head_size + 2),
        act_values=catalogue.VECTOR_ROWS * padded_inputs(sizes.ffn_size),
        act_records=catalogue.VECTOR_ROWS * padded_inputs(sizes.ffn_size) // 32 * _RECORD_BYTES,
        sums=4 * split_rows * max((16 * tiles * count for tiles, count in split), default=0),
        tickets=4 * max((catalogue.num_tickets(tiles, split_rows) for tiles, _ in split), default=0),
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
    return buffer_sizes(program, limits).total + rotations + scratch
