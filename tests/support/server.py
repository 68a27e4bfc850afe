"""Real server processes for end-to-end tests: start, wait until ready, talk, kill, and look for remains.

Runs in: tests. Every process is started as an operator would start it, in a session of its own, and
whatever is left of it is killed when the test ends. Waits are for conditions with a generous deadline.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from ds4.config import Settings
from ds4.shared_dir import shared_directory

ROOT: Final = Path(__file__).parents[2]
DEADLINE_S: Final = 240.0
START_S: Final = 900.0  # the first server with a model may compile its engine
_READY: Final = re.compile(r"ds4-server: ready on (http://\S+)")


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of a condition. Fails naming `what` it waited for."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.02)
    return value


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without settings of ours, plus `extra`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DS4_SERVER_")}  # noqa: TID251
    return inherited | dict(extra or {})


def process_children(parent: int, words: str = "") -> list[int]:
    """Ids of the living children of a process whose command line holds `words`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if fields[0] != "Z" and int(fields[1]) == parent and words in command:
                found.append(int(entry.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has asked for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Running:
    """One started command and all it wrote. Owned by the test that started it."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=clean_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.output: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.output), (self.process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        with stream:
            lines.extend(iter(stream.readline, ""))

    @property
    def log(self) -> str:
        """Everything written so far, for assertion messages."""
        return "".join([*self.output, *self.errors])

    def says(self, words: str, count: int = 1) -> None:
        """Wait until it has written this so often: what others have seen done may still be on its way here."""
        wait_until(lambda: self.log.count(words) >= count, f"{count} times {words!r}")

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit code."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s:g} s:\n{self.log}") from None
        for reader in self._readers:
            reader.join(DEADLINE_S)
        return code

    def send(self, number: signal.Signals) -> None:
        """Signal it, not its children."""
        self.process.send_signal(number)

    def children(self, words: str = "") -> list[int]:
        """Ids of its living children whose command line holds `words`."""
        return process_children(self.process.pid, words)

    def kill(self) -> None:
        """End it and its children, whatever state they are in."""
        children = self.children()
        for pid in [self.process.pid, *children]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()


class Server(Running):
    """`ds4-server` as one command, or one front end of several; knows its URL once it is ready."""

    url: str = ""

    def wait_ready(self) -> None:
        """Wait for the ready line."""

        def ready() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log}"
            found = _READY.search("".join(self.output))
            if found:
                self.url = found[1]
            return bool(found)

        try:
            wait_until(ready, "the ready line", START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def kill(self) -> None:
        """End it, and remove the default shared directory that a killed server cannot remove."""
        super().kill()
        if self.url:
            shutil.rmtree(shared_directory(Settings(port=self.port)), ignore_errors=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.url.rsplit(":", 1)[1])

    def front_ends(self) -> list[int]:
        """Process ids of the living front ends."""
        return self.children("-m ds4 front")

    def worker(self) -> int:
        """Process id of the living worker, once there is one and no other."""
        (pid,) = wait_until(lambda: len(now := self.children("workers.main")) == 1 and now, "one worker")
        return int(pid)


@contextlib.contextmanager
def serving(
    model: Path, *flags: str, environment: Mapping[str, str] | None = None, module: str = "ds4"
) -> Iterator[Server]:
    """A ready `ds4-server` on a free port; killed at the end if it still runs. `module` stands in for it."""
    server = Server([module, "--model", str(model), "--port", "0", *flags], environment)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def chat_request(text: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy chat request body that never ends early."""
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def complete(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """One unstreamed chat completion, which must succeed."""
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream; fails where it does not end in [DONE] or carries an error."""
    assert response.status_code == 200, response.read()
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        event = json.loads(line[6:])
        assert "error" not in event, event
        yield event
    raise AssertionError("the stream ended without [DONE]")


def delta_text(event: Mapping[str, Any]) -> str:
    """The text that one chat event adds."""
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def stream_text(url: str, body: Mapping[str, Any], client: httpx.Client | None = None) -> str:
    """The text of one streamed chat completion."""
    with contextlib.ExitStack() as stack:
        client = client or stack.enter_context(httpx.Client(timeout=DEADLINE_S))
        response = stack.enter_context(
            client.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True})
        )
        return "".join(delta_text(event) for event in stream_events(response))
