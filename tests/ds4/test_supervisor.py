"""The supervisor with small stand-in children: restarts, back-off, order of stopping, signals.

The supervisor runs in a process of its own, because it owns that process's signals.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds4 import children
from ds4.children import MEMORY_KILL_S, Child, ChildSpec, MemoryWatch, module_command
from ds4.cli import RELOAD_SIGNALS
from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.supervisor import bind_sockets, count_front_ends

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0

# What a child does, by name. Each writes its events into a file; `{log}` is that file.
_PROLOGUE = """
import os, signal, sys, time
def note(text):
    with open({log!r}, "a") as log:
        log.write(text + "\\n")
note(f"{name} start {{os.getpid()}}")
"""
_OBEDIENT = "signal.signal(signal.SIGTERM, lambda *_: (note('{name} stop'), os._exit(0)))\nnote('{name} armed')\nsignal.pause()"
_STUBBORN = "signal.signal(signal.SIGTERM, lambda *_: note('{name} deaf'))\nnote('{name} armed')\nwhile True: signal.pause()"
_FAILING = "sys.exit(1)"

_HARNESS = """
import json, signal, sys
from ds4.config import Settings
from ds4.logs import setup_logging
from ds4 import children, supervisor
children.FIRST_DELAY_S = 0.01
children.LONGEST_DELAY_S = 0.05
supervisor.KILL_GRACE_S = 3.0
setup_logging(Settings(), "supervisor")
specs = [children.ChildSpec(name=name, command=tuple(command), is_worker=name == "worker",
                            hang_after_s={hang}, start_stalled_s={stalled})
         for name, command in json.loads(sys.argv[1])]
