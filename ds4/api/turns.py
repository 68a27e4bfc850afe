"""A turn of a conversation in a dialect that is not chat: the chat request it is the same as.

Owns: how other dialects reach what chat has. Runs in: front ends. They neither render templates nor read
tags themselves. Fields of chat that a dialect has no word for may be sent to it too, and mean the same.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from ds4.api.chat import chat_job
from ds4.api.choices import Job
from ds4.api.state import ServedModel
from ds4.errors import RequestError
from ds4.protocol.openai_chat import ChatRequest

_CHAT: Final = frozenset(ChatRequest.__struct_encode_fields__)
_HOW_MANY: Final = frozenset({"n", "n_cmpl", "best_of"})
_HARMLESS: Final = frozenset({"stream_options"})
_raw_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def extensions(body: bytes, own: type[msgspec.Struct], without_effect: Collection[str]) -> dict[str, Any]:
    """The fields of chat in the `body` of another dialect, whose own fields are those of `own`.

    Raises RequestError for those that can have no effect there. `body` was decoded as `own` before.
    """
    more = _CHAT.difference(own.__struct_encode_fields__, _HARMLESS)
    found: dict[str, Any] = {}
    for name, raw in _raw_fields.decode(body).items():
        if name not in more:
            continue
        value = msgspec.json.decode(raw)
        if value is None or (name in _HOW_MANY and value == 1):
            continue
        if name in _HOW_MANY or (name in without_effect and value is not False):
            raise RequestError(
                f"{name} is not supported on this route; leave it out",
                param=name,
                code="unsupported_parameter",
            )
        found[name] = value
    return found


def turn_job(model: ServedModel, fields: Mapping[str, Any], param: str) -> Job:
    """What a chat request with these fields asks of the worker. Raises RequestError."""
    try:
        request = msgspec.convert(fields, ChatRequest)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=param, code="invalid_type") from None
    return chat_job(model, request, param)
