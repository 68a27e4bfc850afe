"""The structures that the sampling kernels share with the host, as NumPy types.

Owns: `SEAT` and `RESULT`, which repeat `struct Seat` and `struct Result` of sampling.cu. Runs in: the
worker. Source: `workers/sampling/seats.py` for the meaning of the fields.
"""

from typing import Final

import numpy as np

MAX_TOP: Final = 20  # ds4.generation.MAX_TOP_LOGPROBS
# Sums of weights fit in 64 bits up to here, and ids in the 20 bits that the search descends.
MAX_VOCAB_SIZE: Final = 1 << 18
NO_TOP_K: Final = (1 << 31) - 1
ALWAYS: Final = (1 << 31) - 1  # a position no sequence reaches
NEED_MASKED: Final = 8  # beside DRAWS, ADJUSTS and REPORTS: the seat's grammar mask holds
IN_PROMPT: Final = np.int32(-(1 << 31))  # bit of a cell of `counts`: the prompt holds the id

SEAT: Final = np.dtype(
    [
        ("stream", np.uint64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("num_logprobs", np.int32),
        ("needs", np.int32),
        ("adjust_below", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("num_biases", np.int32),
        ("num_suppressed", np.int32),
        ("suppress_below", np.int32),
        ("typical_p", np.float32),
        ("unused", np.int32),
    ]
)
RESULT: Final = np.dtype(
    [
        ("token", np.int32),
        ("ok", np.int32),
        ("logprob", np.float32),
        ("unused", np.int32),
        ("top_ids", np.int32, MAX_TOP),
        ("top_logprobs", np.float32, MAX_TOP),
    ]
)
