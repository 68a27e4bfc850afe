"""ds4/api/app.py: routes, methods, refusals that hold for all of them."""

import asyncio
from pathlib import Path

import pytest

from ds4.errors import RequestError
from tests.support.front_rig import Front, until, with_front


def test_an_unknown_route_is_404_with_an_error_body(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await front.client.get("/v1/nothing")
        assert response.status_code == 404
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    with_front(tmp_path, scenario, None)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("PUT", "/v1/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/health", {"GET", "HEAD"}),
        ("GET", "/tokenize", {"POST"}),
    ],
)
def test_a_wrong_method_is_405_and_says_what_is_allowed(
    tmp_path: Path, method: str, path: str, allowed: set[str]
) -> None:
    async def scenario(front: Front) -> None:
        response = await front.client.request(method, path)
        assert response.status_code == 405
        assert set(response.headers["allow"].split(", ")) == allowed
        assert "error" in response.json()

    with_front(tmp_path, scenario, None)


def test_head_works_where_get_does(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        for path in ("/health/live", "/v1/models", "/metrics", "/slots", "/version", "/props"):
            got, head = await front.client.get(path), await front.client.head(path)
            assert head.status_code == got.status_code == 200
            assert head.content == b""
            assert head.headers["content-type"] == got.headers["content-type"]

    with_front(tmp_path, scenario)


def test_openai_routes_have_aliases_without_the_version(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert (await front.client.post("/chat/completions", json=chat)).status_code == 200
        assert (await front.client.post("/completions", json={"prompt": "x"})).status_code == 200
        assert (await front.client.get("/models")).json() == (await front.client.get("/v1/models")).json()

    with_front(tmp_path, scenario)


def test_without_a_free_slot_the_answer_is_429_with_a_time_to_wait(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(0)
        running = [asyncio.ensure_future(front.chat()) for _ in range(2)]
        await until(lambda: len(worker.requests) == 2)
        for fields in ({}, {"stream": True}, {"n": 2}):
            response = await front.chat(**fields)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "server_busy"
        assert front.state.engine.metrics.value("ds4_requests_rejected_total", "full") == 3
        worker.release()
        assert [(await each).status_code for each in running] == [200, 200]

    with_front(tmp_path, scenario, slots_per_front_end=2, worker={"slots_per_front_end": 2})


def test_siblings_that_do_not_all_fit_are_all_given_back(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(0)
        running = asyncio.ensure_future(front.chat())
        await until(lambda: len(worker.requests) == 1)
        assert (await front.chat(n=2)).status_code == 429
        await until(lambda: front.state.engine.ring.num_free_slots == 1)
        worker.release()
        assert (await running).status_code == 200
        assert (await front.chat(n=2)).status_code == 200
        response = await front.chat(n=3)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "n"

    with_front(tmp_path, scenario, slots_per_front_end=2, worker={"slots_per_front_end": 2})


def test_who_comes_between_two_workers_waits_for_the_next(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.stop()
        await until(lambda: not front.state.engine.ready)
        waiting = asyncio.ensure_future(front.chat())
        await until(lambda: front.state.engine.num_preparing == 1)
        front.start_worker("hello world")
        assert (await waiting).status_code == 200

    with_front(tmp_path, scenario)


def test_without_a_worker_requests_are_503_and_the_rest_still_answers(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await front.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_worker"
        assert response.headers["retry-after"] == "1"
        for path in ("/v1/models", "/metrics", "/slots", "/props", "/health/live"):
            assert (await front.client.get(path)).status_code == 200, path

    with_front(tmp_path, scenario, None)


def test_a_worker_with_another_tokenizer_is_not_used(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        right = front.state.model.file.tokenizer_hash
        front.state.model.file.tokenizer_hash = "f" * 64
        front.start_worker("hello")
        front.state.model.file.tokenizer_hash = right
        await until(lambda: front.state.engine.ring.attached)
        response = await front.chat()
        assert response.status_code == 503
        assert "another model" in response.json()["error"]["message"]
        assert (await front.client.get("/health/ready")).status_code == 503

    with_front(tmp_path, scenario, None)


def test_an_unexpected_exception_is_500_and_hides_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(front: Front) -> None:
        def fault(*_: object, **__: object) -> list[int]:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(front.state.model.tokenizer, "encode_rendered", fault)
        response = await front.chat()
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.json()["error"]["code"] == "internal_error"

    with_front(tmp_path, scenario)


def test_a_template_that_raises_is_the_clients_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(front: Front) -> None:
        def fault(*_: object, **__: object) -> str:
            raise RequestError("roles must alternate", param="messages")

        monkeypatch.setattr(front.state.model.template, "render", fault)
        response = await front.chat()
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "roles must alternate"

    with_front(tmp_path, scenario)
