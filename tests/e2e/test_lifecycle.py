"""Starting, serving, draining and stopping the whole server, as an operator does it."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from tests.support.embedded_model import embedded_model
from tests.support.nginx import free_port
from tests.support.server import (
    DEADLINE_S,
    Running,
    Server,
    chat_request,
    complete,
    delta_text,
    is_alive,
    serving,
    stream_events,
    stream_text,
    wait_until,
)
from tests.support.struck import SLOW

pytestmark = pytest.mark.e2e

ENGINE = ("--device", "reference")
STRUCK = "tests.support.struck"


def test_it_starts_answers_and_stops_without_a_trace(tiny_model: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with serving(tiny_model, *ENGINE, "--shared-dir", str(shared), "--front-ends", "2") as server:
        assert complete(server.url, chat_request("hello", 5))["usage"]["completion_tokens"] == 5
        assert any(shared.iterdir())
        children = server.children()
        assert len(children) == 3
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.log
    assert list(shared.iterdir()) == []
    assert not any(map(is_alive, children))


def test_the_default_shared_directory_is_private_and_removed(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE) as server:
        shared = Path(f"/dev/shm/ds4-server-{os.geteuid()}-{server.port}")
        if not shared.parent.is_dir():
            pytest.skip("this machine has no /dev/shm")
        assert shared.stat().st_mode & 0o777 == 0o700
        server.send(signal.SIGINT)
        assert server.wait() == 0, server.log
    assert not shared.exists()


def test_what_a_killed_server_left_is_swept_at_the_next_start(tiny_model: Path, tmp_path: Path) -> None:
    flags = (*ENGINE, "--shared-dir", str(tmp_path))
    with serving(tiny_model, *flags) as server:
        children = server.children()
        server.send(signal.SIGSTOP)  # else it starts them again, or they end in order when it is gone
        for pid in (*children, server.process.pid):
            os.kill(pid, signal.SIGKILL)
        server.wait()
    assert any(tmp_path.iterdir()), "nothing was left, so this test shows nothing"
    with serving(tiny_model, *flags) as server:
        assert complete(server.url, chat_request("hello", 3))["usage"]["completion_tokens"] == 3
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.log
    assert list(tmp_path.iterdir()) == []


def test_the_printed_curl_line_works(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE) as server:
        server.says("try: curl")
        line = next(line for line in server.output if line.startswith("try: curl"))
        command = shlex.split(line.removeprefix("try: "))
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")
    assert '"content"' in done.stdout


def test_running_streams_finish_after_sigterm_and_new_ones_are_refused(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE) as server:
        body = chat_request("hello", 400, stream=True)
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE_S
        ) as response:
            events = stream_events(response)
            first = next(event for event in events if delta_text(event))
            server.send(signal.SIGTERM)
            server.says("draining")
            rest = list(events)
        finish = [choice["finish_reason"] for event in [first, *rest] for choice in event["choices"]]
        assert finish[-1] == "length"
        assert server.wait() == 0, server.log
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health/live", timeout=DEADLINE_S)


def test_a_stream_that_drains_survives_the_loss_of_the_worker(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, module=STRUCK) as server:
        body = chat_request("hello", 400, stream=True)
        worker = server.worker()
        os.kill(worker, SLOW)
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE_S
        ) as response:
            events = stream_events(response)
            text = delta_text(next(event for event in events if delta_text(event)))
            server.send(signal.SIGTERM)
            server.says("draining")
            os.kill(worker, signal.SIGKILL)
            text += "".join(map(delta_text, events))
        assert server.wait() == 0, server.log
        assert "a request lost its worker" in server.log, "it ended before the worker was lost"
    with serving(tiny_model, *ENGINE) as server:
        assert text == complete(server.url, {**body, "stream": False})["choices"][0]["message"]["content"]


def test_streams_that_outlast_the_drain_deadline_end_in_an_error_event(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, "--drain-timeout-s", "1") as server:
        body = chat_request("hello", 16_000, stream=True)
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE_S
        ) as response:
            lines = response.iter_lines()
            next(line for line in lines if '"content"' in line)
            server.send(signal.SIGTERM)
            last = [line for line in lines if line.startswith("data: ")][-2:]
        assert any('"error"' in line for line in last), last
        assert server.wait() == 0, server.log


def test_a_second_signal_ends_it_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, *ENGINE, "--shared-dir", str(tmp_path)) as server:
        body = chat_request("hello", 16_000, stream=True)
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE_S
        ) as response:
            lines = response.iter_lines()  # held on to: dropping it would close the connection
            next(line for line in lines if '"content"' in line)
            children = server.children()
            server.send(signal.SIGTERM)
            server.says("draining")
            server.send(signal.SIGTERM)
            assert server.wait() == 128 + signal.SIGTERM, server.log
    assert not any(map(is_alive, children))
    assert list(tmp_path.iterdir()) == []


def test_the_children_end_when_the_supervisor_is_killed(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, "--front-ends", "2") as server:
        children = server.children()
        assert len(children) == 3
        server.send(signal.SIGKILL)
        server.wait()
        wait_until(lambda: not any(map(is_alive, children)), "the children's end")


def test_a_killed_front_end_is_replaced(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, "--front-ends", "2") as server:
        before = server.front_ends()
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(now := server.front_ends()) == 2 and now != before, "a new front end")
        # Each connection is fresh, so some meet the new front end; none may be lost.
        for _ in range(16):
            assert complete(server.url, chat_request("hello", 2))["usage"]["completion_tokens"] == 2


def test_a_stream_goes_on_with_the_same_tokens_after_the_worker_was_killed(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, module=STRUCK) as server:
        body = chat_request("hello world", 300, temperature=0.8, seed=7)
        expected = stream_text(server.url, body)
        worker = server.worker()
        os.kill(worker, SLOW)
        body["stream"] = True
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE_S
        ) as response:
            events = stream_events(response)
            text = next(delta for event in events if (delta := delta_text(event)))
            os.kill(worker, signal.SIGKILL)
            text += "".join(delta_text(event) for event in events)
        assert server.worker() != worker
        assert text == expected
        metrics = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
        assert re.search(r"^ds4_resumed_streams_total [1-9]", metrics, re.MULTILINE), metrics
        assert re.search(r"^ds4_worker_restarts_total 1", metrics, re.MULTILINE), metrics


def test_streams_at_once_equal_the_same_requests_alone(tiny_server: Server) -> None:
    bodies = [chat_request(f"request {number}", 24, seed=number, temperature=0.7) for number in range(16)]
    alone = [stream_text(tiny_server.url, body) for body in bodies]
    together = [""] * len(bodies)

    def run(index: int) -> None:
        together[index] = stream_text(tiny_server.url, bodies[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert together == alone


def test_the_seeds_own_command_line_and_batch_log_work(tiny_model: Path) -> None:
    environment = {"DS4_SERVER_BATCH_LOG": "yes", "DS4_SERVER_DECODE_COALESCE_US": "2000"}
    with serving(tiny_model, *ENGINE, "--batched-session", "32", environment=environment) as server:
        complete(server.url, chat_request("hello", 5))
        line = re.compile(r"^ds4-server: decode batch count=1 elapsed=\d+\.\d ms status=ok$")
        wait_until(lambda: any(line.match(entry.rstrip("\n")) for entry in server.errors), "a batch line")


def test_the_ring_command_shows_a_live_ring(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, *ENGINE, "--shared-dir", str(tmp_path)):
        shown = Running(["ds4", "ring", "--shared-dir", str(tmp_path)])
        assert shown.wait() == 0, shown.log
        assert "ready" in shown.log.lower()


def test_the_embedded_model_answers() -> None:
    with serving(embedded_model()) as server:
        body = chat_request("What is the capital of France? Answer in one word.", 8, ignore_eos=False)
        answer = complete(server.url, body)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_roles_alone_find_each_other(tiny_model: Path, tmp_path: Path) -> None:
    environment = {"DS4_SERVER_SHARED_DIR": str(tmp_path), "DS4_SERVER_MODEL": str(tiny_model)}
    with contextlib.ExitStack() as stack:
        port = free_port()
        front = Running(["ds4", "front", "--port", str(port)], environment)
        stack.callback(front.kill)
        url = f"http://127.0.0.1:{port}"

        def status(path: str) -> int:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(url + path, timeout=DEADLINE_S).status_code
            assert front.process.poll() is None, front.log
            return 0

        wait_until(lambda: status("/health/live") == 200, "the front end")
        assert status("/health/ready") == 503, "ready without a worker"
        worker = Running(["ds4", "worker", *ENGINE], environment)
        stack.callback(worker.kill)
        wait_until(lambda: status("/health/ready") == 200, "the worker")
        assert complete(url, chat_request("hello", 4))["usage"]["completion_tokens"] == 4
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.log
        front.send(signal.SIGTERM)
        assert front.wait() == 0, front.log
