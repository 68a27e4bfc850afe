"""What every kernel must compute, in NumPy: the reference functions that their comments name.

Owns: nothing; pure functions. Runs in: tests. Source: `workers/model/program.py` for the operations; the
rounding of activations is the kernels' own and is repeated here, so that tolerances can be tight.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
RECORD: Final = np.dtype([("scale", np.float32), ("sums", np.int16, 2)])


def quantise(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Rows of x [n, size] to int8 [n, size] and scales [n, size / 32]."""
    blocks = x.reshape(len(x), -1, 32)
    scales = (np.abs(blocks).max(axis=2) / np.float32(127)).astype(np.float32)
    safe = np.where(scales == 0, np.float32(1), scales)
    values = np.rint(blocks / safe[..., None]).astype(np.int8)
    return values.reshape(x.shape), scales


def pack_activations(values: NDArray[np.int8], scales: Floats) -> tuple[NDArray[np.int8], NDArray[np.void]]:
    """The same as the kernels store them: fragment order, records, both padded to units of 64 inputs."""
    rows, size = values.shape
    units = -(-size // 64)
    padded = np.zeros((rows, units * 64), np.int8)
    padded[:, :size] = values
    records = np.zeros((rows, units * 2), RECORD)
    records["scale"][:, : size // 32] = scales
    records["sums"] = padded.reshape(rows, units * 2, 2, 16).sum(axis=3)
    ordered = padded.reshape(rows, units, 2, 2, 4, 4).transpose(0, 1, 4, 2, 3, 5)
    return np.ascontiguousarray(ordered).reshape(rows, -1), records


def quantised_matmul(x: Floats, weight: Floats) -> Floats:
    """Rounded activations times the exact weights [outputs, inputs], in float64."""
    values, scales = quantise(x)
    rounded = values.reshape(len(x), -1, 32) * scales[..., None].astype(np.float64)
    product: Floats = (rounded.reshape(x.shape) @ weight.T.astype(np.float64)).astype(np.float32)
    return product


def halve(x: Floats) -> tuple[NDArray[np.float16], Floats]:
    """Rows of x [n, size] to float16 [n, size] and a power of two each, [n]."""
    largest = np.abs(x).max(axis=1)
    scales = np.exp2(np.floor(np.log2(np.where(largest == 0, np.float32(2.0**-119), largest)))).astype(
        np.float32
    )
    return (x / scales[:, None]).astype(np.float16), scales


def pack_halves(values: NDArray[np.float16]) -> NDArray[np.float16]:
    """The same in fragment order, padded to units of 64 inputs."""
    rows, size = values.shape
    units = -(-size // 64)
    padded = np.zeros((rows, units * 64), np.float16)
    padded[:, :size] = values
    ordered = padded.reshape(rows, units, 2, 2, 4, 4).transpose(0, 1, 2, 4, 3, 5)
    return np.ascontiguousarray(ordered).reshape(rows, -1)


def halved_matmul(x: Floats, weight: Floats) -> Floats:
    """Rounded activations times the exact weights [outputs, inputs], in float64."""
    values, scales = halve(x)
    product: Floats = (values.astype(np.float64) * scales[:, None] @ weight.T.astype(np.float64)).astype(
        np.float32
    )
    return product


def norm(hidden: Floats, weight: Floats, eps: float) -> Floats:
    """RMS norm of rows."""
    wide = hidden.astype(np.float64)
    scale = 1 / np.sqrt((wide**2).mean(axis=1, keepdims=True) + eps)
    normed: Floats = (wide * scale * weight).astype(np.float32)
    return normed


def silu_product(gate: Floats, up: Floats) -> Floats:
    """silu(gate) * up."""
    with np.errstate(over="ignore"):
        product: Floats = gate / (1 + np.exp(-gate)) * up
    return product


def rope(x: Floats, rotations: Floats, *, interleaved: bool) -> Floats:
    """Rotate heads x [n, heads, size] by rotations [n, pairs, (cos, sin)]; the rest of a head stays."""
    pairs = rotations.shape[1]
    out = x.copy()
    cos, sin = rotations[:, None, :, 0], rotations[:, None, :, 1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def attention(
    queries: NDArray[np.float16], keys: NDArray[np.float16], values: NDArray[np.float16], seen: int
) -> Floats:
    """One row: queries [heads, size] (scale * log2(e) included) over the first `seen` keys [n, kv heads, size]."""
    heads, kv_heads = queries.shape[0], keys.shape[1]
    out = np.empty(queries.shape, np.float32)
    for head in range(heads):
        own = head // (heads // kv_heads)
        scores = keys[:seen, own].astype(np.float64) @ queries[head].astype(np.float64)
        weights = np.exp2(scores - scores.max())
        out[head] = weights / weights.sum() @ values[:seen, own].astype(np.float64)
    return out
