"""How much JSON makes of its bytes, known before it is decoded.

Owns: `check_json_size`. Runs in: front ends. Source: RFC 8259.

Decoding is one call that keeps the interpreter lock, and so is freeing what it made: 30 MB of small objects
would stop every stream of the process for a third of a second. NumPy lets go of the lock while it counts.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.errors import RequestError

MAX_JSON_ITEMS: Final = 1 << 17  # strings, lists and objects: some 20 ms to decode and to free
MAX_JSON_VALUES: Final = 1 << 20  # with numbers, which cost a tenth: all the ids of a long context
_WINDOW_BYTES: Final = 1 << 20
_MIN_ITEM_BYTES: Final = 2
_QUOTE, _BACKSLASH, _COMMA, _BRACE = b'"\\,{'


def check_json_size(body: bytes) -> None:
    """Raises RequestError for JSON of more strings, lists and objects, or values, than one request may have.

    Exact for valid JSON. What is not valid fails at the same place or earlier when it is decoded.
    """
    if len(body) < MAX_JSON_ITEMS * _MIN_ITEM_BYTES:
        return
    data = np.frombuffer(body, np.uint8)
    num_quotes, num_commas = _count(data == _QUOTE), _count(data == _COMMA)
    num_containers = _count(_brackets(data))
    if num_quotes // 2 + num_containers <= MAX_JSON_ITEMS and num_commas + num_containers <= MAX_JSON_VALUES:
        return  # even if all of them counted: a long text, as most large bodies are
    num_quotes = num_containers = num_commas = 0
    is_inside = is_escaped = False
    for start in range(0, len(data), _WINDOW_BYTES):
        window = data[start : start + _WINDOW_BYTES]
        quotes = window == _QUOTE
        slashes = window == _BACKSLASH
        if is_escaped:
            quotes[0] = slashes[0] = False
        # In a run of backslashes the first, third, ... escape what follows them.
        at = np.flatnonzero(slashes)
        order = np.arange(len(at))
        run = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) > 1, order, 0))
        escaped = at[(order - run) % 2 == 0] + 1
        is_escaped = len(escaped) > 0 and int(escaped[-1]) == len(window)
        quotes[escaped[:-1] if is_escaped else escaped] = False
        inside = (np.cumsum(quotes, dtype=np.uint8) + np.uint8(is_inside)) & 1
        is_inside = bool(inside[-1])
        outside = inside == 0
        num_quotes += _count(quotes)
        num_containers += _count(outside & _brackets(window))
        num_commas += _count(outside & (window == _COMMA))
    _refuse("strings, lists and objects", num_quotes // 2 + num_containers, MAX_JSON_ITEMS)
    _refuse("values", num_commas + num_containers, MAX_JSON_VALUES)


def _count(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))


def _brackets(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (data | 0x20) == _BRACE  # one bit makes `{` of `[`
    return mask


def _refuse(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(
            f"the body has {count} {what}, {limit} are allowed; send fewer and longer messages or parts",
            code="invalid_value",
        )
