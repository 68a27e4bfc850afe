"""Logging: one handler on standard error, as key=value text or JSON, and the batch line.

Owns the log format. Runs in every process, set up once by its entry point. Lines about a request
carry `request_id` through `extra=`; prompts and output are never logged. Logs go to standard error
only, so that a container's runtime collects them without configuration.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

from ds4.config import Settings

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}
_BATCH: Final = logging.getLogger("ds4.batch")


def _fields(record: logging.LogRecord, role: str) -> dict[str, Any]:
    """What a line says, in order: the fixed fields, what `extra=` added, the trace."""
    when = datetime.fromtimestamp(record.created, UTC)
    fields: dict[str, Any] = {
        "ts": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "role": role,
        "pid": record.process,
        "logger": record.name,
        "msg": record.getMessage(),
    }
    fields |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if record.exc_info:
        fields["trace"] = logging.Formatter().formatException(record.exc_info)
    return fields


class TextFormatter(logging.Formatter):
    """`key=value` pairs on one line; a value with spaces, quotes or controls is a JSON string."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        if record.name == _BATCH.name:
            return record.getMessage()
        return " ".join(f"{key}={_quoted(value)}" for key, value in _fields(record, self.role).items())


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        """One object; values that JSON lacks become text."""
        if record.name == _BATCH.name:
            return record.getMessage()
        return json.dumps(_fields(record, self.role), ensure_ascii=False, default=str)


def _quoted(value: object) -> str:
    text = str(value)
    plain = text != "" and text.isprintable() and not any(character in ' "=' for character in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def setup_logging(settings: Settings, role: str) -> None:
    """Send everything to one handler on standard error. `role` names the process in each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role) if settings.log_format == "json" else TextFormatter(role))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(settings.log_level.upper())
    # Asked for by its own setting, so no level hides it.
    _BATCH.setLevel(logging.INFO)
    # Access lines carry paths with query strings, and uvicorn's own start-up chatter repeats ours.
    for name in ("uvicorn.access", "asyncio", "httpcore", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)


def log_batch(count: int, elapsed_s: float, failure: str = "") -> None:
    """The batch line, exactly as the C server prints it: other people's tools parse it.

    It is written bare, without the fields of other lines. `failure` is the reason of a failed step.
    """
    status = f"error {failure}" if failure else "ok"
    _BATCH.info(
        "ds4-server: decode batch count=%d elapsed=%.1f ms status=%s", count, elapsed_s * 1000, status
    )
