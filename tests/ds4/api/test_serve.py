"""ds4/api/serve.py: an orderly end. The process itself is tested end to end."""

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from ds4.api.serve import run_front
from ds4.config import Settings
from ds4.errors import ConfigError
from tests.support.front_rig import Front, until, with_front
from tests.support.tiny_model import write_tiny_model


def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(1)
        asking = asyncio.ensure_future(front.chat())
        await until(lambda: bool(worker.requests))
        front.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: front.state.engine.draining)
        response = await front.client.get("/health/ready")
        assert response.status_code == 503
        assert response.headers["connection"] == "close"
        assert (await front.client.get("/health/live")).status_code == 200
        assert (await front.chat()).json()["error"]["code"] == "shutting_down"
        assert not front.server.should_exit
        worker.release()
        assert (await asking).json()["choices"][0]["message"]["content"] == "hello world"
        await until(lambda: front.server.should_exit)

    with_front(tmp_path, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_after_the_deadline_the_rest_gets_an_error(tmp_path: Path, stream: bool) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(1)
        asking = asyncio.ensure_future(front.chat(stream=stream))
        await until(lambda: bool(worker.requests))
        front.server.handle_exit(signal.SIGINT, None)
        response = await asking
        assert response.status_code == (200 if stream else 503)
        assert '"code":"shutting_down"' in response.text
        await until(lambda: front.server.should_exit)

    with_front(tmp_path, scenario, drain_timeout_s=0)


def test_a_hung_worker_does_not_keep_clients_from_their_error(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(1)
        asking = asyncio.ensure_future(front.events())
        await until(lambda: bool(worker.requests) and worker.requests[0].num_sent == 1)
        worker.freeze()
        front.server.handle_exit(signal.SIGTERM, None)
        *_, error, done = await asking
        assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
        worker.thaw()

    with_front(tmp_path, scenario, drain_timeout_s=0)


def test_an_idle_server_ends_at_once(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        front.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: front.server.should_exit)

    with_front(tmp_path, scenario)


def test_a_port_in_use_is_a_setting_to_change(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        settings = Settings(
            model=str(write_tiny_model(tmp_path / "other.gguf")),
            port=front.port,
            shared_dir=str(tmp_path / "other"),
        )
        with pytest.raises(ConfigError, match="--port"):
            await asyncio.to_thread(run_front, settings)
        assert not (tmp_path / "other").exists()

    with_front(tmp_path, scenario, None)


def test_many_connections_are_accepted_in_a_turn_of_the_loop(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        clients = [socket.create_connection(("127.0.0.1", front.port)) for _ in range(64)]
        turns = 0
        while len(front.server.server_state.connections) < len(clients):
            await asyncio.sleep(0)
            turns += 1
        assert turns < len(clients) // 2
        for client in clients:
            client.close()

    with_front(tmp_path, scenario, None)
