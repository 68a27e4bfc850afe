"""The one table from exceptions to HTTP, and the OpenAI error body.

Owns: status codes, error types and codes. Runs in: front ends. Source: the OpenAI API reference for
the shape; llama-server for the two token counts of a context overflow.
"""

import logging
from http import HTTPStatus
from typing import Final, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ds4.api.response_store import StoreError
from ds4.errors import (
    ContextOverflowError,
    Ds4Error,
    ErrorCode,
    RequestError,
    RingError,
    RingFullError,
    RingUnavailableError,
    WorkerError,
)
from ds4.protocol.common import ErrorBody, ErrorDetail

_log = logging.getLogger(__name__)

RejectReason = Literal[
    "", "full", "unavailable", "draining", "invalid", "context", "too_large", "unauthorized", "key_limit"
]


class BusyError(RingFullError):
    """Every slot is taken. `retry_after_s` is when one is likely to be free."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(
            "the server is at capacity: its places for requests (--slots-per-front-end) are taken; "
            f"try again in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class KeyLimitError(Ds4Error):
    """The client's API key has used up what it may use; the message names the limit."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(RingUnavailableError):
    """The server is about to stop."""


class NotFoundError(RequestError):
    """What the path names does not exist."""


class BodyTooLargeError(RequestError):
    """The body is over the limit."""


class BodyTimeoutError(RequestError):
    """The body did not arrive in time."""


class UnauthorizedError(RequestError):
    """No key, or a wrong one."""


class ClientGoneError(Ds4Error):
    """Nobody is there to answer."""


class _Rule(msgspec.Struct, frozen=True):
    status: int
    kind: str
    code: str | None = None
    reason: RejectReason = ""


# The first entry whose class fits decides.
_TABLE: Final[tuple[tuple[type[BaseException], _Rule], ...]] = (
    # The type is llama-server's, whose clients look at it; OpenAI's look at the code.
    (ContextOverflowError, _Rule(400, "exceed_context_size_error", None, "context")),
    (NotFoundError, _Rule(404, "invalid_request_error")),
    (BodyTooLargeError, _Rule(413, "invalid_request_error", "request_too_large", "too_large")),
    (BodyTimeoutError, _Rule(408, "invalid_request_error", "request_timeout", "invalid")),
    (UnauthorizedError, _Rule(401, "authentication_error", "invalid_api_key", "unauthorized")),
    (RequestError, _Rule(400, "invalid_request_error", None, "invalid")),
    (KeyLimitError, _Rule(429, "rate_limit_error", "rate_limit_exceeded", "key_limit")),
    (RingFullError, _Rule(429, "rate_limit_error", "server_busy", "full")),
    (DrainingError, _Rule(503, "service_unavailable_error", "shutting_down", "draining")),
    (RingUnavailableError, _Rule(503, "service_unavailable_error", "no_worker", "unavailable")),
    (RingError, _Rule(503, "service_unavailable_error", "no_worker", "unavailable")),
    (StoreError, _Rule(503, "service_unavailable_error", "store_unavailable", "unavailable")),
)
_WORKER: Final = {
    ErrorCode.INVALID_REQUEST: _Rule(400, "invalid_request_error", "invalid_value"),
    ErrorCode.TOO_LARGE: _Rule(400, "invalid_request_error", "context_length_exceeded"),
    ErrorCode.GRAMMAR: _Rule(400, "invalid_request_error", "grammar_failed"),
    ErrorCode.NUMERIC: _Rule(500, "server_error", "numeric_error"),
    ErrorCode.DEVICE: _Rule(503, "service_unavailable_error", "worker_lost"),
    ErrorCode.QUARANTINED: _Rule(500, "server_error", "request_quarantined"),
    ErrorCode.SHUTTING_DOWN: _Rule(503, "service_unavailable_error", "shutting_down"),
}
_INTERNAL: Final = _Rule(500, "server_error", "internal_error")
_HTTP_KINDS: Final = {404: "invalid_request_error", 405: "invalid_request_error"}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a client is told of an exception."""

    status: int
    body: ErrorBody
    headers: dict[str, str]
    reason: RejectReason

    def response(self) -> Response:
        """As an HTTP answer."""
        return Response(
            msgspec.json.encode(self.body),
            self.status,
            headers=self.headers,
            media_type="application/json",
        )


def failure(error: BaseException, request_id: str = "") -> Failure:
    """The table applied. What it does not know is logged with its trace and hidden from the client."""
    headers: dict[str, str] = {}
    message = str(error)
    if isinstance(error, HTTPException):
        rule = _Rule(error.status_code, _HTTP_KINDS.get(error.status_code, "server_error"))
        headers.update(error.headers or {})
        message = str(error.detail)
    elif isinstance(error, WorkerError):
        rule = _WORKER.get(error.code, _INTERNAL)
        # What a grammar failed on quotes the client's schema and the model's output.
        reason = "the client knows why" if error.code is ErrorCode.GRAMMAR else error
        _log.warning(
            "a request failed (%s): %s", error.code.name.lower(), reason, extra={"request_id": request_id}
        )
    else:
        found = next((rule for kind, rule in _TABLE if isinstance(error, kind)), None)
        if found is None:
            _log.error("unexpected error in a request", exc_info=error, extra={"request_id": request_id})
            message = "internal error"
        rule = found or _INTERNAL
    if isinstance(error, (BusyError, KeyLimitError)):
        headers["Retry-After"] = str(error.retry_after_s)
    elif rule.status in (429, 503):
        headers["Retry-After"] = "1"
    if isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTimeoutError):
        headers["Connection"] = "close"  # the rest of the body is not waited for
    detail = ErrorDetail(
        message=message or HTTPStatus(rule.status).phrase,
        type=rule.kind,
        param=error.param if isinstance(error, RequestError) else None,
        code=(error.code if isinstance(error, RequestError) else None) or rule.code,
        n_prompt_tokens=error.num_prompt_tokens if isinstance(error, ContextOverflowError) else 0,
        n_ctx=error.max_context_tokens if isinstance(error, ContextOverflowError) else 0,
    )
    return Failure(status=rule.status, body=ErrorBody(detail), headers=headers, reason=rule.reason)
