"""ds4/api/health.py: live while the process answers, ready while a request would be served."""

from pathlib import Path

import pytest

from ds4.api import health
from ds4.ring.states import WorkerState
from tests.support.front_rig import Front, until, with_front


async def _statuses(front: Front) -> list[int]:
    paths = ("/health/live", "/health/ready", "/health")
    return [(await front.client.get(path)).status_code for path in paths]


def test_ready_follows_the_worker(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert await _statuses(front) == [200, 503, 503]
        worker = front.start_worker("x")
        await front.ready()
        assert await _statuses(front) == [200, 200, 200]
        worker.stop()
        await until(lambda: not front.state.engine.ready)
        assert await _statuses(front) == [200, 503, 503]

    with_front(tmp_path, scenario, None)


def test_a_draining_worker_is_not_ready(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        front.start_worker("x", state=WorkerState.DRAINING)
        await until(lambda: front.state.engine.ring.attached)
        response = await front.client.get("/health/ready")
        assert response.status_code == 503
        assert "draining" in response.json()["error"]["message"]

    with_front(tmp_path, scenario, None)


def test_a_worker_that_hangs_is_not_ready_until_it_moves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WEDGED_S", 0.3)

    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        ring = front.state.engine.ring
        worker.freeze()
        await until(lambda: ring.worker_silent_s > 0.3)
        response = await front.client.get("/health/ready")
        assert response.status_code == 503
        assert "has not answered" in response.json()["error"]["message"]
        worker.thaw()
        while (await front.client.get("/health/ready")).status_code != 200:
            pass

    with_front(tmp_path, scenario)


def test_a_draining_front_end_is_not_ready(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        front.state.engine.draining = True
        assert await _statuses(front) == [200, 503, 503]
        response = await front.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"

    with_front(tmp_path, scenario)
