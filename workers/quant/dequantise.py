"""GGML blocks to float32, through the gguf package's NumPy code.

Owns: which weight types can be read at all. Runs in: the worker, at load; tests. Source: gguf.quants
(the block layouts of ggml-common.h). Devices that compute on quantised blocks repack them on
their own and use this for every type they have no kernel for.
"""

from typing import Final

import gguf
import numpy as np
from numpy.typing import NDArray

from ds4.ggml_types import BLOCK_SIZES, GgmlType

DEQUANTISABLE: Final[frozenset[GgmlType]] = frozenset(
    {
        GgmlType.F32,
        GgmlType.F16,
        GgmlType.BF16,
        GgmlType.Q4_0,
        GgmlType.Q4_1,
        GgmlType.Q5_0,
        GgmlType.Q5_1,
        GgmlType.Q8_0,
        GgmlType.Q2_K,
        GgmlType.Q3_K,
        GgmlType.Q4_K,
        GgmlType.Q5_K,
        GgmlType.Q6_K,
        GgmlType.IQ1_S,
        GgmlType.IQ1_M,
        GgmlType.IQ2_XXS,
        GgmlType.IQ2_XS,
        GgmlType.IQ2_S,
        GgmlType.IQ3_XXS,
        GgmlType.IQ3_S,
        GgmlType.IQ4_NL,
        GgmlType.IQ4_XS,
        GgmlType.TQ1_0,
        GgmlType.TQ2_0,
        GgmlType.MXFP4,
        GgmlType.NVFP4,
    }
)


def row_bytes(ggml_type: int, num_values: int) -> int:
    """Bytes of a row of `num_values` values, which must be whole blocks of `ggml_type`."""
    block_values, block_bytes = BLOCK_SIZES[GgmlType(ggml_type)]
    assert num_values % block_values == 0
    return num_values // block_values * block_bytes


def dequantise(data: NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The values of raw blocks: `data` uint8 of any shape, to a new float32 array of `shape`, row-major.

    `ggml_type` must be in DEQUANTISABLE; `data` must hold exactly the blocks of `shape`.
    """
    assert ggml_type in DEQUANTISABLE
    rows = data.reshape(-1, row_bytes(ggml_type, shape[-1]))
    with np.errstate(
        all="ignore"
    ):  # blocks of a hostile file may hold any float16, NaN and infinity included
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(ggml_type))
    # The copy matters for F32, which the package returns as a view of the mapped file.
    return np.array(values, np.float32, order="C").reshape(shape)
