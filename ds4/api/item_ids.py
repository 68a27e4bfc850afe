"""Ids of a response's items, and the way back: `item_reference` in the input of another response.

Owns: that an id leads to the response that holds the item, so that the store needs no index of items.
Runs in: front ends. Source: the OpenAI API reference; a client that leaves its conversation with the server
sends references in the place of what it was answered.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ds4.api.errors import NotFoundError
from ds4.api.response_store import ResponseStore
from ds4.protocol.openai_responses import Item

_STEM_BYTES: Final = 24
_ITEM_ID: Final = re.compile(rf"[a-z]+_([0-9a-f]{{{2 * _STEM_BYTES}}})[0-9a-f]+")


class _StoredOutput(msgspec.Struct, frozen=True):
    """The part of a stored response that a conversation goes on from."""

    output: list[Item]


_decode_output: Final = msgspec.json.Decoder(_StoredOutput).decode
_decode_items: Final = msgspec.json.Decoder(list[Item]).decode


def output_items(response: bytes) -> list[Item]:
    """The output of a stored response."""
    return _decode_output(response).output


def stored_items(items: bytes) -> list[Item]:
    """The input that a response was stored with."""
    return _decode_items(items)


class ItemIds:
    """The ids of one response and all its items. Owned by the task that answers it."""

    def __init__(self) -> None:
        self._stem = secrets.token_hex(_STEM_BYTES)
        self._num_items = 0

    @property
    def response(self) -> str:
        """The response's own."""
        return _response_id(self._stem)

    def new(self, prefix: str) -> str:
        """Of the next item."""
        self._num_items += 1
        return f"{prefix}{self._stem}{self._num_items:04x}"


async def resolved(store: ResponseStore, items: Sequence[Item], owner: str) -> list[Item]:
    """The same items, with what was stored in the place of references.

    Raises NotFoundError naming the reference, StoreError.
    """
    known: dict[str, dict[Any, Item]] = {}
    out: list[Item] = []
    for index, item in enumerate(items):
        if item.get("type") != "item_reference":
            out.append(item)
            continue
        item_id = item.get("id")
        found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
        holder = _response_id(found[1]) if found is not None and store.is_on else None
        if holder is not None and holder not in known:
            known[holder] = await _items_of(store, holder, owner)
        if holder is None or item_id not in known[holder]:
            raise NotFoundError(
                f"input[{index}]: the item {str(item_id)[:80]!r} is not stored here",
                param=f"input[{index}].id",
                code="item_not_found",
            )
        out.append(known[holder][item_id])
    return out


async def _items_of(store: ResponseStore, response_id: str, owner: str) -> dict[Any, Item]:
    stored = await store.get(response_id, owner=owner)
    if stored is None:
        return {}
    return {item.get("id"): item for item in (*stored_items(stored.input), *output_items(stored.response))}


def _response_id(stem: str) -> str:
    return f"resp_{stem}"