ready = {ready}
sys.exit(supervisor.Supervisor(
    specs, environment={{}}, drain_timeout_s={drain}, is_ready=lambda: ready,
    on_ready=lambda: print("READY", flush=True),
    on_killed=lambda pid: print("somebody killed", pid, file=sys.stderr, flush=True),
).run())
"""


def _take_terminal(terminal: int) -> None:
    """Make it the controlling terminal; the tests may run under nohup, the server under test does not."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def _ask_early() -> None:
    """A reload that was asked for, and held back, before the process could do anything."""
    signal.pthread_sigmask(signal.SIG_BLOCK, RELOAD_SIGNALS)
    for number in RELOAD_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class Harness:
    """A supervisor process over stand-in children, and the file in which they note what happens."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "events"
        self.log.touch()
        self.process: subprocess.Popen[str] | None = None

    def start(
        self,
        children: dict[str, str],
        *,
        ready: bool = True,
        drain: float = 30,
        hang: float = 0,
        stalled: float = 0,
        terminal: int | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Start it over children given by name and what they do; `terminal` becomes its own, `first` comes first."""
        specs = []
        for name, body in children.items():
            source = _PROLOGUE.format(log=str(self.log), name=name) + body.replace("{name}", name)
            specs.append((name, [sys.executable, "-c", source]))
        source = textwrap.dedent(_HARNESS).format(ready=ready, drain=drain, hang=hang, stalled=stalled)
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, json.dumps(specs)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=first if terminal is None else lambda: _take_terminal(terminal),
        )

    def events(self) -> list[str]:
        """What the children have noted so far."""
        return self.log.read_text().splitlines()

    def wait_for(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the notes satisfy a condition."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(events := self.events()):
            assert time.monotonic() < deadline, events
            time.sleep(0.01)
        return events

    def wait_for_count(self, event: str, count: int) -> None:
        """Wait until an event was noted so many times, or more."""
        self.wait_for(lambda events: events.count(event) >= count)

    def pids(self, name: str) -> list[int]:
        """The process ids a child has had."""
        return [int(event.split()[2]) for event in self.events() if event.startswith(f"{name} start")]

    def send(self, number: signal.Signals) -> None:
        """Signal the supervisor."""
        assert self.process is not None
        self.process.send_signal(number)

    def finish(self) -> tuple[int, str]:
        """Its exit code and what it logged."""
        assert self.process is not None
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    if harness.process is not None:
        harness.process.kill()
        harness.process.communicate()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while _alive(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its supervisor"
        time.sleep(0.01)


def test_front_ends_stop_before_the_worker(harness: Harness) -> None:
    harness.start({"worker": _OBEDIENT, "front-0": _OBEDIENT, "front-1": _OBEDIENT})
    harness.wait_for(lambda events: sum("armed" in event for event in events) == 3)
    harness.send(signal.SIGTERM)
    code, errors = harness.finish()
    assert code == 0, errors
    stops = [event for event in harness.events() if event.endswith("stop")]
    assert sorted(stops[:2]) == ["front-0 stop", "front-1 stop"]
    assert stops[2:] == ["worker stop"]


def test_a_worker_that_dies_during_the_drain_is_started_again(harness: Harness) -> None:
    draining = _STUBBORN.replace(
        "while True: signal.pause()", "while not os.path.exists({log!r} + '.go'): time.sleep(0.01)"
    )
    harness.start({"worker": _OBEDIENT, "front-0": draining.replace("{log!r}", repr(str(harness.log)))})
    harness.wait_for(lambda events: "worker armed" in events and "front-0 armed" in events)
    harness.send(signal.SIGTERM)
    harness.wait_for(lambda events: "front-0 deaf" in events)
    os.kill(harness.pids("worker")[-1], signal.SIGKILL)
    harness.wait_for_count("worker armed", 2)
    Path(f"{harness.log}.go").touch()
    code, errors = harness.finish()
    assert code == 0, errors
    assert harness.events()[-1] == "worker stop"
    assert len(harness.pids("front-0")) == 1


def test_a_child_that_dies_is_started_again(harness: Harness) -> None:
    harness.start({"worker": _OBEDIENT, "front-0": _OBEDIENT})
    harness.wait_for(lambda events: "worker armed" in events and "front-0 armed" in events)
    for name in ("worker", "front-0"):
        os.kill(harness.pids(name)[-1], signal.SIGKILL)
        harness.wait_for_count(f"{name} armed", 2)
    harness.send(signal.SIGINT)
    code, errors = harness.finish()
    assert code == 0, errors
    assert errors.count("restarting") == 2


def test_a_worker_that_somebody_killed_is_told_from_one_that_died_by_itself(harness: Harness) -> None:
    if not MemoryWatch().is_clear(0.0):
        pytest.skip("this kernel does not count its kills for want of memory")
    harness.start({"worker": _OBEDIENT, "front-0": _OBEDIENT})
    harness.wait_for_count("front-0 armed", 1)
    for num_starts, (name, blow) in enumerate(
        (("worker", signal.SIGSEGV), ("worker", signal.SIGKILL), ("front-0", signal.SIGKILL))
    ):
        harness.wait_for_count(f"{name} armed", num_starts + 1 if name == "worker" else 1)
        os.kill(harness.pids(name)[-1], blow)
    harness.wait_for_count("worker armed", 3)
    harness.wait_for_count("front-0 armed", 2)
    harness.send(signal.SIGTERM)
    code, errors = harness.finish()
    assert code == 0, errors
    said = [line for line in errors.splitlines() if line.startswith("somebody killed")]
    assert said == [f"somebody killed {harness.pids('worker')[1]}"]


def test_a_kill_for_want_of_memory_is_nobodys_certain_doing_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills: list[int | None] = [7]
    monkeypatch.setattr(children, "_num_memory_kills", lambda: kills[-1])
    watch = MemoryWatch()
    assert watch.is_clear(100.0)
    kills.append(8)
    assert not watch.is_clear(200.0)
    assert not watch.is_clear(200.0 + MEMORY_KILL_S)
    assert watch.is_clear(200.1 + MEMORY_KILL_S)
    kills.append(None)
    assert not watch.is_clear(1000.0), "unknown"


def test_a_configuration_error_of_a_child_stops_everything_with_its_code(harness: Harness) -> None:
    fail_later = (
        f"while 'front-0 armed' not in open({str(harness.log)!r}).read(): time.sleep(0.01)\nsys.exit(2)"
    )
    harness.start({"worker": fail_later, "front-0": _OBEDIENT}, ready=False)
    code, errors = harness.finish()
    assert code == 2, errors
    assert len(harness.pids("worker")) == 1
    _wait_gone(harness.pids("front-0")[0])


def test_a_child_that_never_starts_is_given_up(harness: Harness) -> None:
    harness.start({"worker": _FAILING, "front-0": _OBEDIENT}, ready=False)
    code, errors = harness.finish()
    assert code == 1
    assert "giving up" in errors
    assert len(harness.pids("worker")) == 6


def test_a_second_signal_ends_everything_at_once(harness: Harness) -> None:
    harness.start({"worker": _OBEDIENT, "front-0": _STUBBORN})
    harness.wait_for(lambda events: "worker armed" in events and "front-0 armed" in events)
    harness.send(signal.SIGTERM)
    harness.wait_for(lambda events: "front-0 deaf" in events)
    harness.send(signal.SIGTERM)
    code, errors = harness.finish()
    assert code == 128 + signal.SIGTERM, errors
    for name in ("worker", "front-0"):
        _wait_gone(harness.pids(name)[0])


def test_a_child_that_ignores_the_deadline_is_killed(harness: Harness) -> None:
    harness.start({"worker": _OBEDIENT, "front-0": _STUBBORN}, drain=0)
    harness.wait_for(lambda events: "worker armed" in events and "front-0 armed" in events)
    harness.send(signal.SIGTERM)
    code, errors = harness.finish()
    assert code == 0, errors
    assert harness.events()[-1] == "worker stop"
    _wait_gone(harness.pids("front-0")[0])


def test_children_are_told_to_stop_when_the_supervisor_is_killed(harness: Harness) -> None:
    harness.start({"worker": _OBEDIENT, "front-0": _OBEDIENT})
    harness.wait_for(lambda events: "worker armed" in events and "front-0 armed" in events)
    harness.send(signal.SIGKILL)
    harness.wait_for(lambda events: "worker stop" in events and "front-0 stop" in events)


def test_the_delay_doubles_up_to_a_limit_and_starts_over_after_a_healthy_run() -> None:
    child = Child(ChildSpec(name="worker", command=("true",)))
    child.started_at = time.monotonic() + 1000  # always just started
    assert [child.schedule_restart() for _ in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    child.started_at = time.monotonic() - 3600
    assert child.schedule_restart() == 0.1


def test_a_port_in_use_is_refused_even_where_the_other_would_share_it() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*; choose another"):
            bind_sockets("127.0.0.1", port, 2)


def test_every_front_end_gets_a_socket_on_the_same_port() -> None:
    sockets = bind_sockets("127.0.0.1", 0, 3)
    try:
        assert len({listener.getsockname() for listener in sockets}) == 1
        assert len({listener.fileno() for listener in sockets}) == 3
    finally:
        for listener in sockets:
            listener.close()


@pytest.mark.parametrize("host", ["no such host", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host"):
        bind_sockets(host, 0, 1)


def test_more_front_ends_than_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="raise --max-front-ends"):
        count_front_ends(Settings(front_ends=5, max_front_ends=4))
    assert count_front_ends(Settings(front_ends=4, max_front_ends=4)) == 4
    assert 1 <= count_front_ends(Settings(max_front_ends=1)) <= 1


def test_a_foreign_folder_called_workers_is_not_run_in_place_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert module_command("workers.main")[1:] == ("-P", "-m", "workers.main")
    monkeypatch.chdir(ROOT)
    assert module_command("workers.main")[1:] == ("-m", "workers.main")


_SILENT = (
    "from ds4.pulse import Pulse, Stage\n"
    "Pulse(int(sys.argv[sys.argv.index('--pulse-fd') + 1])).beat(Stage.SERVING)\n"
    "note('{name} armed')\nwhile True: time.sleep(1000)"
)


def test_a_child_that_falls_silent_is_killed_and_started_again(harness: Harness) -> None:
    harness.start({"worker": _OBEDIENT, "front-0": _SILENT}, hang=0.3)
    harness.wait_for_count("front-0 armed", 2)
    assert len(harness.pids("worker")) == 1, "who never beat is starting, not hung"
    harness.send(signal.SIGTERM)
    code, errors = harness.finish()
    assert code == 0, errors
    assert "does not answer" in errors


# Starts for longer than it may do nothing: at work itself, and then waiting for a process that is.
_SLOW = """
end = time.monotonic() + 3
while time.monotonic() < end: pass
import subprocess
subprocess.run([sys.executable, "-c", "import time; end = time.monotonic() + 3\\nwhile time.monotonic() < end: pass"])
note("{name} armed")
os.pwrite(int(sys.argv[sys.argv.index("--pulse-fd") + 1]), bytes((1, *15 * (0,))), 0)
signal.pause()
"""


def test_a_child_that_stops_before_its_first_sign_of_life_is_killed_and_a_slow_one_is_not(
    harness: Harness,
) -> None:
    harness.start({"worker": _SLOW, "front-0": "signal.pause()"}, stalled=2.0)
    harness.wait_for(lambda _: len(harness.pids("front-0")) >= 2)
    harness.wait_for_count("worker armed", 1)
    num_starts = len(harness.pids("front-0"))
    harness.wait_for(lambda _: len(harness.pids("front-0")) >= num_starts + 2)
    assert len(harness.pids("worker")) == 1, "who was heard of once is judged by its beats"
    harness.send(signal.SIGTERM)
    code, errors = harness.finish()
    assert code == 0, errors
    assert "does not answer" in errors


def test_a_reload_that_was_asked_for_too_early_is_not_the_end(harness: Harness) -> None:
    harness.start({"front-0": _OBEDIENT}, first=_ask_early)
    harness.wait_for(lambda _: len(harness.pids("front-0")) == 2)
    harness.wait_for_count("front-0 armed", 2)
    harness.send(signal.SIGTERM)
    code, errors = harness.finish()
    assert code == 0, errors


def test_a_closed_terminal_ends_the_server_and_a_hang_up_without_one_does_not(harness: Harness) -> None:
    harness.start({"worker": _OBEDIENT, "front-0": _OBEDIENT})
    harness.wait_for(lambda events: "worker armed" in events and "front-0 armed" in events)
    harness.send(signal.SIGHUP)
    harness.wait_for(lambda _: len(harness.pids("front-0")) == 2)
    harness.send(signal.SIGTERM)
    assert harness.finish()[0] == 0
    controller, terminal = os.openpty()
    harness.start({"worker": _OBEDIENT, "front-0": _OBEDIENT}, terminal=terminal)
    os.close(terminal)
    harness.wait_for_count("worker armed", 2)
    os.close(controller)
    assert harness.finish()[0] == 0
