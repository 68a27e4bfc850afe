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
        self, logits: NDArray[np.float32], best: NDArray[np.float32], temperature: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Sum of the weights of each row. logits [n, vocab]; best, temperature [n] -> [n]."""
        mass = np.empty(len(logits), np.float64)
        step = len(self._weights)
        divide = bool((temperature != 1.0).any())  # x / 1 is x, bit for bit
        for start in range(0, len(logits), step):
            chunk = slice(start, start + step)
            num_rows = len(logits[chunk])
            weights, wide = self._weights[:num_rows], self._wide[:num_rows]
            with np.errstate(over="ignore"):  # far below the best: minus infinity, weight 0
                np.subtract(logits[chunk], best[chunk, None], out=weights)
                if divide:
                    np.divide(weights, temperature[chunk, None], out=weights)
            np.exp(weights, out=weights)
            # Widened before the sum: a casting reduction is buffered, and where its buffers end could
            # depend on the number of rows.
            np.copyto(wide, weights)
            np.add.reduce(wide, axis=1, out=mass[chunk])
        return mass
