"""What no blow may break: hung processes, replacements while streams run, requests that kill the worker."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ds4.children import MemoryWatch
from ds4.ring.control import ControlPage
from ds4.ring.segment import attach_segment
from tests.support.server import (
    DEADLINE_S,
    Running,
    Server,
    chat_request,
    complete,
    delta_text,
    serving,
    stream_text,
    wait_until,
)
from tests.support.struck import FAST, SLOW

pytestmark = pytest.mark.e2e

ENGINE = ("--device", "reference")
STRUCK = "tests.support.struck"
# All that a new worker has to rebuild from the tokens so far.
SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 7,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.2,
    "stop": ["never in it"],
}


class Stream:
    """One stream, read in a thread of its own while the test does something to the server."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.text = ""
        self.num_comments = 0
        self.error: Exception | None = None
        self._is_done = False
        self._begun = threading.Event()
        self._url, self._body = server.url, {**body, "stream": True}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._begun.wait(DEADLINE_S)

    def _run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/chat/completions", json=self._body, timeout=DEADLINE_S
            ) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    self._take(line)
        except Exception as error:  # noqa: BLE001 - the test asks for it
            self.error = error
        finally:
            self._begun.set()

    def _take(self, line: str) -> None:
        self.num_comments += line.startswith(":")
        self._is_done = self._is_done or line == "data: [DONE]"
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            self.text += delta_text(event)
            if self.text:
                self._begun.set()

    def whole(self) -> str:
        """Its text, once it ended without an error."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        assert self._is_done
        return self.text


@contextlib.contextmanager
def knocking(server: Server) -> Iterator[Callable[[], int]]:
    """Requests on new connections without a pause; none may fail. Yields how many there were so far."""
    stop, failures, count = threading.Event(), [], 0

    def knock() -> None:
        nonlocal count
        while not stop.is_set():
            try:
                complete(server.url, chat_request("hello", 2))
                count += 1
            except Exception as error:  # noqa: BLE001 - reported below
                failures.append(error)

    threads = [threading.Thread(target=knock) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: count
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert failures == []
    assert count > 0


def reload(server: Server, *what: str) -> str:
    """Run `ds4-server reload` beside the server; its one line."""
    command = Running(["ds4", "reload", *what, "--port", str(server.port)])
    assert command.wait() == 0, command.log + server.log
    return command.log


def ready_status(server: Server) -> int:
    """The status of one readiness question."""
    return httpx.get(f"{server.url}/health/ready", timeout=DEADLINE_S).status_code


def test_a_stopped_worker_is_noticed_and_replaced_under_its_streams(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, "--front-ends", "1", module=STRUCK) as server:
        body = chat_request("hello world", 300, **SAMPLED)
        expected = stream_text(server.url, body)
        worker = server.worker()
        os.kill(worker, SLOW)
        stream = Stream(server, body)
        server.send(signal.SIGSTOP)  # so that readiness does not fail for want of a worker
        os.kill(worker, signal.SIGSTOP)
        wait_until(lambda: ready_status(server) == 503, "readiness to fail")
        server.send(signal.SIGCONT)
        assert stream.whole() == expected
        assert stream.num_comments > 0, "the client saw a silence of ten seconds"
        assert server.worker() != worker
        wait_until(lambda: ready_status(server) == 200, "readiness")
        server.says("child does not answer, killed")


def test_it_is_noted_which_worker_somebody_killed(tiny_model: Path, tmp_path: Path) -> None:
    if not MemoryWatch().is_clear(0.0):
        pytest.skip("this kernel does not count its kills for want of memory")
    shared = tmp_path / "shared"
    with serving(tiny_model, *ENGINE, "--front-ends", "1", "--shared-dir", str(shared)) as server:
        page = ControlPage(shared)
        for blow, is_noted in ((signal.SIGSEGV, False), (signal.SIGKILL, True)):
            worker = server.worker()
            wait_until(lambda: ready_status(server) == 200, "readiness")
            assert attach_segment(shared, writable=False).worker_pid == worker
            os.kill(worker, blow)
            wait_until(lambda worker=worker: worker != server.worker(), "the next one")  # type: ignore[misc]
            assert page.killed_worker == (worker if is_noted else 0)
        page.close()


def test_a_stopped_front_end_is_replaced_and_the_others_serve_on(tiny_model: Path) -> None:
    flags = (*ENGINE, "--front-ends", "2", "--front-end-timeout-s", "5")
    with serving(tiny_model, *flags) as server:
        stopped = server.front_ends()[0]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: stopped not in (now := server.front_ends()) and len(now) == 2, "its replacement")
        for _ in range(8):
            assert complete(server.url, chat_request("hello", 2))["usage"]["completion_tokens"] == 2


def test_front_ends_are_replaced_without_a_refused_connection_or_a_cut_stream(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, "--front-ends", "2", module=STRUCK) as server:
        body = chat_request("hello world", 1500, **SAMPLED)
        expected = stream_text(server.url, body)
        before = server.front_ends()
        os.kill(server.worker(), SLOW)
        stream = Stream(server, body)
        with knocking(server):
            assert reload(server).endswith("replaced\n")
        os.kill(server.worker(), FAST)
        assert stream.whole() == expected
        wait_until(lambda: len(server.front_ends()) == 2, "the old ones to leave")
        assert not set(before) & set(server.front_ends())
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.log


def test_an_unstreamed_answer_survives_the_death_of_the_worker(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, "--front-ends", "1", module=STRUCK) as server:
        body = chat_request("hello world", 400, **SAMPLED)
        expected = complete(server.url, body)["choices"]
        answers: list[Any] = []
        os.kill(server.worker(), SLOW)
        thread = threading.Thread(target=lambda: answers.append(complete(server.url, body)["choices"]))
        thread.start()

        def is_decoding() -> bool:
            slots = httpx.get(f"{server.url}/slots", timeout=DEADLINE_S).json()
            return "decode" in json.dumps(slots).lower()

        wait_until(is_decoding, "the answer to begin")
        os.kill(server.worker(), signal.SIGKILL)
        thread.join(DEADLINE_S)
        assert answers == [expected]


def test_a_hang_up_replaces_the_front_ends(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, "--front-ends", "1") as server:
        before = server.front_ends()
        server.send(signal.SIGHUP)
        wait_until(lambda: len(now := server.front_ends()) == 1 and now != before, "a new front end")
        assert complete(server.url, chat_request("hello", 2))["usage"]["completion_tokens"] == 2


def test_the_worker_hands_over_to_its_successor_under_running_streams(tiny_model: Path) -> None:
    flags = (*ENGINE, "--front-ends", "1", "--resume-attempts", "0")
    with serving(tiny_model, *flags, module=STRUCK) as server:
        body = chat_request("hello world", 1500, **SAMPLED)
        expected = stream_text(server.url, body)
        worker = server.worker()
        os.kill(worker, SLOW)
        stream = Stream(server, body)
        assert reload(server, "worker").endswith("replaced\n")
        assert stream.whole() == expected, "a hand-over is no crash and costs no attempt"
        assert server.worker() != worker
        server.says("handed over")


def test_a_successor_that_cannot_start_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model.read_bytes())
    with serving(path, *ENGINE, "--front-ends", "1") as server:
        before = server.children()
        path.write_bytes(b"no model any more")
        for what in ((), ("worker",)):
            command = Running(["ds4", "reload", *what, "--port", str(server.port)])
            assert command.wait() == 1, command.log
            assert "the old one stays" in command.log
        assert server.children() == before
        assert complete(server.url, chat_request("hello", 2))["usage"]["completion_tokens"] == 2


def control(server: Server, *change: str) -> Running:
    """Run `ds4-server control` beside the server."""
    command = Running(["ds4", "control", *change, "--port", str(server.port)])
    command.wait()
    return command


def test_limits_and_the_batch_log_change_while_the_server_runs(tiny_model: Path) -> None:
    with serving(tiny_model, *ENGINE, "--front-ends", "1", module=STRUCK) as server:
        complete(server.url, chat_request("hello", 3))
        assert "decode batch" not in server.log
        assert "batch_log=1" in control(server, "batch_log", "1").log
        complete(server.url, chat_request("hello", 3))
        server.says("decode batch count=1")
        control(server, "slots-per-front-end", "0x")
        assert control(server, "slots-per-front-end", "0").process.returncode == 2, "outside its range"
        assert control(server, "port", "1").process.returncode == 2
        assert control(server, "slots-per-front-end", "1").process.returncode == 0
        os.kill(server.worker(), SLOW)
        stream = Stream(server, chat_request("hello", 600))
        refused = httpx.post(
            f"{server.url}/v1/chat/completions", json=chat_request("hello", 2), timeout=DEADLINE_S
        )
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        os.kill(server.worker(), FAST)
        control(server, "slots-per-front-end", "default")
        complete(server.url, chat_request("hello", 3))
        stream.whole()
