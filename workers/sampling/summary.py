"""What a device found out about logits while they were in its caches, for the sampler to go on with.

Owns: nothing; frozen data and pure functions. Runs in: the worker. Source: this project.
"""

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

# What a device needs for choosing a row's token itself, and in `mass` and `token` what came of it. All but
# the position is the seat's: see `seats.SeatTable`.
DRAW: Final = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),  # 1: the largest logit, the lowest id of equals
        ("top_p", np.float64),
        ("stream", np.uint64),
        ("adjust_below", np.int64),  # before this position logits change first: not the device's business
        ("position", np.int64),  # where in its sequence the token will stand
        # The softmax mass: float32 weights summed in float64; negative where top_k or min_p limits it.
        ("mass", np.float64),
        ("token", np.int64),  # or UNDECIDED, from the start
    ]
)


def draw_offset(field: str) -> int:
    """Where a field lies in a DRAW, in bytes."""
    assert DRAW.fields is not None
    return int(DRAW.fields[field][1])


class Summary(msgspec.Struct, frozen=True):
    """Of a step's sampled rows. The arrays belong to the device and are valid until its next step.

    blocks [n, num_blocks, size] float32: the logits, the last block filled up with -inf.
    maxima [n, num_blocks] float32: the largest of each block, NaN where any is NaN.
    draws [n] DRAW: as `HostSampler.describe` filled them in, with their results.
    """

    blocks: NDArray[np.float32]
    maxima: NDArray[np.float32]
    draws: NDArray[np.void]

    def best(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Id and value of each row's largest logit: the lowest id of equals, NaN where there is one."""
        rows = np.arange(len(self.maxima))
        block = self.maxima.argmax(axis=1)
        within = self.blocks[rows, block].argmax(axis=1)
        return block * self.blocks.shape[2] + within, self.maxima[rows, block]

    def of(self, rows: NDArray[np.int64]) -> "Summary":
        """The same of some rows. Copies no logits where that is all of them."""
        if len(rows) == len(self.maxima):
            return self
        return Summary(self.blocks[rows], self.maxima[rows], self.draws[rows])

    def reaching(
        self, threshold: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Row, id and value of all logits that reach their row's threshold [n], by row and id."""
        rows, numbers = np.nonzero(self.maxima >= threshold[:, None])
        blocks = self.blocks[rows, numbers]
        which, within = np.nonzero(blocks >= threshold[rows, None])
        return rows[which], numbers[which] * blocks.shape[1] + within, blocks[which, within]
