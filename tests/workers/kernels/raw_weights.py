"""Random raw blocks of every packable weight type, with scales of sensible size.

Owns: nothing; a function of its arguments. Runs in: tests. Every bit pattern of values and integer scales may
occur, which quantising random numbers would not reach.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.ggml_types import BLOCK_SIZES, GgmlType

# Where a block has float16 numbers.
_HALVES: Final[dict[GgmlType, tuple[int, ...]]] = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q3_K: (108,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
    GgmlType.IQ2_XXS: (0,),
    GgmlType.IQ4_NL: (0,),
    GgmlType.IQ4_XS: (0,),
}


def raw_weights(kind: GgmlType, num_outputs: int, num_inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of [num_outputs, num_inputs] as a GGUF file would hold them, flat."""
    rng = np.random.default_rng(seed)
    block_values, block_bytes = BLOCK_SIZES[kind]
    count = num_outputs * num_inputs // block_values
    if kind is GgmlType.F32:
        return rng.standard_normal(count).astype(np.float32).view(np.uint8)
    if kind is GgmlType.F16:
        return rng.standard_normal(count).astype(np.float16).view(np.uint8)
    if kind is GgmlType.BF16:
        return (
            (rng.standard_normal(count).astype(np.float32).view(np.uint32) >> 16)
            .astype(np.uint16)
            .view(np.uint8)
        )
    blocks = rng.integers(0, 256, (count, block_bytes), np.uint8)
    for start in _HALVES.get(kind, ()):
        scale = rng.uniform(-0.1, 0.1, count).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8).reshape(count, 2)
    if kind is GgmlType.MXFP4:
        blocks[:, 0] = rng.integers(110, 130, count)
        blocks[0, 0] = 1  # a scale below the normal numbers
    return blocks.reshape(-1)
