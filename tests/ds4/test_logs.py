"""The log format, and the batch line that other people's tools parse."""

import json
import logging
from collections.abc import Iterator

import pytest

from ds4.config import Settings
from ds4.logs import log_batch, setup_logging


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == "", "logs go to standard error only"
    return captured.err.splitlines()


def test_a_text_line_is_key_value_pairs_with_the_extra_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(Settings(), "front-3")
    logging.getLogger("ds4.x").info("request %s ended", "one", extra={"request_id": "r-1", "count": 3})
    (line,) = _lines(capsys)
    assert "level=info role=front-3" in line
    assert 'msg="request one ended"' in line
    assert line.endswith("request_id=r-1 count=3")


def test_a_json_line_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(Settings(log_format="json"), "worker")
    logging.getLogger("ds4.x").warning('with "quotes"\nand a break', extra={"request_id": "r-1"})
    (line,) = _lines(capsys)
    entry = json.loads(line)
    assert entry["msg"] == 'with "quotes"\nand a break'
    assert (entry["level"], entry["role"], entry["request_id"]) == ("warning", "worker", "r-1")


def test_text_from_outside_cannot_start_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(Settings(), "front")
    logging.getLogger("ds4.x").info("%s", "a\nlevel=critical msg=forged")
    assert len(_lines(capsys)) == 1


def test_a_trace_stays_on_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(Settings(), "worker")
    try:
        raise ValueError("the reason")
    except ValueError:
        logging.getLogger("ds4.x").exception("failed")
    (line,) = _lines(capsys)
    assert "ValueError: the reason" in line


def test_setting_up_twice_leaves_one_handler(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(Settings(), "a")
    setup_logging(Settings(log_level="warning"), "b")
    logging.getLogger("ds4.x").warning("once")
    logging.getLogger("ds4.x").info("hidden")
    assert len(_lines(capsys)) == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_batch_line_is_bare_and_shown_at_every_level(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(Settings(log_level="error", log_format=log_format), "worker")
    log_batch(28, 0.0123)
    log_batch(1, 0.5, "out of memory")
    assert _lines(capsys) == [
        "ds4-server: decode batch count=28 elapsed=12.3 ms status=ok",
        "ds4-server: decode batch count=1 elapsed=500.0 ms status=error out of memory",
    ]
