"""The all-in-one server: one worker and its front ends as children of this process.

Owns the listening sockets, the signals and the shared directory's life; the children are
`ds4.children`'s, replacing them while all serve is `ds4.succession`'s. Runs in
the `ds4-server` process, in one thread, which does nothing else: no model, no ring, no requests.

Each front end gets a listening socket of its own, bound here to the same address with
SO_REUSEPORT, so the kernel spreads connections by hash. With one shared socket the process that
wakes first takes a whole burst: of 64 connections at once, four front ends got 2, 7, 9 and 46,
against 11, 15, 16 and 22 with a socket each, and a front end's slots are its own. This process
keeps the sockets open, so what queued at a front end that died waits for its successor.
"""

import contextlib
import errno
import http.client
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ds4.children import LONGEST_ONCE_READY_S, Child, ChildSpec, MemoryWatch, module_command
from ds4.config import Settings, child_environment
from ds4.errors import ConfigError
from ds4.logs import setup_logging
from ds4.models import resolve_model
from ds4.ring.control import ControlPage
from ds4.shared_dir import Tenancy, is_supervised, shared_directory, sweep_orphans
from ds4.succession import POLL_S, Notice, Succession

_LOG: Final = logging.getLogger(__name__)

EXIT_CONFIG: Final = 2
BACKLOG: Final = 2048
MAX_DEFAULT_FRONT_ENDS: Final = 8
MAX_FAILED_STARTS: Final = 6  # in a row, before the server was ever ready
READY_POLL_S: Final = 0.1
CHECK_S: Final = 0.5  # how often hung children are looked for
KILL_GRACE_S: Final = 5.0  # past the drain deadline, which the children keep themselves
RELOAD_TAKEN_S: Final = 30.0  # until the supervisor has noticed what it was asked
RELOAD_DEADLINE_S: Final = 7200.0
STOPPED_AFTER_S: Final = 10.0  # silence of the worker's watchdog: it is stopped, not busy

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Supervisor:
    """Starts the children, restarts what dies or hangs, replaces them on demand, and ends them in order.

    One thread, one `run`. SIGHUP replaces the front ends one by one, SIGUSR2 the worker.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        environment: dict[str, str],
        drain_timeout_s: float,
        is_ready: Callable[[], bool],
        on_ready: Callable[[], None],
        listeners: Sequence[socket.socket] = (),
        max_front_ends: int = 254,
        notice: Notice | None = None,
        on_killed: Callable[[int], None] | None = None,
    ) -> None:
        """`on_killed` hears the process id of a worker that somebody else killed, before the next one starts."""
        self._children = [Child(spec) for spec in children]
        self._environment = environment
        self._drain_timeout_s = drain_timeout_s
        self._is_ready = is_ready
        self._on_ready = on_ready
        self._on_killed = on_killed
        self._memory = MemoryWatch()
        self._listeners = listeners
        self._was_ready = False
        self._exit_code = 0
        self._checked_at = time.monotonic()
        self._succession = Succession(self._children, environment, max_front_ends, notice)
        self._has_terminal = _has_terminal()
        self._is_under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    def run(self) -> int:
        """Serve until a signal or a failure that restarting cannot cure; the exit code."""
        with _wakeups() as wait:
            for child in self._children:
                self._start(child)
            stopped_by = self._watch(wait)
            if stopped_by is not None and self._exit_code == 0:
                _LOG.info("draining", extra={"signal": stopped_by.name})
            for listener in self._listeners:
                listener.close()
            # Front ends first: the worker must outlive the streams it feeds.
            everybody = self._everybody()
            fronts = [child for child in everybody if not child.spec.is_worker]
            workers = [child for child in everybody if child.spec.is_worker]
            # A worker that is lost meanwhile comes again: streams that drain go on with it.
            kept = [child for child in self._children if child.spec.is_worker and stopped_by is not None]
            if not (self._stop(fronts, wait, kept) and self._stop(workers, wait)):
                self._kill_all()
                return 128 + int(signal.SIGTERM)
        return self._exit_code

    def _everybody(self) -> list[Child]:
        return [*self._children, *self._succession.others]

    def _start(self, child: Child) -> None:
        child.start(self._environment)
        assert child.process is not None
        _LOG.info("started", extra={"child": child.spec.name, "child_pid": child.process.pid})

    def _watch(self, wait: "Wait") -> signal.Signals | None:
        """Restart what ends. Returns at a stop signal, or None after a failure that is final."""
        while True:
            for number in wait(self._next_deadline()):
                if number in _STOP_SIGNALS:
                    return number
                if number == signal.SIGHUP:
                    if not self._has_terminal or _has_terminal():
                        self._succession.ask_for_front_ends()
                    elif not self._is_under_nohup:  # its window was closed
                        return number
                elif number == signal.SIGUSR2:
                    self._succession.ask_for_worker()
            self._succession.step(time.monotonic())
            if not all(self._tend(child) for child in self._children):
                return None
            self._kill_hung()
            if not self._was_ready and self._is_ready():
                self._was_ready = True
                self._succession.announce()
                self._on_ready()

    def _tend(self, child: Child) -> bool:
        """Start a child that ended again, in its time; False where restarting cannot help."""
        code = child.ended()
        if code is not None and not self._restart(child, code):
            return False
        if not child.running and time.monotonic() >= child.restart_at:
            self._start(child)
        return True

    def _kill_hung(self) -> None:
        """End children that do not come round; the next look finds them ended and starts them again."""
        now = time.monotonic()
        was_away = now - self._checked_at > 4 * CHECK_S  # this process was stopped itself
        self._checked_at = now
        self._memory.look(now)
        for child in self._everybody():
            if was_away:
                child.forgive()
            if silent_s := child.hung_s(now):
                _LOG.error(
                    "child does not answer, killed",
                    extra={"child": child.spec.name, "silent_s": round(silent_s, 1)},
                )
                child.send(signal.SIGKILL)
                child.forgive()

    def _restart(self, child: Child, code: int) -> bool:
        """Plan the restart of a child that ended; False where restarting cannot help."""
        # After the first success a restart that cannot be is a mistake to wait out, not to stop for.
        if code == EXIT_CONFIG and not self._was_ready:
            self._exit_code = EXIT_CONFIG  # it has said why, on the standard error we share
            return False
        if child.spec.is_worker and self._on_killed is not None and self._is_foreign(child, code):
            self._on_killed(child.pid)
        delay = child.schedule_restart(LONGEST_ONCE_READY_S if self._was_ready else None)
        about = {"child": child.spec.name, "exit_code": code, "delay_s": delay}
        if not self._was_ready and child.num_failures >= MAX_FAILED_STARTS:
            _LOG.critical("child does not start, giving up", extra=about)
            self._exit_code = 1
            return False
        _LOG.error("child ended, restarting", extra=about)
        return True

    def _is_foreign(self, child: Child, code: int) -> bool:
        """Whether its end was certainly no doing of its own: it was killed, and neither by us nor for its memory."""
        return code == -signal.SIGKILL and not child.is_killed and self._memory.is_clear(time.monotonic())

    def _next_deadline(self) -> float | None:
        """Seconds until something is due."""
        now = time.monotonic()
        due = [child.restart_at - now for child in self._children if not child.running]
        due.append(CHECK_S)
        if not self._was_ready:
            due.append(READY_POLL_S)
        if self._succession.is_busy:
            due.append(POLL_S)
        return max(0.0, min(due))

    def _stop(self, group: list[Child], wait: "Wait", kept: Sequence[Child] = ()) -> bool:
        """SIGTERM to a group, then SIGKILL past the deadline. False when a second signal came.

        Whoever of `kept` ends meanwhile is started again.
        """
        for child in group:
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + self._drain_timeout_s + KILL_GRACE_S
        while any(child.ended() is None and child.running for child in group):
            left = deadline - time.monotonic()
            if left <= 0:
                for child in group:
                    child.send(signal.SIGKILL)
                left = KILL_GRACE_S
            elif kept:
                kept = [child for child in kept if self._tend(child)]
                left = min(left, CHECK_S)
            if any(number in _STOP_SIGNALS for number in wait(left)):
                return False
        return True

    def _kill_all(self) -> None:
        for child in self._everybody():
            child.send(signal.SIGKILL)
        for child in self._everybody():
            if child.process is not None:
                child.process.wait()


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError:
        return False
    return True


Wait = Callable[[float | None], list[signal.Signals]]


@contextlib.contextmanager
def _wakeups() -> Iterator[Wait]:
    """Signals as data: a function that waits for some, up to a number of seconds, and returns them."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    wanted = [signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR2, *_STOP_SIGNALS]
    old = {number: signal.signal(number, lambda _number, _frame: None) for number in wanted}
    old_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)  # what the command line held back comes now

    def wait(timeout_s: float | None) -> list[signal.Signals]:
        if not select.select([reader], [], [], timeout_s)[0]:
            return []
        return [signal.Signals(number) for number in os.read(reader, 4096)]

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def count_front_ends(settings: Settings) -> int:
    """How many front ends to start. Raises ConfigError when the ring has fewer places."""
    cores = len(os.sched_getaffinity(0))
    wanted = settings.front_ends or min(max(1, cores // 2), MAX_DEFAULT_FRONT_ENDS, settings.max_front_ends)
    if wanted > settings.max_front_ends:
        raise ConfigError(
            f"--front-ends {wanted} is more than the ring has places; raise --max-front-ends "
            f"(now {settings.max_front_ends})",
            setting="front_ends",
        )
    return wanted


def bind_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` listening sockets on one address. Raises ConfigError when the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}", setting="host") from None
    sockets: list[socket.socket] = []
    try:
        # Without SO_REUSEPORT first: with it, a second server of this user would share the port unnoticed.
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = probe.getsockname()
        for _ in range(count):
            listener = socket.socket(family, kind, protocol)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
    except OSError as error:
        for listener in sockets:
            listener.close()
        cure = "choose another with --port" if error.errno == errno.EADDRINUSE else "check --host and --port"
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; {cure}", setting="port"
        ) from None
    return sockets


def check_model(path: Path) -> None:
    """Read the model's metadata and vocabulary once, so that one process complains and not each.

    In a fork, so that this process never loads what reading a model needs. Raises ConfigError.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            from ds4.model_file import ModelFile
            from ds4.vocabulary import read_vocabulary

            read_vocabulary(ModelFile.open(path))
            status = 0
        except ConfigError as error:
            os.write(writer, str(error).encode())
            status = EXIT_CONFIG
        finally:
            os._exit(status)  # whatever else went wrong, the worker's log will tell with its trace
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if message:
        raise ConfigError(message, setting="model")


def _reachable(host: str) -> str:
    """An address that this machine reaches the server under."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _answers_ready(host: str, port: int, num_front_ends: int) -> bool:
    """True when every new connection is answered ready; there are enough of them to meet each front end."""
    for _ in range(1 if num_front_ends == 1 else 4 * num_front_ends):
        connection = http.client.HTTPConnection(host, port, timeout=1)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status != 200:
                return False
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
    return True


def reload(settings: Settings, what: signal.Signals, announce: Callable[[str], None]) -> int:
    """Have the running supervisor replace children; waits for the outcome. Raises ConfigError without one."""
    directory = shared_directory(settings)
    notice = Notice(directory)
    state = notice.read()
    if state is None or not is_supervised(directory):
        raise ConfigError(
            f"no ds4-server supervises {directory}; give the same --port or --shared-dir as to the server",
            setting="shared_dir",
        )
    os.kill(state.pid, what)
    wanted = state.num_asked + 1
    began_s = time.monotonic()
    while state.num_done < wanted:
        time.sleep(POLL_S)
        waited_s = time.monotonic() - began_s
        if waited_s > RELOAD_DEADLINE_S or (state.num_asked < wanted and waited_s > RELOAD_TAKEN_S):
            raise ConfigError("the server does not answer; see its log")
        if not is_supervised(directory):
            raise ConfigError("the server ended meanwhile")
        state = notice.read() or state
    announce(f"ds4-server: {state.failure or 'replaced'}")
    return 1 if state.failure else 0


def _curl_line(url: str, settings: Settings) -> str:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.api_key_file else ""
    body = '{"messages": [{"role": "user", "content": "What is a GPU?"}], "max_tokens": 64, "stream": true}'
    return f"curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


def serve(settings: Settings, announce: Callable[[str], None]) -> int:
    """Run the whole server on this machine; the exit code. Raises ConfigError before anything is started."""
    setup_logging(settings, "supervisor")
    num_front_ends = count_front_ends(settings)
    model = resolve_model(settings.model, progress=True)
    check_model(model)
    sockets = bind_sockets(settings.host, settings.port, num_front_ends)
    port: int = sockets[0].getsockname()[1]
    is_found_again = bool(settings.shared_dir or settings.port)
    # The children get what was decided here, not what would have to be decided again.
    settings = msgspec.structs.replace(settings, port=port, model=str(model))
    try:
        sweep_orphans()
        tenancy = Tenancy(settings, is_found_again=is_found_again)
        children = [
            ChildSpec(
                name="worker",
                command=module_command("workers.main"),
                is_worker=True,
                # A long step is no silence: the worker's own watchdog beats, and judges steps.
                hang_after_s=STOPPED_AFTER_S if settings.worker_timeout_s else 0.0,
            ),
            *(
                ChildSpec(
                    name=f"front-{index}",
                    command=(*module_command("ds4"), "front", "--socket-fd", str(listener.fileno())),
                    socket_fd=listener.fileno(),
                    hang_after_s=settings.front_end_timeout_s,
                )
                for index, listener in enumerate(sockets)
            ),
        ]
        host = _reachable(settings.host)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        try:
            return Supervisor(
                children,
                environment=child_environment(
                    msgspec.structs.replace(settings, shared_dir=str(tenancy.path))
                ),
                drain_timeout_s=settings.drain_timeout_s,
                is_ready=lambda: _answers_ready(host, port, num_front_ends),
                on_ready=lambda: announce(
                    f"ds4-server: ready on {url} (model {model.name}, front ends: {num_front_ends})\n"
                    f"try: {_curl_line(url, settings)}"
                ),
                listeners=sockets,
                max_front_ends=settings.max_front_ends,
                notice=Notice(tenancy.path),
                on_killed=ControlPage(tenancy.path).note_killed,
            ).run()
        finally:
            tenancy.end()
    finally:
        for listener in sockets:
            listener.close()
