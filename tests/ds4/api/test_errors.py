"""ds4/api/errors.py: one table from exceptions to HTTP."""

import logging

import pytest
from starlette.exceptions import HTTPException

from ds4.api.errors import (
    BodyTooLargeError,
    BusyError,
    DrainingError,
    NotFoundError,
    UnauthorizedError,
    failure,
)
from ds4.errors import (
    ContextOverflowError,
    ErrorCode,
    RequestError,
    RingError,
    RingFullError,
    RingUnavailableError,
    WorkerError,
)


@pytest.mark.parametrize(
    ("error", "status", "code", "reason"),
    [
        (RequestError("x", param="p", code="c"), 400, "c", "invalid"),
        (ContextOverflowError(9, 8, param="p"), 400, "context_length_exceeded", "context"),
        (NotFoundError("x", code="model_not_found"), 404, "model_not_found", ""),
        (BodyTooLargeError("x"), 413, "request_too_large", "too_large"),
        (UnauthorizedError("x"), 401, "invalid_api_key", "unauthorized"),
        (BusyError(7), 429, "server_busy", "full"),
        (RingFullError("x"), 429, "server_busy", "full"),
        (DrainingError("x"), 503, "shutting_down", "draining"),
        (RingUnavailableError("x"), 503, "no_worker", "unavailable"),
        (RingError("x"), 503, "no_worker", "unavailable"),
        (WorkerError("x", code=ErrorCode.INVALID_REQUEST), 400, "invalid_value", ""),
        (WorkerError("x", code=ErrorCode.TOO_LARGE), 400, "context_length_exceeded", ""),
        (WorkerError("x", code=ErrorCode.NUMERIC), 500, "numeric_error", ""),
        (WorkerError("x", code=ErrorCode.DEVICE), 503, "worker_lost", ""),
        (WorkerError("x", code=ErrorCode.SHUTTING_DOWN), 503, "shutting_down", ""),
        (HTTPException(405, headers={"Allow": "POST"}), 405, None, ""),
        (ZeroDivisionError("secret"), 500, "internal_error", ""),
    ],
)
def test_every_exception_has_its_status_and_code(
    error: BaseException, status: int, code: str | None, reason: str
) -> None:
    told = failure(error)
    assert (told.status, told.body.error.code, told.reason) == (status, code, reason)
    assert told.body.error.message
    assert "secret" not in told.body.error.message
    if status in (429, 503):
        assert int(told.headers["Retry-After"]) >= 1


def test_every_worker_code_is_in_the_table() -> None:
    for code in ErrorCode:
        if code is not ErrorCode.NONE:
            assert failure(WorkerError("x", code=code)).body.error.code != "internal_error", code


def test_what_is_ours_is_logged_with_the_request_and_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        failure(ZeroDivisionError("detail"), "request-7")
    (record,) = caplog.records
    assert vars(record)["request_id"] == "request-7"
    assert record.exc_info is not None


def test_an_overlong_prompt_is_refused_in_the_words_that_clients_look_for() -> None:
    message = failure(ContextOverflowError(9_001, 8_192, param="p")).body.error.message
    assert "prompt is too long: 9001 tokens > 8192 maximum" in message
    assert "this model's maximum context length is 8192 tokens" in message
