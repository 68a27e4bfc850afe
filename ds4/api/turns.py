"""A turn of a conversation in a dialect that is not chat: the chat request it is the same as.

Owns: how other dialects reach what chat has. Runs in: front ends. They neither render templates nor read
tags themselves.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ds4.api.chat import chat_job
from ds4.api.choices import Job
from ds4.api.state import ServedModel
from ds4.errors import RequestError
from ds4.protocol.openai_chat import ChatRequest


def turn_job(model: ServedModel, fields: Mapping[str, Any], param: str) -> Job:
    """What a chat request with these fields asks of the worker. Raises RequestError."""
    try:
        request = msgspec.convert(fields, ChatRequest)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=param, code="invalid_type") from None
    return chat_job(model, request, param)
