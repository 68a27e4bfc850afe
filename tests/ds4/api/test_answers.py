"""ds4/api/answers.py: how a stream ends when its end fails."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ds4.api.answers import stream_frames
from ds4.api.choices import Choice, Choices
from ds4.api.errors import Failure
from ds4.api.exchange import Exchange
from ds4.api.state import FrontState
from ds4.config import Settings
from ds4.metrics import Metrics
from tests.support.tiny_model import write_tiny_model


def test_an_error_in_the_last_event_becomes_an_error_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read here")

    async def last() -> bytes:
        raise RuntimeError("secret")

    def writer(choice: Choice) -> Any:
        raise AssertionError("there is no choice")

    def failed(told: Failure) -> bytes:
        return b"failed: " + told.body.error.message.encode()

    async def scenario() -> None:
        settings = Settings(shared_dir=str(tmp_path / "shared"))
        state = FrontState.build(settings, write_tiny_model(tmp_path / "tiny.gguf"))
        monkeypatch.setattr(state.engine, "_metrics", Metrics.open(tmp_path, owner=0))
        exchange = Exchange(state, {"type": "http", "headers": []}, receive, send)
        await stream_frames(exchange, Choices([], 0), writer, last, failed)
        state.engine.metrics.close()

    asyncio.run(scenario())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1] == {"type": "http.response.body", "body": b"failed: internal error", "more_body": False}
