"""The operations of a step: what each thread does of one record.

Owns nothing. Runs in the worker process while the engine's machine code is made. Every operation is called
by every thread with `(control, record, thread, num_threads)`; threads share out rows, outputs or (rows,
heads). The last layer is computed for the sampled rows only, once its keys and values are kept: where
`narrow` is set, an operation runs on those, moved to the front.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from workers.devices.cpu.attention import make_attention
from workers.devices.cpu.control import Control
from workers.devices.cpu.elementwise import Elementwise
from workers.devices.cpu.emit import Library, jit
from workers.devices.cpu.formats import FLOAT_BYTES, OUTPUT_UNIT, QUANTISED, RECORD_BYTES
from workers.devices.cpu.groups import RUN_PAGES, group_sizes, page_bytes, page_scales_offset
from workers.devices.cpu.memory import Memory
from workers.devices.cpu.spec import StepSpec
from workers.sampling.summary import DRAW

Jitted = Callable[..., Any]


class Kernels(msgspec.Struct, frozen=True):
    """Everything the operations call, for one spec and target."""

    spec: StepSpec
    memory: Memory
    rows: Elementwise
    matmul: Jitted  # (kind, arguments of matmul.make_matmul)
    embed: Jitted  # (kind, arguments of Elementwise.make_embed)
    draw: Jitted


def make_embed_operation(kernels: Kernels) -> Jitted:
    """Rows of the embedding table to the hidden states."""
    load, load_i32, load_f32 = kernels.memory.load_i64, kernels.memory.load_i32, kernels.memory.load_f32
    unpack = kernels.embed
    rows_at, tokens_at = 8 * Control.NUM_ROWS, 8 * Control.TOKEN_IDS
    hidden_at, hidden_stride_at = 8 * Control.HIDDEN, 8 * Control.HIDDEN_STRIDE

    @jit
    def embed(control: int, record: int, thread: int, num_threads: int) -> None:
        table, kind, num_blocks = load(record + 16), load(record + 24), load(record + 32)
        scale = load_f32(record + 40)
        num_rows, tokens = load(control + rows_at), load(control + tokens_at)
        hidden, stride = load(control + hidden_at), load(control + hidden_stride_at)
        for row in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
            token = load_i32(tokens + 4 * row)
            unpack(kind, (table, num_blocks, token, scale, hidden + row * stride))

    return embed


def make_norm_operation(kernels: Kernels) -> Jitted:
    """RMS norm to activation records, float rows, or both."""
    load, load_i32, load_f32 = kernels.memory.load_i64, kernels.memory.load_i32, kernels.memory.load_f32
    factor_of, to_records, to_floats = (
        kernels.rows.norm_factor, kernels.rows.norm_quantise, kernels.rows.norm_store,
    )  # fmt: skip
    rows_at, stride_at = 8 * Control.NUM_ROWS, 8 * Control.RECORD_STRIDE
    samples_at, sample_stride_at = 8 * Control.NUM_SAMPLES, 8 * Control.SAMPLE_RECORD_STRIDE
    sample_rows_at = 8 * Control.SAMPLE_ROWS
    hidden_at, hidden_stride_at = 8 * Control.HIDDEN, 8 * Control.HIDDEN_STRIDE
    row_bytes = RECORD_BYTES

    @jit
    def norm(control: int, record: int, thread: int, num_threads: int, narrow: bool) -> None:
        weight, num_blocks, eps = load(record + 16), load(record + 24), load_f32(record + 32)
        records, floats, float_stride = load(record + 40), load(record + 48), load(record + 56)
        sampled = load(record + 64) != 0
        few = sampled or narrow
        num_rows = load(control + (samples_at if few else rows_at))
        stride = load(control + (sample_stride_at if few else stride_at))
        sample_rows = load(control + sample_rows_at)
        hidden, hidden_stride = load(control + hidden_at), load(control + hidden_stride_at)
        for row in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
            place = load_i32(sample_rows + 4 * row) if sampled and not narrow else row
            source = hidden + place * hidden_stride
            factor = factor_of(source, num_blocks, eps)
            if records != 0:
                to_records(source, weight, factor, num_blocks, records + row_bytes * row, stride)
            if floats != 0:
                to_floats(source, weight, factor, num_blocks, floats + row * float_stride)

    return norm


def make_matmul_operation(kernels: Kernels) -> Jitted:
    """A product of activations and a packed matrix; threads share out its outputs."""
    load, multiply = kernels.memory.load_i64, kernels.matmul
    rows_at, stride_at = 8 * Control.NUM_ROWS, 8 * Control.RECORD_STRIDE
    samples_at, sample_stride_at = 8 * Control.NUM_SAMPLES, 8 * Control.SAMPLE_RECORD_STRIDE
    first_float_kind, unit = int(min(FLOAT_BYTES)), OUTPUT_UNIT
    scratch_at, scratch_stride_at = 8 * Control.SCRATCH, 8 * Control.SCRATCH_STRIDE
    tiles_at = 8 * Control.TILES

    @jit
    def matmul(control: int, record: int, thread: int, num_threads: int, narrow: bool) -> None:
        weights, kind, num_blocks = load(record + 16), load(record + 24), load(record + 32)
        num_units = load(record + 40) // unit
        out, out_stride = load(record + 72), load(record + 80)
        base, base_stride, base_step = load(record + 88), load(record + 96), load(record + 104)
        few = load(record + 112) != 0 or narrow
        num_rows = load(control + (samples_at if few else rows_at))
        if num_rows == 0:
            return
        rows = load(record + 48)
        stride = load(control + (sample_stride_at if few else stride_at))
        if kind >= first_float_kind:
            rows, stride = load(record + 56), load(record + 64)
        scratch = load(control + scratch_at) + thread * load(control + scratch_stride_at)
        first = unit * (num_units * thread // num_threads)
        last = unit * (num_units * (thread + 1) // num_threads)
        multiply(
            kind,
            (weights, num_blocks, first, last, rows, stride, num_rows, out, out_stride, base, base_stride,
             base_step, scratch + load(control + tiles_at)),
        )  # fmt: skip

    return matmul


def make_rope_operation(kernels: Kernels) -> Jitted:
    """Rotate queries and keys; keep keys and values."""
    load, load_i32 = kernels.memory.load_i64, kernels.memory.load_i32
    rotate_query = kernels.rows.rotate_query
    store_key, store_value = kernels.rows.store_key, kernels.rows.store_value
    num_heads, num_kv_heads, head_size = (
        kernels.spec.num_heads, kernels.spec.num_kv_heads, kernels.spec.head_size,
    )  # fmt: skip
    positions_at, sequences_at = 8 * Control.POSITIONS, 8 * Control.NUM_SEQUENCES
    starts_at, tables_at, table_stride_at = (
        8 * Control.SEQUENCE_STARTS, 8 * Control.PAGE_TABLES, 8 * Control.PAGE_TABLE_STRIDE,
    )  # fmt: skip
    qkv_at, qkv_stride_at, run_bytes_at = 8 * Control.QKV, 8 * Control.QKV_STRIDE, 8 * Control.RUN_BYTES
    head_bytes_at, values_from = 8 * Control.HEAD_BYTES, 8 * Control.VALUES
    rows_at = 8 * Control.NUM_ROWS
    run_pages, bytes_a_page, scales_at = RUN_PAGES, page_bytes(head_size), page_scales_offset(head_size)

    @jit
    def rope(control: int, record: int, thread: int, num_threads: int) -> None:
        cache, table = load(record + 16), load(record + 24)
        keys_at, values_at = load(record + 32), load(record + 40)
        num_rows, positions = load(control + rows_at), load(control + positions_at)
        starts, tables = load(control + starts_at), load(control + tables_at)
        table_stride, run_bytes = load(control + table_stride_at), load(control + run_bytes_at)
        qkv, stride = load(control + qkv_at), load(control + qkv_stride_at)
        head_bytes, value_offset = load(control + head_bytes_at), load(control + values_from)
        begin = num_rows * thread // num_threads
        end = num_rows * (thread + 1) // num_threads
        for sequence in range(load(control + sequences_at)):
            first = max(begin, load_i32(starts + 4 * sequence))
            last = min(end, load_i32(starts + 4 * (sequence + 1)))
            pages = tables + sequence * table_stride
            for row in range(first, last):
                position = load_i32(positions + 4 * row)
                turn = table + position * 8 * head_size
                source = qkv + row * stride
                for head in range(num_heads):
                    rotate_query(source + 4 * head * head_size, turn)
                number = load_i32(pages + 4 * (position // 16))
                page = cache + (number // run_pages) * run_bytes + (number % run_pages) * bytes_a_page
                values = page + value_offset
                key_place, key_scale = page + 4 * (position % 16), page + scales_at + 4 * (position % 16)
                value_place = values + 4 * head_size * (position % 16 // 2) + 2 * (position % 2)
                value_scale = values + scales_at + 4 * (position % 16)
                for head in range(num_kv_heads):
                    of_head, to = 4 * head * head_size, head * head_bytes
                    store_key(source + keys_at + of_head, turn, key_place + to, key_scale + to)
                    store_value(source + values_at + of_head, value_place + to, value_scale + to)

    return rope


def make_attention_operation(library: Library, kernels: Kernels) -> tuple[Jitted, Jitted]:
    """Attention of all rows, and of the sampled ones."""
    load, load_i32, load_f32 = kernels.memory.load_i64, kernels.memory.load_i32, kernels.memory.load_f32
    quantise = kernels.rows.quantise
    spec = kernels.spec
    head_size, heads_a_kv_head = spec.head_size, spec.num_heads // spec.num_kv_heads
    run_group, single_group = group_sizes(library.target, heads_a_kv_head, head_size)
    attend_single = make_attention(library, single_group)
    attend_run = make_attention(library, run_group) if run_group.num_rows > 1 else attend_single
    run_rows, group_heads = run_group.num_rows, run_group.num_heads
    num_groups, blocks_a_group = spec.num_heads // group_heads, group_heads * head_size // 32
    positions_at, sequences_at = 8 * Control.POSITIONS, 8 * Control.NUM_SEQUENCES
    starts_at, tables_at, table_stride_at = (
        8 * Control.SEQUENCE_STARTS, 8 * Control.PAGE_TABLES, 8 * Control.PAGE_TABLE_STRIDE,
    )  # fmt: skip
    qkv_at, qkv_stride_at, run_bytes_at = 8 * Control.QKV, 8 * Control.QKV_STRIDE, 8 * Control.RUN_BYTES
    head_bytes_at, values_from = 8 * Control.HEAD_BYTES, 8 * Control.VALUES
    scratch_at, scratch_stride_at = 8 * Control.SCRATCH, 8 * Control.SCRATCH_STRIDE
    record_stride_at, row_bytes = 8 * Control.RECORD_STRIDE, RECORD_BYTES
    samples_at, sample_stride_at = 8 * Control.NUM_SAMPLES, 8 * Control.SAMPLE_RECORD_STRIDE
    sample_rows_at, store = 8 * Control.SAMPLE_ROWS, kernels.memory.store_i64
    hidden_at, hidden_stride_at = 8 * Control.HIDDEN, 8 * Control.HIDDEN_STRIDE

    @jit
    def attention(control: int, record: int, thread: int, num_threads: int) -> None:
        cache, scale, records = load(record + 16), load_f32(record + 24), load(record + 32)
        positions, starts = load(control + positions_at), load(control + starts_at)
        tables, table_stride = load(control + tables_at), load(control + table_stride_at)
        run_bytes, record_stride = load(control + run_bytes_at), load(control + record_stride_at)
        qkv, stride = load(control + qkv_at), load(control + qkv_stride_at)
        head_bytes, value_offset = load(control + head_bytes_at), load(control + values_from)
        scratch = load(control + scratch_at) + thread * load(control + scratch_stride_at)
        unit = 0
        for sequence in range(load(control + sequences_at)):
            row, last = load_i32(starts + 4 * sequence), load_i32(starts + 4 * (sequence + 1))
            pages = tables + sequence * table_stride
            while row < last:
                num_rows = run_rows if row + run_rows <= last else 1
                position = load_i32(positions + 4 * row)
                for group in range(num_groups):
                    unit += 1
                    if unit % num_threads != thread:
                        continue
                    query = qkv + row * stride + 4 * group * group_heads * head_size
                    keys = cache + head_bytes * (group * group_heads // heads_a_kv_head)
                    values = keys + value_offset
                    if num_rows > 1:
                        attend_run(query, stride, pages, keys, values, run_bytes, position, scratch, scale)
                    else:
                        attend_single(query, stride, pages, keys, values, run_bytes, position, scratch, scale)
                    if records != 0:
                        to = records + group * blocks_a_group * record_stride
                        for index in range(num_rows):
                            place = to + (row + index) * row_bytes
                            quantise(query + index * stride, blocks_a_group, place, record_stride)
                row += num_rows

    @jit
    def move_to_front(control: int) -> None:
        """The sampled rows' hidden states become the first rows."""
        rows, hidden = load(control + sample_rows_at), load(control + hidden_at)
        stride = load(control + hidden_stride_at)
        for index in range(load(control + samples_at)):
            row = load_i32(rows + 4 * index)  # ascending, so no row is overwritten before it moves
            for at in range(0, stride if row != index else 0, 8):
                store(hidden + index * stride + at, load(hidden + row * stride + at))

    @jit
    def attention_of_samples(control: int, record: int, thread: int, num_threads: int) -> None:
        cache, scale, records = load(record + 16), load_f32(record + 24), load(record + 32)
        positions, starts = load(control + positions_at), load(control + starts_at)
        tables, table_stride = load(control + tables_at), load(control + table_stride_at)
        run_bytes, record_stride = load(control + run_bytes_at), load(control + sample_stride_at)
        qkv, stride = load(control + qkv_at), load(control + qkv_stride_at)
        head_bytes, value_offset = load(control + head_bytes_at), load(control + values_from)
        scratch = load(control + scratch_at) + thread * load(control + scratch_stride_at)
        rows, sequence = load(control + sample_rows_at), 0
        if thread == 0:
            move_to_front(control)
        for index in range(load(control + samples_at)):
            row = load_i32(rows + 4 * index)
            while load_i32(starts + 4 * (sequence + 1)) <= row:
                sequence += 1
            pages, position = tables + sequence * table_stride, load_i32(positions + 4 * row)
            for group in range(num_groups):
                if (index * num_groups + group) % num_threads != thread:
                    continue
                query = qkv + row * stride + 4 * group * group_heads * head_size
                keys = cache + head_bytes * (group * group_heads // heads_a_kv_head)
                values = keys + value_offset
                attend_single(query, stride, pages, keys, values, run_bytes, position, scratch, scale)
                to = records + group * blocks_a_group * record_stride + index * row_bytes
                quantise(query, blocks_a_group, to, record_stride)

    return attention, attention_of_samples


def make_quantise_operation(kernels: Kernels) -> Jitted:
    """Float rows to activation records."""
    load, to_records = kernels.memory.load_i64, kernels.rows.quantise
    rows_at, record_stride_at, row_bytes = 8 * Control.NUM_ROWS, 8 * Control.RECORD_STRIDE, RECORD_BYTES

    @jit
    def quantise(control: int, record: int, thread: int, num_threads: int) -> None:
        source, stride, num_blocks = load(record + 16), load(record + 24), load(record + 32)
        records, record_stride = load(record + 40), load(control + record_stride_at)
        num_rows = load(control + rows_at)
        for row in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
            to_records(source + row * stride, num_blocks, records + row * row_bytes, record_stride)

    return quantise


def make_summarise_operation(kernels: Kernels) -> Jitted:
    """The largest logits of blocks, and the tokens drawn."""
    load = kernels.memory.load_i64
    largest_of_blocks, draw = kernels.rows.largest_of_blocks, kernels.draw
    samples_at, record_bytes = 8 * Control.NUM_SAMPLES, DRAW.itemsize
    scratch_at, scratch_stride_at = 8 * Control.SCRATCH, 8 * Control.SCRATCH_STRIDE

    @jit
    def summarise(control: int, record: int, thread: int, num_threads: int) -> None:
        logits, stride, num_values = load(record + 16), load(record + 24), load(record + 32)
        maxima, maxima_stride = load(record + 40), load(record + 48)
        draws, num_rows = load(record + 56), load(control + samples_at)
        scratch = load(control + scratch_at) + thread * load(control + scratch_stride_at)
        for row in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
            at = logits + row * stride
            best = largest_of_blocks(at, num_values, maxima + row * maxima_stride)
            if best - best == 0:
                to = draws + row * record_bytes
                draw(at, num_values, maxima + row * maxima_stride, best, to, scratch)

    return summarise


def make_gate_up_operation(kernels: Kernels) -> Jitted:
    """Both products of the feed-forward, SiLU between them, to the activations of the third."""
    load, multiply = kernels.memory.load_i64, kernels.matmul
    to_records, to_floats = kernels.rows.silu_quantise, kernels.rows.silu_store
    rows_at, stride_at = 8 * Control.NUM_ROWS, 8 * Control.RECORD_STRIDE
    samples_at, sample_stride_at = 8 * Control.NUM_SAMPLES, 8 * Control.SAMPLE_RECORD_STRIDE
    scratch_at, scratch_stride_at = 8 * Control.SCRATCH, 8 * Control.SCRATCH_STRIDE
    zeros_at, first_float_kind = 8 * Control.ZEROS, int(min(FLOAT_BYTES))
    tiles_at = 8 * Control.TILES

    @jit
    def gate_up(control: int, record: int, thread: int, num_threads: int, narrow: bool) -> None:
        gate, gate_kind = load(record + 16), load(record + 24)
        up, up_kind = load(record + 32), load(record + 40)
        num_blocks, num_groups = load(record + 48), load(record + 56)
        records, floats, float_stride = load(record + 64), load(record + 72), load(record + 80)
        out_records, out_floats, out_stride = load(record + 88), load(record + 96), load(record + 104)
        num_rows = load(control + (samples_at if narrow else rows_at))
        stride = load(control + (sample_stride_at if narrow else stride_at))
        if num_rows == 0:
            return
        zeros = load(control + zeros_at)
        # Sixty-four values a row: thirty-two gates, then their ups.
        pairs = load(control + scratch_at) + thread * load(control + scratch_stride_at)
        tiles = pairs + load(control + tiles_at)
        rows, row_stride = records, stride
        if gate_kind >= first_float_kind:
            rows, row_stride = floats, float_stride
        up_rows, up_stride = records, stride
        if up_kind >= first_float_kind:
            up_rows, up_stride = floats, float_stride
        for group in range(num_groups * thread // num_threads, num_groups * (thread + 1) // num_threads):
            if up == 0:  # gates and ups lie interleaved in one matrix
                multiply(
                    gate_kind,
                    (gate, num_blocks, 64 * group, 64 * group + 64, rows, row_stride, num_rows,
                     pairs - 256 * group, 256, zeros, 0, 0, tiles),
                )  # fmt: skip
            else:
                first, last, to = 32 * group, 32 * group + 32, pairs - 128 * group
                multiply(
                    gate_kind,
                    (gate, num_blocks, first, last, rows, row_stride, num_rows, to, 256, zeros, 0, 0, tiles),
                )
                to += 128
                multiply(
                    up_kind,
                    (up, num_blocks, first, last, up_rows, up_stride, num_rows, to, 256, zeros, 0, 0, tiles),
                )
            if out_floats != 0:
                to_floats(pairs, num_rows, out_floats + 128 * group, out_stride)
            if out_records != 0:  # last, for it changes the pairs
                to_records(pairs, num_rows, out_records + group * stride)

    return gate_up


assert min(FLOAT_BYTES) > max(QUANTISED), "kinds are compared with the first float kind"
