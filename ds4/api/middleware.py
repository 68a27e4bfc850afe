"""What every request passes: an id, the count of its answer, the key check.

Owns: request ids, HTTP response counts, authentication. Runs in: front ends. Pure ASGI: nothing here
wraps a body or adds a task to a stream.
"""

import hmac
import logging
import re
import secrets
from collections.abc import Mapping
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds4.api.dialects import is_anthropic, refusal
from ds4.api.errors import UnauthorizedError, failure
from ds4.api.keys import Tenant
from ds4.api.state import FrontState

_log = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/health", "/v1/health", "/health/live", "/health/ready"})
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Observe:
    """Gives the request an id, the client's where it sent a usable one, and counts the answer."""

    def __init__(self, app: ASGIApp, state: FrontState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8).encode()
        scope["ds4.request_id"] = request_id.decode()
        scope["ds4.send"] = send

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                if is_anthropic(scope["path"]):  # where Anthropic's clients look for it
                    message["headers"].append((b"request-id", request_id))
                # The client's next request goes to a process that stays.
                if self._state.engine.draining or self._state.leaving:
                    message["headers"].append((b"connection", b"close"))
                status = int(message["status"])
                self._state.engine.metrics.add("ds4_http_responses_total", label=f"{status // 100}xx")
                _log.debug(
                    "%s %s %d",
                    scope["method"],
                    scope["path"],
                    status,
                    extra={"request_id": request_id.decode()},
                )
            await send(message)

        await self._app(scope, receive, observed)


class Authenticate:
    """Lets a request pass with one of the keys, as a bearer token or `x-api-key`."""

    def __init__(self, app: ASGIApp, state: FrontState, keys: Mapping[bytes, Tenant]) -> None:
        self._app = app
        self._state = state
        self._keys = dict(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._known(scope)
        if key is not None:
            scope["ds4.cache_salt"] = self._state.isolation.salt(key)
            scope["ds4.tenant"] = self._keys[key]
            await self._app(scope, receive, send)
            return
        told = failure(UnauthorizedError("a valid API key is needed: Authorization: Bearer KEY"))
        self._state.engine.metrics.add("ds4_requests_rejected_total", label=told.reason)
        await refusal(told, scope)(scope, receive, send)

    def _known(self, scope: Scope) -> bytes | None:
        authorization = _header(scope, b"authorization")
        scheme, _, token = authorization.partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else _header(scope, b"x-api-key")
        # Every key is compared, each in constant time: timing tells nothing.
        known = [hmac.compare_digest(given, key) for key in self._keys]
        return given if any(known) else None


def _header(scope: Scope, name: bytes) -> bytes:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""
