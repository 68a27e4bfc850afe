"""Which kernel does what, with which grid: the launch shapes that the device and the tests share.

What may be a step's every row is counted by a grid's first dimension: the others end at 65,535.

Owns: nothing; functions of sizes. Runs in: the worker, when a step's launches are laid out. Source: the
comments at the top of the `.cu` files, which say what each grid means and in which order the
parameters come.
"""

from typing import Final, Literal

import msgspec

from workers.kernels.sources import Kernel

TILE_OUTPUTS: Final = 16

EPILOGUE_STORE: Final = 0  # out = product (+ bias)
EPILOGUE_ADD: Final = 1  # out += product
EPILOGUE_GATE_UP: Final = 2  # out = silu(gate) * up

VectorVariant = Literal["vector_1", "vector_2"]
MatrixVariant = Literal["matrix_8", "matrix_16", "matrix_32", "matrix_64"]
MatmulVariant = VectorVariant | MatrixVariant
_VECTOR_ROWS: Final[dict[VectorVariant, int]] = {"vector_1": 1, "vector_2": 2}
_GATE_UP: Final[dict[VectorVariant, str]] = {"vector_1": "vector_gate_up_1", "vector_2": "vector_gate_up_2"}
_MATRIX_ROWS: Final[dict[MatrixVariant, int]] = {
    "matrix_8": 8,
    "matrix_16": 16,
    "matrix_32": 32,
    "matrix_64": 64,
}
_MATRIX_TILES: Final = 8  # of a block
_MATRIX_BLOCKS: Final = 192  # wanted of a product, to fill a large GPU: narrow matrices are split by inputs
_MAX_SPLITS: Final = 8
_MIN_SPLIT_UNITS: Final = 8  # of 64 inputs
# Up to here the vector kernels are the default: at more the matrix kernels take fewer instructions.
VECTOR_ROWS: Final = 2


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel with everything of its launch but the arguments."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int = 0


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def embed(ggml_type: int, num_rows: int) -> Shape:
    """Arguments: hidden, tokens, row_seats, last_tokens, table, codebook, num_tiles, num_units, size, scale."""
    kernel = Kernel(source="embedding.cu", entry="embed", defines=(("FORMAT", ggml_type),))
    return Shape(kernel=kernel, grid=(num_rows, 1, 1), block=128)


def dequantise(ggml_type: int, num_outputs: int) -> Shape:
    """Arguments: out, weight, codebook, num_outputs, num_tiles, num_units, size."""
    kernel = Kernel(source="embedding.cu", entry="dequantise", defines=(("FORMAT", ggml_type),))
    return Shape(kernel=kernel, grid=(_ceil(num_outputs, TILE_OUTPUTS), 1, 1), block=128)


def quantise(num_rows: int) -> Shape:
    """Arguments: x, size, values, records (of halves: row scales), halves."""
    return Shape(kernel=Kernel(source="quantise.cu", entry="quantise"), grid=(num_rows, 1, 1), block=256)


def norm(num_rows: int, size: int) -> Shape:
    """Arguments: hidden, rows (or None), weight, size, eps, out (or None), values (or None), records, halves."""
    block = min(1024, 32 * _ceil(size, 128))
    return Shape(kernel=Kernel(source="quantise.cu", entry="rms_norm"), grid=(num_rows, 1, 1), block=block)


def takes_halves(num_rows: int, *, batch_invariant: bool) -> bool:
    """Whether the default kernel for this many rows takes activations as float16, rather than int8."""
    return num_rows > VECTOR_ROWS or batch_invariant


# How `quantise`, `norm` and `combine` write activations.
INT8: Final = 0
HALVES: Final = 1  # float16 with a scale a row
HALVES_UNSCALED: Final = 2  # float16 with scale 1, of rows that are known to fit


def vector_variant(num_rows: int) -> VectorVariant:
    """The kernel for this many rows. All give the same bits."""
    return "vector_1" if num_rows == 1 else "vector_2"


def matrix_variant(num_rows: int) -> MatrixVariant:
    """The kernel for this many rows. All give the same bits."""
    if num_rows <= 8:
        return "matrix_8"
    return "matrix_16" if num_rows <= 16 else "matrix_32" if num_rows <= 32 else "matrix_64"


