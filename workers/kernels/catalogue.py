"""Which kernel does what, with which grid: the launch shapes that the device and the tests share.

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

MatmulVariant = Literal["vector_1", "vector_2", "vector_4", "matrix_8", "matrix_16", "matrix_32", "matrix_64"]
# (rows, tiles of 16 outputs) that one block computes
_BLOCKS: Final[dict[MatmulVariant, tuple[int, int]]] = {
    "vector_1": (1, 1),
    "vector_2": (2, 1),
    "vector_4": (4, 1),
    "matrix_8": (8, 1),
    "matrix_16": (16, 2),
    "matrix_32": (32, 2),
    "matrix_64": (64, 4),
}
VECTOR_ROWS: Final = 4  # up to here the vector kernels are the default


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
    """Arguments: x, size, values, records."""
    return Shape(kernel=Kernel(source="quantise.cu", entry="quantise"), grid=(num_rows, 1, 1), block=256)


def norm(num_rows: int) -> Shape:
    """Arguments: hidden, rows (or None), weight, size, eps, out (or None), values (or None), records."""
    return Shape(kernel=Kernel(source="quantise.cu", entry="rms_norm"), grid=(num_rows, 1, 1), block=256)


def default_variant(num_rows: int, *, batch_invariant: bool) -> MatmulVariant:
    """The kernel for this many rows. All `matrix_*` give the same bits; a `vector_*` gives others."""
    if num_rows <= VECTOR_ROWS and not batch_invariant:
        return "vector_1" if num_rows == 1 else "vector_2" if num_rows == 2 else "vector_4"
    if num_rows <= 8:
        return "matrix_8"
    if num_rows <= 16:
        return "matrix_16"
    return "matrix_32" if num_rows <= 128 else "matrix_64"


def quantised_matmul(ggml_type: int, variant: MatmulVariant, num_rows: int, num_tiles: int) -> Shape:
    """Arguments: out, out_stride, out_offset, weight, codebook, bias, num_outputs, num_tiles, num_units,
    values, records, num_rows, epilogue. `num_outputs` counts what is written: for gate and up, pairs.
    """
    rows, tiles = _BLOCKS[variant]
    source = "quantised_vector.cu" if variant.startswith("vector") else "quantised_matrix.cu"
    return Shape(
        kernel=Kernel(source=source, entry=variant, defines=(("FORMAT", ggml_type),)),
        grid=(_ceil(num_tiles, tiles), _ceil(num_rows, rows), 1),
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
    return Shape(kernel=kernel, grid=(num_heads + 2 * num_kv_heads, num_rows, 1), block=64)


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
    """Arguments: out, partials, max_splits, positions."""
    kernel = _attention("combine", head_size, split_tokens)
    return Shape(kernel=kernel, grid=(num_heads, num_rows, 1), block=32 * _ceil(head_size, 32))


def attend_chunk(head_size: int, split_tokens: int, num_kv_heads: int, num_chunks: int) -> Shape:
    """Arguments: out, chunks [.., 2] (first row, number of rows), q, keys, values, positions, row_seats, page_tables,
    pitch, num_heads.
    """
    kernel = _attention("attend_chunk", head_size, split_tokens)
    return Shape(kernel=kernel, grid=(num_kv_heads, num_chunks, 1), block=128)


def adjust(num_samples: int) -> Shape:
    """Arguments: adjusted, logits, seats, counts, adjust_ids, adjust_values, masks (or None), positions, sample_rows,
    sample_seats, vocab_size, capacity. Needed only where a seat of the step adjusts or masks.
    """
    kernel = Kernel(source="sampling.cu", entry="adjust")
    return Shape(kernel=kernel, grid=(num_samples, 1, 1), block=512)


def sample(num_samples: int) -> Shape:
    """Arguments: results, last_tokens, counts, logits, adjusted, seats, positions, sample_rows, sample_seats,
    vocab_size.
    """
    kernel = Kernel(source="sampling.cu", entry="sample")
    return Shape(kernel=kernel, grid=(num_samples, 1, 1), block=512)


def to_bfloat16(count: int) -> Shape:
    """Arguments: out, x, count."""
    kernel = Kernel(source="prefill.cu", entry="to_bfloat16")
    return Shape(kernel=kernel, grid=(min(_ceil(count, 256), 4096), 1, 1), block=256)


def join_gate_up(num_rows: int, ffn_size: int) -> Shape:
    """Arguments: act, both, ffn, num_weight_rows."""
    kernel = Kernel(source="prefill.cu", entry="join_gate_up")
    return Shape(kernel=kernel, grid=(_ceil(ffn_size, 256), num_rows, 1), block=256)
