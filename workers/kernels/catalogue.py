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
    return Shape(kernel=Kernel(source="quantise.cu", entry="norm"), grid=(num_rows, 1, 1), block=256)


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
