"""The mass of a row's softmax: one float64 sum of float32 weights per row.

Owns: `SoftmaxMass` and its scratch memory. Runs in: the worker. Source: this project.

Precision, here and in `filters`: the weight of a logit x is exp((x - best) / temperature) with each
operation rounded to float32; sums of weights are float64. A weight has the same bits whether it was
computed among k candidates or among the whole row, so decisions made on either agree.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_CHUNK_ELEMENTS: Final = 1 << 17  # rows worked on together: small enough to stay in a core's cache


class SoftmaxMass:
    """Computes masses a few rows at a time in buffers made once."""

    def __init__(self, vocab_size: int) -> None:
        rows = max(1, _CHUNK_ELEMENTS // vocab_size)
        self._weights = np.empty((rows, vocab_size), np.float32)
        self._wide = np.empty((rows, vocab_size), np.float64)

    def of(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.int64],
        best: NDArray[np.float32],
        temperature: NDArray[np.float32],
    ) -> NDArray[np.float64]:
        """Sum of the weights of `logits[rows]`. logits [n, vocab]; rows, best, temperature [m] -> [m]."""
        mass = np.empty(len(rows), np.float64)
        step = len(self._weights)
        for start in range(0, len(rows), step):
            chunk = slice(start, start + step)
            picked = rows[chunk]
            weights, wide = self._weights[: len(picked)], self._wide[: len(picked)]
            with np.errstate(over="ignore"):  # far below the best: minus infinity, weight 0
                # "clip" only says that no copy of `out` is needed: the rows are in range.
                np.take(logits, picked, axis=0, out=weights, mode="clip")
                np.subtract(weights, best[chunk, None], out=weights)
                np.divide(weights, temperature[chunk, None], out=weights)
            np.exp(weights, out=weights)
            # Widened before the sum: a casting reduction is buffered, and where a buffer ends would
            # depend on the number of rows.
            np.copyto(wide, weights)
            np.add.reduce(wide, axis=1, out=mass[chunk])
        return mass
