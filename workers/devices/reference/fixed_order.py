"""Matrix products whose rows come out the same bits whatever shares the call.

Owns: the choice of BLAS call sizes. Runs in: the worker; one thread. Source: this project.

A BLAS picks its kernel by the number of rows, and some kernels add up a row in an order that depends
on where in the block it stands. Which sizes agree differs between processors (measured with OpenBLAS:
with AVX-512 all sizes from 2 rows up agree on large weights, with AVX2 only 8 and 16, and never
1). So nothing is assumed: at load every size is tried on a probe, and only a set of sizes that give
bit-identical rows at every position is used. A step is then cut into calls of exactly those sizes,
the last one running over rows past the end that nobody reads.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_BLOCK_ROWS: Final = 256
_SIZES: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)
# Where only an edge column is summed in another order, a row in five still agrees by chance.
_NUM_PROBES: Final = 8
_SPLIT_ABOVE: Final = 32  # below this many rows one padded call is cheaper than two exact ones


def agreeing_sizes(
    multiply: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    num_inputs: int,
    max_size: int = MAX_BLOCK_ROWS,
) -> tuple[int, ...]:
    """Call sizes, largest first, whose results agree bit for bit at every row position.

    `multiply` maps [rows, num_inputs] to [rows, anything] as the real code will. Each probe is one
    random row repeated: position-dependent sums show up as unequal rows, order-dependent ones as
    unequal results between sizes. Never empty: a single row always agrees with itself.
    """
    probes = np.random.default_rng(1).standard_normal((_NUM_PROBES, num_inputs), np.float32)
    classes: dict[bytes, list[int]] = {}
    for size in _SIZES:
        if size > max_size:
            continue
        bits = []
        for probe in probes:
            result = multiply(np.tile(probe, (size, 1))).reshape(size, -1)
            result[np.isnan(result)] = np.nan  # damaged weights: one NaN for all
            if not np.array_equal(result, np.broadcast_to(result[0], result.shape), equal_nan=True):
                break
            bits.append(result[0].tobytes())
        else:
            classes.setdefault(b"".join(bits), []).append(size)
    # The largest calls decide the speed of a prompt; among equals, more sizes waste fewer padded rows.
    found = sorted(classes.values(), key=lambda sizes: (sizes[0], len(sizes)))
    return tuple(found[-1])


def cover(num_rows: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(start, size) of the calls that cover `num_rows` rows; the last may pass the end by under `sizes[0]`.

    `sizes` descend. The cover is a function of `num_rows` only for speed: results do not depend on it.
    """
    calls, start = [], 0
    while start < num_rows:
        left = num_rows - start
        fitting = [size for size in sizes if size <= left]
        padded = [size for size in sizes if size >= left]
        size = padded[-1] if padded and (left <= _SPLIT_ABOVE or not fitting) else fitting[0]
        calls.append((start, size))
        start += size
    return calls


class FixedOrderMatmul:
    """`out = x @ weight` for the first rows of fixed buffers. Owns its weight."""

    def __init__(
        self, weight: NDArray[np.float32], max_rows: int, known_sizes: dict[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        """`weight` [inputs, outputs] float32, in memory either way round: the BLAS reads a layer's weight
        a third faster as it is written here, and a very wide one the other way.

        `known_sizes` remembers the sizes by layout and `max_rows`, so that equal layers are probed once.
        """
        self._weight = weight
        key = (*weight.shape, *weight.strides, max_rows)
        if key not in known_sizes:
            known_sizes[key] = agreeing_sizes(
                lambda x: np.matmul(x, self._weight),
                weight.shape[0],
                max_size=min(MAX_BLOCK_ROWS, 1 << (max_rows - 1).bit_length()),
            )
        self.sizes = known_sizes[key]

    def __call__(self, x: NDArray[np.float32], num_rows: int, out: NDArray[np.float32]) -> None:
        """X [rows, inputs] and out [rows, outputs] float32, row-major, with MAX_BLOCK_ROWS spare rows.

        Rows of `out` past `num_rows` are overwritten with values without meaning.
        """
        for start, size in cover(num_rows, self.sizes):
            np.matmul(x[start : start + size], self._weight, out=out[start : start + size])
