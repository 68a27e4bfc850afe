"""Log-probabilities of the model's own distribution: temperature 1, before penalties and filters.

Owns: nothing; a pure function over arrays of `StepResult`. Runs in: the worker, for rows that asked.
Source: this project. Precision: the normaliser is float64 (`softmax`), the results float32.
"""

import numpy as np
from numpy.typing import NDArray

from ds4.generation import MAX_TOP_LOGPROBS
from workers.sampling import candidates
from workers.sampling.interface import StepResult
from workers.sampling.softmax import SoftmaxMass


def report(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    best: NDArray[np.float32],
    num_top: NDArray[np.int64],
    softmax: SoftmaxMass,
    result: StepResult,
) -> None:
    """Fill `result` at `rows`.

    logits [m, vocab], raw, of those rows; best, num_top [m]: the largest logit and how many of the best
    to report (0: only the chosen token, which is read from `result.token_ids`).
    """
    mass = softmax.of(logits, best, np.ones(len(rows), np.float32))
    normaliser = best.astype(np.float64) + np.log(mass)
    chosen = logits[np.arange(len(rows)), result.token_ids[rows]]
    result.logprobs[rows] = chosen - normaliser

    asked = np.flatnonzero(num_top > 0)
    if not len(asked):
        return
    if len(asked) < len(rows):
        logits, rows, normaliser = logits[asked], rows[asked], normaliser[asked]
    k = min(int(num_top.max()), logits.shape[1], MAX_TOP_LOGPROBS)
    top = candidates.best(logits, k)
    for i in np.flatnonzero(~top.complete):
        top.ids[i] = candidates.ranked(logits[i])[:k]
        top.values[i] = logits[i, top.ids[i]]
    result.top_ids[rows, :k] = top.ids
    result.top_logprobs[rows, :k] = top.values - normaliser[:, None]
    result.top_ids[rows, k:] = 0
    result.top_logprobs[rows, k:] = -np.inf
