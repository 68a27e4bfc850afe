"""ds4/json_size.py: what JSON holds is counted as a decoder would, wherever windows and escapes fall."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4 import json_size
from ds4.errors import RequestError
from ds4.json_size import check_json_size

_TEXT = st.text(alphabet='a,[]{}"\\é', max_size=8)
_VALUE = st.recursive(
    st.integers(0, 9) | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=20,
)


def _num_items(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(_num_items, value))
    if isinstance(value, dict):
        return 1 + sum(1 + _num_items(item) for item in value.values())
    return int(isinstance(value, str))


@given(value=_VALUE, window=st.integers(1, 9), limit=st.integers(0, 40))
def test_strings_lists_and_objects_are_counted_exactly(value: Any, window: int, limit: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "_WINDOW_BYTES", window)
        patch.setattr(json_size, "_MIN_ITEM_BYTES", 0)
        patch.setattr(json_size, "MAX_JSON_ITEMS", limit)
        if (count := _num_items(value)) <= limit:
            check_json_size(body)
        else:
            with pytest.raises(RequestError, match=f"has {count} strings, lists and objects, {limit} are"):
                check_json_size(body)


def test_numbers_are_bounded_too() -> None:
    fits = b"[" + b"7," * (json_size.MAX_JSON_VALUES - 2) + b"7]"
    check_json_size(fits)
    with pytest.raises(RequestError, match="values, 1048576 are allowed"):
        check_json_size(b"[7,7," + fits[1:])


def test_no_small_body_can_have_too_many() -> None:
    check_json_size(b"[" * (json_size.MAX_JSON_ITEMS * 2 - 1))


def test_a_long_text_is_one_string_whatever_it_holds() -> None:
    check_json_size(json.dumps({"content": '{"a": [1, "\\\\"]}, ' * 200_000}).encode())
