"""The exception tree, and the numeric code of each error that crosses the ring.

Runs in every process; imports nothing of ours. Exceptions carry fields, so that one table
(`ds4/api/errors.py`) can turn them into HTTP.
"""

from enum import IntEnum


class ErrorCode(IntEnum):
    """Why a request ended in an error, as the worker writes it into a final event (u32)."""

    NONE = 0
    INVALID_REQUEST = 1  # a field the worker checked again was out of range
    NUMERIC = 2  # the model produced NaN for this row
    TOO_LARGE = 3  # the request alone needs more KV pages than exist
    DEVICE = 4  # the device failed and the sequence could not be replayed
    SHUTTING_DOWN = 5  # the worker's drain deadline passed
    GRAMMAR = 6  # the output cannot be made to match the request's grammar
    QUARANTINED = 7  # in flight at too many crashes of the worker


class Ds4Error(Exception):
    """Root of everything this product raises on purpose."""


class ConfigError(Ds4Error):
    """A setting, file or directory the operator must change. Start-up ends with exit code 2.

    `setting` names the variable or flag where one is at fault.
    """

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


class ModelFileError(ConfigError):
    """The GGUF file is missing, corrupt, hostile, or of a kind we do not run. `path` names it."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message, setting="model")
        self.path = path


class RingError(Ds4Error):
    """The shared-memory ring cannot be used."""


class RingVersionError(RingError):
    """The segment was made by another version of the protocol."""


class RingFullError(RingError):
    """No free slot at this front end, or no room in the shared directory: try again later."""


class RingTakenError(RingError):
    """Another worker lives in the shared directory."""


class RingUnavailableError(RingError):
    """No worker is attached right now."""


class WorkerLostError(RingUnavailableError):
    """The worker of a running request, process `worker_pid`, is gone. `crashed`: it did not leave in order;
    `is_explained`: while a suspect had its turn, which is then to blame.
    """

    def __init__(self, message: str, *, worker_pid: int, crashed: bool, is_explained: bool) -> None:
        super().__init__(message)
        self.worker_pid = worker_pid
        self.crashed = crashed
        self.is_explained = is_explained


class RequestError(Ds4Error):
    """The client's fault. `param` is the field, `code` a stable machine-readable name."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextOverflowError(RequestError):
    """The prompt does not fit the context window."""

    def __init__(self, num_prompt_tokens: int, max_context_tokens: int, *, param: str) -> None:
        super().__init__(
            # agents and gateways look for these two phrases to know that they must shorten the history
            f"prompt is too long: {num_prompt_tokens} tokens > {max_context_tokens} maximum; "
            f"this model's maximum context length is {max_context_tokens} tokens",
            param=param,
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_context_tokens = max_context_tokens


class WorkerError(Ds4Error):
    """Our fault: the worker ended the request. `code` says why."""

    def __init__(self, message: str, *, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code
