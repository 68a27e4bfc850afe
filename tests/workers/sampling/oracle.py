"""The sampler's meaning, one row at a time and as plainly as it can be written. Slow on purpose."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from workers.sampling.interface import SeatParams

_MASK = 2**64 - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    stream = _mix((seed + 0x9E3779B97F4A7C15) & _MASK)
    word = _mix((stream + (position + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return (word >> 11) * 2.0**-53


def adjusted(logits: NDArray[np.float32], params: SeatParams, position: int) -> NDArray[np.float32]:
    """Penalties, bias and suppression, each operation rounded to float32, results kept finite."""
    sampling = params.sampling
    limit = float(np.finfo(np.float32).max)
    output = Counter(params.history[params.num_prompt_tokens :].tolist())
    seen = set(params.history.tolist())
    bias: dict[int, np.float32] = {}
    for token_id, value in sampling.logit_bias:
        bias[token_id] = bias.get(token_id, np.float32(0)) + np.float32(value)
    row = logits.copy()
    with np.errstate(over="ignore"):
        for token_id in seen | set(bias):
            x = row[token_id]
            if not np.isfinite(x):
                continue
            if token_id in seen:
                penalty = np.float32(sampling.repetition_penalty)
                x = x / penalty if x > 0 else x * penalty
            if output[token_id]:
                frequency = np.float32(sampling.frequency_penalty) * np.float32(output[token_id])
                x = x - (np.float32(sampling.presence_penalty) + frequency)
            x = np.float32(np.clip(x, -limit, limit))
            row[token_id] = np.clip(x + bias.get(token_id, np.float32(0)), -limit, limit)
    if position < params.suppress_below:
        for token_id in params.suppressed_ids:
            row[token_id] = -np.inf
    return row


def sample(logits: NDArray[np.float32], params: SeatParams, position: int) -> int | None:
    """The token of one row, or None where there is none to draw."""
    if np.isnan(logits).any() or np.isposinf(logits).any() or np.isneginf(logits).all():
        return None
    row = adjusted(logits, params, position)
    if np.isneginf(row).all():
        return None
    order = np.lexsort((np.arange(len(row)), -row))  # by value, then by id
    sampling = params.sampling
    if sampling.temperature < 1e-5:
        return int(order[0])

    with np.errstate(over="ignore"):
        weights = np.exp((row[order] - row[order[0]]) / np.float32(min(sampling.temperature, 3e38)))
    if sampling.top_k > 0:
        weights = weights[: sampling.top_k]
    weights = weights[weights >= np.float32(sampling.min_p)]
    cumulative = np.cumsum(weights, dtype=np.float64)
    if sampling.top_p < 1.0:
        reached = np.flatnonzero(cumulative >= sampling.top_p * cumulative[-1])
        cumulative = cumulative[: reached[0] + 1]
    target = uniform(sampling.seed, position) * cumulative[-1]
    return int(order[np.flatnonzero(cumulative > target)[0]])


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    normalised: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return normalised
