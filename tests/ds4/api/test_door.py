"""ds4/api/door.py: refused before the body, in the path's dialect, and not too many at a time."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from ds4.api.door import BURST, MAX_HOLD_S, PER_SECOND, TICK_S, Pace
from tests.support.front_rig import DEADLINE_S, Front, until, with_front

_ONE_SLOT: dict[str, Any] = {"slots_per_front_end": 1, "worker": {"slots_per_front_end": 1}}


async def _fill(front: Front) -> "asyncio.Future[Any]":
    """Take the only slot until the worker is released."""
    assert front.worker is not None
    front.worker.hold_after(0)
    running = asyncio.ensure_future(front.chat())
    await until(lambda: front.state.engine.num_running == 1)
    return running


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", None),
        ("/chat/completions", None),
        ("/v1/completions", None),
        ("/completions", None),
        ("/v1/responses", None),
        ("/responses", None),
        ("/v1/messages", "error"),
        ("/completion", None),
        ("/infill", None),
    ],
)
def test_every_dialect_names_the_limit_and_when_to_come_back(
    tmp_path: Path, path: str, kind: str | None
) -> None:
    async def scenario(front: Front) -> None:
        running = await _fill(front)
        response = await front.client.post(
            path, content=b"not looked at", headers={"origin": "http://a.test"}
        )
        assert response.status_code == 429
        assert response.json().get("type") == kind
        error = response.json()["error"]
        assert error["type"] == "rate_limit_error"
        seconds = int(response.headers["retry-after"])
        assert seconds >= 1
        assert "--slots-per-front-end" in error["message"]
        assert f"try again in {seconds} s" in error["message"]
        assert response.headers["x-request-id"]
        assert response.headers["access-control-allow-origin"] == "*"
        metrics = front.state.engine.metrics
        assert metrics.value("ds4_requests_rejected_total", "full") == 1
        assert metrics.value("ds4_http_responses_total", "4xx") == 1
        # What needs no slot is answered as ever.
        assert (await front.client.post("/tokenize", json={"content": "hello"})).status_code == 200
        assert front.worker is not None
        front.worker.release()
        assert (await running).status_code == 200
        assert (await front.client.post(path, content=b"not looked at")).status_code == 400

    with_front(tmp_path, scenario, cors="*", **_ONE_SLOT)


def test_a_wrong_key_is_told_so_rather_than_to_come_back(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        front.client.headers["x-api-key"] = "right"
        running = await _fill(front)
        assert (await front.chat()).status_code == 429
        front.client.headers["x-api-key"] = "wrong"
        assert (await front.chat()).status_code == 401
        assert front.worker is not None
        front.worker.release()
        assert (await running).status_code == 200

    with_front(tmp_path, scenario, api_key="right", **_ONE_SLOT)


def test_the_answer_does_not_wait_for_the_body_and_the_connection_goes_on(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        running = await _fill(front)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        writer.write(b"x" * 500_000 + b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        assert front.worker is not None
        front.worker.release()
        assert (await running).status_code == 200

    with_front(tmp_path, scenario, **_ONE_SLOT)


async def _hold(front: Front, monkeypatch: pytest.MonkeyPatch, num: int = 1) -> list[Any]:
    """Requests that are held at the door, for longer than a test may take; the first is first."""
    num_held = 0

    def hold_s(pace: Pace, now_s: float) -> float:
        nonlocal num_held
        num_held += 1
        return 2 * DEADLINE_S

    monkeypatch.setattr(Pace, "hold_s", hold_s)
    held: list[Any] = []
    for _ in range(num):
        held.append(asyncio.ensure_future(front.chat()))
        await until(lambda: num_held == len(held))
    return held


def test_who_is_held_gets_the_slot_that_becomes_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(front: Front) -> None:
        running = await _fill(front)
        held = await _hold(front, monkeypatch, 3)
        assert front.worker is not None
        front.worker.release()
        assert (await running).status_code == 200
        assert [(await each).status_code for each in held] == [200, 200, 200]

    with_front(tmp_path, scenario, **_ONE_SLOT)


def test_who_hung_up_while_it_was_held_takes_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(front: Front) -> None:
        running = await _fill(front)
        gone, held = await _hold(front, monkeypatch, 2)
        gone.cancel()
        assert front.worker is not None
        front.worker.release()
        assert (await running).status_code == 200
        assert (await held).status_code == 200
        assert len(front.worker.requests) == 2

    with_front(tmp_path, scenario, **_ONE_SLOT)


def test_who_is_held_is_told_before_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(front: Front) -> None:
        running = await _fill(front)
        (held,) = await _hold(front, monkeypatch)
        front.server.handle_exit(signal.SIGTERM, None)
        answer = await held
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        assert front.worker is not None
        front.worker.release()
        assert (await running).status_code == 200

    with_front(tmp_path, scenario, **_ONE_SLOT)


def test_refusals_leave_at_a_bounded_rate() -> None:
    pace = Pace()
    num_paced = int(PER_SECOND * MAX_HOLD_S)
    holds = [pace.hold_s(1000.0) for _ in range(BURST + 2 * num_paced)]
    assert holds[:BURST] == [0.0] * BURST
    assert holds[BURST:] != sorted(holds[BURST:]), "beyond the pace they are spread"
    for number, hold in enumerate(holds[BURST : BURST + num_paced], start=1):
        assert -1e-6 <= hold - number / PER_SECOND <= TICK_S + 1e-6
    assert all(MAX_HOLD_S / 2 <= hold <= MAX_HOLD_S + TICK_S for hold in holds[BURST + num_paced :])
    ticks = [(1000.0 + hold) / TICK_S for hold in holds[BURST:]]
    assert ticks == pytest.approx(list(map(round, ticks)), abs=1e-4), "the held leave together"
    assert pace.hold_s(1000.0 + 2 * MAX_HOLD_S) == 0.0, "what is over is forgotten"
