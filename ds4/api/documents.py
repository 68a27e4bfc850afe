"""JSON answers.

Owns: how a document becomes a response. Runs in: front ends.
"""

from typing import Final

import msgspec
from starlette.responses import Response

_encode: Final = msgspec.json.Encoder().encode


def document(value: object, status: int = 200) -> Response:
    """`value` as JSON, with msgspec."""
    return Response(_encode(value), status, media_type="application/json")
