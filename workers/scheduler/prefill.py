"""The prefill part of a step: how prompts share the rows that decoding leaves.

Runs in the worker, pure Python. Two rules, half of the rows each: in order of arrival, so that every
prompt gets done; and shortest remaining work first, so that a short prompt is not stuck behind a
long one. With prompts of equal length both rules agree. A lone prompt gets all rows.
"""

from collections.abc import Sequence as Items


def share_rows(remaining: Items[int], num_rows: int) -> list[int]:
    """Rows for each prompt, given what each has left to compute, in order of arrival.

    The shares sum to min(sum(remaining), num_rows).
    """
    shares = [0] * len(remaining)
    if num_rows <= 0:
        return shares
    in_order = num_rows if len(remaining) == 1 else -(-num_rows // 2)
    left = num_rows - in_order
    for index, work in enumerate(remaining):
        shares[index] = min(work, in_order)
        in_order -= shares[index]
        if in_order == 0:
            break
    left += in_order
    for index in sorted(range(len(remaining)), key=lambda index: remaining[index] - shares[index]):
        if left == 0:
            break
        more = min(remaining[index] - shares[index], left)
        shares[index] += more
        left -= more
    return shares