def vector_matmul(ggml_type: int, variant: VectorVariant, num_rows: int, num_tiles: int) -> Shape:
    """Arguments: out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units,
    values, records, num_rows, epilogue. `num_outputs` counts what is written: for gate and up, pairs.
    """
    return Shape(
        kernel=Kernel(source="quantised_vector.cu", entry=variant, defines=(("FORMAT", ggml_type),)),
        grid=(num_tiles, _ceil(num_rows, _VECTOR_ROWS[variant]), 1),
        block=256,
    )


def vector_gate_up(ggml_type: int, variant: VectorVariant, num_rows: int, ffn_size: int) -> Shape:
    """Arguments: act_values, act_records, weight, codebook, num_outputs (pairs), num_tiles, num_units, values, records,
    num_rows.
    """
    kernel = Kernel(source="quantised_vector.cu", entry=_GATE_UP[variant], defines=(("FORMAT", ggml_type),))
    grid = (_ceil(ffn_size, 64) * 2, _ceil(num_rows, _VECTOR_ROWS[variant]), 1)
    return Shape(kernel=kernel, grid=grid, block=128)


def matrix_splits(num_tiles: int, num_units: int) -> int:
    """Into how many parts the inputs of a matrix are cut for the matrix kernels: part of the order of its sums."""
    wanted = _MATRIX_BLOCKS // _ceil(num_tiles, _MATRIX_TILES)
    return max(1, min(wanted, _MAX_SPLITS, num_units // (2 * _MIN_SPLIT_UNITS)))


def num_tickets(num_tiles: int, num_rows: int) -> int:
    """How many blocks of the matrix kernels join their splits, at most."""
    return _ceil(num_tiles, _MATRIX_TILES) * _ceil(num_rows, _MATRIX_ROWS["matrix_8"])


def matrix_matmul(
    ggml_type: int, variant: MatrixVariant, num_rows: int, num_tiles: int, num_splits: int
) -> Shape:
    """Arguments: out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units,
    values, row_scales, num_rows, epilogue, scratch, tickets. The last two may be None for one split.
    """
    return Shape(
        kernel=Kernel(source="quantised_matrix.cu", entry=variant, defines=(("FORMAT", ggml_type),)),
        grid=(_ceil(num_tiles, _MATRIX_TILES), _ceil(num_rows, _MATRIX_ROWS[variant]), num_splits),
        block=256,
    )


FloatVariant = Literal["float_vector_1", "float_vector_4", "float_matrix"]
_FLOAT_BLOCKS: Final[dict[FloatVariant, tuple[int, int, int]]] = {  # rows, outputs, threads
    "float_vector_1": (1, 16, 256),
    "float_vector_4": (4, 16, 256),
    "float_matrix": (32, 64, 128),
}


def default_float_variant(num_rows: int, *, batch_invariant: bool) -> FloatVariant:
    """The kernel for this many rows. The two vector kernels give the same bits, the matrix kernel others."""
    if num_rows == 1:
        return "float_vector_1"
    return "float_vector_4" if num_rows <= 8 or batch_invariant else "float_matrix"


def float_matmul(ggml_type: int, variant: FloatVariant, num_rows: int, num_weight_rows: int) -> Shape:
    """Arguments: out, out_stride, out_offset, weight, bias, num_outputs, num_weight_rows, num_inputs, x, num_rows,
    epilogue. `num_weight_rows` are those of the packed matrix: for gate and up, twice ffn padded to 8.
    """
    rows, outputs, threads = _FLOAT_BLOCKS[variant]
    return Shape(
        kernel=Kernel(source="float_matmul.cu", entry=variant, defines=(("FORMAT", ggml_type),)),
        grid=(_ceil(num_weight_rows, outputs), _ceil(num_rows, rows), 1),
        block=threads,
    )


def rope_append(num_rows: int, num_heads: int, num_kv_heads: int) -> Shape:
    """Arguments: qkv, rotations, positions, row_seats, page_tables, pitch, q, keys, values, num_heads, num_kv_heads,
    head_size, num_pairs, interleaved, q_scale (attention's scale times log2(e)).
    """
    kernel = Kernel(source="rope_append.cu", entry="rope_append")
    return Shape(kernel=kernel, grid=(num_rows, num_heads + 2 * num_kv_heads, 1), block=64)


def update_pages(count: int) -> Shape:
    """Arguments: page_tables, pitch, entries, count."""
    kernel = Kernel(source="rope_append.cu", entry="update_pages")
    return Shape(kernel=kernel, grid=(_ceil(count, 128), 1, 1), block=128)


def advance(num_rows: int) -> Shape:
    """Arguments: tokens, positions, num_rows."""
    kernel = Kernel(source="rope_append.cu", entry="advance")
    return Shape(kernel=kernel, grid=(_ceil(num_rows, 128), 1, 1), block=128)


MAX_DECODE_GROUP: Final = 16  # query heads of a KV head that `attend_row` can take; more need `attend_chunk`
CHUNK_QUERIES: Final = 64


def chunk_rows(num_heads: int, num_kv_heads: int) -> int:
    """The most rows of one sequence that one tile of `attend_chunk` may hold. 0: this model cannot run."""
    return CHUNK_QUERIES // (num_heads // num_kv_heads)


def _attention(entry: str, head_size: int, split_tokens: int) -> Kernel:
    defines = (("HEAD_SIZE", head_size), ("SPLIT_TOKENS", split_tokens))
    return Kernel(source="attention.cu", entry=entry, defines=defines)


def attend_row(head_size: int, split_tokens: int, num_blocks: int, num_kv_heads: int, num_rows: int) -> Shape:
    """Arguments: partials, max_splits, q, keys, values, positions, row_seats, page_tables, pitch, num_heads.
    `num_blocks` share out the splits of a row; the result does not depend on it.
    """
    kernel = _attention("attend_row", head_size, split_tokens)
    return Shape(kernel=kernel, grid=(num_blocks, num_kv_heads, num_rows), block=32)


def combine(head_size: int, split_tokens: int, num_heads: int, num_rows: int) -> Shape:
    """Arguments: out (or None), partials, max_splits, positions, values (or None), records, halves."""
    kernel = _attention("combine", head_size, split_tokens)
    return Shape(kernel=kernel, grid=(num_heads, num_rows, 1), block=32 * _ceil(head_size, 32))


def combines_as_activations(head_size: int, num_heads: int) -> bool:
    """Whether `combine` can write what the next product takes: whole blocks a head, whole units a row."""
    return head_size % 32 == 0 and head_size * num_heads % 64 == 0


def attend_chunk(head_size: int, split_tokens: int, num_kv_heads: int, num_chunks: int) -> Shape:
    """Arguments: out, chunks [.., 2] (first row, number of rows), q, keys, values, positions, row_seats, page_tables,
    pitch, num_heads.
    """
    kernel = _attention("attend_chunk", head_size, split_tokens)
    return Shape(kernel=kernel, grid=(num_chunks, num_kv_heads, 1), block=128)


def adjust(num_samples: int) -> Shape:
    """Arguments: adjusted, logits, seats, counts, adjust_ids, adjust_values, masks (or None), positions, sample_rows,
    sample_seats, vocab_size, capacity. Needed only where a seat of the step adjusts or masks.
    """
    kernel = Kernel(source="sampling.cu", entry="adjust")
    return Shape(kernel=kernel, grid=(num_samples, 1, 1), block=1024)


def typical(num_samples: int) -> Shape:
    """After `adjust`. Arguments: adjusted, seats, positions, sample_rows, sample_seats, vocab_size."""
    kernel = Kernel(source="sampling.cu", entry="typical")
    return Shape(kernel=kernel, grid=(num_samples, 1, 1), block=1024)


def sample(num_samples: int) -> Shape:
    """Arguments: results, last_tokens, counts, logits, adjusted, seats, positions, sample_rows, sample_seats,
    vocab_size.
    """
    kernel = Kernel(source="sampling.cu", entry="sample")
    return Shape(kernel=kernel, grid=(num_samples, 1, 1), block=1024)


def to_bfloat16(count: int) -> Shape:
    """Arguments: out, x, count."""
    kernel = Kernel(source="prefill.cu", entry="to_bfloat16")
    return Shape(kernel=kernel, grid=(min(_ceil(count, 256), 4096), 1, 1), block=256)


def join_gate_up(num_rows: int, ffn_size: int) -> Shape:
    """Arguments: act, both, ffn, num_weight_rows."""
    kernel = Kernel(source="prefill.cu", entry="join_gate_up")
    return Shape(kernel=kernel, grid=(num_rows, _ceil(ffn_size, 256), 1), block=256)
