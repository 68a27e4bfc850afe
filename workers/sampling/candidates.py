"""The best k logits of each row, exactly, without sorting or partitioning the rows.

Owns: nothing; pure functions. Runs in: the worker. Source: this project.

Block-maximum filter: cut a row into blocks and take each block's maximum. The k-th largest of those
maxima bounds the k-th largest logit from below (k blocks hold a value at least that large), so only
values that reach it can be among the k best: about k of them, found in one comparison of the row (or of
few blocks, where the device brought the maxima along). They are then sorted by a key that has no ties.

Order everywhere: descending value, lowest id first among equal values; -0.0 equals 0.0.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.sampling.summary import Summary

_ID_BITS: Final = np.uint64(32)
_ID_MASK: Final = np.uint64(0xFFFFFFFF)
_NO_CANDIDATE: Final = np.uint64(0xFFFFFFFFFFFFFFFF)  # sorts after every real key
_MAX_HEIGHT: Final = 64
_LOWEST: Final = np.finfo(np.float32).min


class Candidates(NamedTuple):
    """The k best of each row, best first.

    Logits of minus infinity are nobody's candidates: a row with fewer than k others is filled up with
    id 0 and value -inf. `complete` [n] is False where a row had so many values equal to its k-th best
    that it was left out; such a row's entries are meaningless.
    """

    ids: NDArray[np.int64]  # [n, k]
    values: NDArray[np.float32]  # [n, k]
    complete: NDArray[np.bool_]  # [n]


def sort_keys(values: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Keys whose ascending order is the candidate order. No NaN; same shape as the arguments."""
    bits = (values + np.float32(0)).view(np.uint32)  # the addition turns -0.0 into 0.0
    descending = np.where(bits >> np.uint32(31), bits, bits ^ np.uint32(0x7FFFFFFF))
    return (descending.astype(np.uint64) << _ID_BITS) | ids.astype(np.uint64)


def ranked(row: NDArray[np.float32]) -> NDArray[np.int64]:
    """All ids of one row [vocab] in candidate order."""
    keys = sort_keys(row, np.arange(len(row), dtype=np.int64))
    keys.sort()
    return (keys & _ID_MASK).astype(np.int64)


def best(logits: NDArray[np.float32], k: int, summary: Summary | None = None) -> Candidates:
    """The k best of each row. logits [n, vocab] without NaN, 1 <= k <= vocab; `summary` is theirs."""
    num_rows, vocab = logits.shape
    if summary is not None and k <= summary.maxima.shape[1]:
        threshold = np.maximum(_kth_largest(summary.maxima, k), _LOWEST)
        rows, ids, values = summary.reaching(threshold)
    else:
        threshold = np.maximum(_lower_bounds(logits, k), _LOWEST)
        flat = np.flatnonzero(logits >= threshold[:, None])
        rows = flat // vocab
        ids = flat - rows * vocab
        values = logits[rows, ids]
    counts = np.bincount(rows, minlength=num_rows)
    # Ties at the bound are unlimited (a flat row has `vocab` of them): those rows are not worth padding for.
    complete = counts <= 2 * k + 64
    if not complete.all():
        kept = complete[rows]
        rows, ids, values = rows[kept], ids[kept], values[kept]
        counts = np.where(complete, counts, 0)
    keys = np.full((num_rows, max(int(counts.max()), k)), _NO_CANDIDATE, np.uint64)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    keys[rows, columns] = sort_keys(values, ids)
    keys.sort(axis=1)
    keys = keys[:, :k]
    missing = keys == _NO_CANDIDATE
    ids = (keys & _ID_MASK).astype(np.int64)
    ids[missing] = 0
    values = logits[np.arange(num_rows)[:, None], ids]
    values[missing] = -np.inf
    return Candidates(ids, values, complete)


def _lower_bounds(logits: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """A value [n] that at least k logits of each row reach."""
    num_rows, vocab = logits.shape
    # Four to eight blocks per candidate: few maxima to search, and a bound that few more than k reach
    # (for values in random places, 1.15 k to 1.07 k). Higher blocks would only shorten the inner loops.
    height = min(_MAX_HEIGHT, 1 << max(0, (vocab // (4 * k)).bit_length() - 1))
    width = vocab // height
    # A block is a strided column of the [height, width] view, so the maximum runs along memory. The few
    # values past the view may be left out: they can only raise the bound.
    maxima = logits
    if height > 1:
        maxima = logits[:, : height * width].reshape(num_rows, height, width).max(axis=1)
    return _kth_largest(maxima, k)  # width is k or more by the choice of the height


def _kth_largest(values: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    kth = values.shape[1] - k
    found: NDArray[np.float32] = np.partition(values, kth, axis=1)[:, kth]
    return found
