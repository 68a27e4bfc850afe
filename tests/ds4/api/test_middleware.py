"""ds4/api/middleware.py: request ids, counts, keys, and CORS."""

from pathlib import Path

import pytest

from ds4.api.keys import load_keys
from ds4.config import Settings
from ds4.errors import ConfigError
from tests.support.front_rig import Front, with_front


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer two"}, 200),
        ({"x-api-key": "three"}, 200),
        ({"Authorization": "Bearer on"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"x-api-key": "one,two"}, 401),
        ({"Authorization": "Bearer one", "x-api-key": "wrong"}, 200),
    ],
)
def test_a_key_opens_the_routes(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# comment\n\nthree\n")

    async def scenario(front: Front) -> None:
        response = await front.client.get("/v1/models", headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await front.client.get("/health/live")).status_code == 200
        assert (await front.client.get("/metrics", headers=headers)).status_code == status

    with_front(tmp_path, scenario, None, api_key="one, two", api_key_file=str(keys))


def test_an_unusable_key_file_ends_the_start(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for path in (tmp_path / "missing", empty):
        with pytest.raises(ConfigError, match="key"):
            load_keys(Settings(api_key_file=str(path)))


def test_the_clients_request_id_comes_back_and_an_odd_one_is_replaced(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await front.client.get("/health/live", headers={"x-request-id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
        response = await front.client.get("/nothing", headers={"x-request-id": "a b"})
        assert len(response.headers["x-request-id"]) == 16

    with_front(tmp_path, scenario, None)


def test_answers_are_counted_by_status_class(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        await front.client.get("/version")
        await front.client.get("/nothing")
        await front.client.get("/health")
        metrics = front.state.engine.metrics
        classes = ("2xx", "4xx", "5xx")
        assert [metrics.value("ds4_http_responses_total", each) for each in classes] == [1, 1, 1]

    with_front(tmp_path, scenario, None)


def test_cors_is_off_unless_asked_for(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await front.client.get("/version", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers

    with_front(tmp_path, scenario, None)


def test_cors_admits_the_configured_origins_and_preflight_needs_no_key(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        origin = {"Origin": "https://a.example"}
        response = await front.client.get("/version", headers=origin)
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        preflight = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        response = await front.client.options("/v1/chat/completions", headers=origin | preflight)
        assert response.status_code == 200
        assert "authorization" in response.headers["access-control-allow-headers"].lower()
        response = await front.client.get("/version", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in response.headers

    with_front(tmp_path, scenario, None, cors="https://a.example", api_key="one")
