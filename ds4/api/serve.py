"""One front-end process: uvicorn on a socket, and an orderly end.

Owns: the process's event loop, its signals and its drain. Runs in: front ends. Source: uvicorn's
`Server`, whose shutdown this one delays.

SIGTERM or SIGINT: not ready and nothing new is taken from that moment, but connections are still
answered, so that a load balancer sees the 503; what runs may finish until the drain deadline, the
rest gets an error event. A second signal ends the process at once.

SIGUSR1: a successor serves on the same socket. Accept nothing more, answer what comes on the connections
that are there, and end with the last of it, however long that takes.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn

from ds4.api.app import create_app
from ds4.api.connection import bounded_connection
from ds4.api.state import FrontState
from ds4.config import Settings
from ds4.errors import ConfigError, ErrorCode, WorkerError
from ds4.logs import setup_logging
from ds4.models import resolve_model
from ds4.pulse import Pulse, Stage

_log = logging.getLogger(__name__)

_LAST_WORDS_S: Final = 2.0  # for error events to leave after the drain deadline
_KEEP_ALIVE_S: Final = 75  # longer than nginx keeps its upstream connections
_BACKLOG: Final = 2048
_GC_OBJECTS: Final = 4_000
_SWITCH_S: Final = 0.0005  # for so long a thread with a large body may keep the loop waiting, each time
_LEAVE_IDLE_S: Final = 5.0  # how long a connection that is silent is still listened to while leaving
_LEAVE_POLL_S: Final = 0.1
# libuv accepts one connection of a listening socket in each turn of the loop. With many streams a turn is long,
# and whoever connects would queue for seconds. A few more in a turn are not felt by those streams.
_ACCEPTS_PER_TURN: Final = 16


class FrontServer(uvicorn.Server):
    """uvicorn, with our drain before its shutdown. Owned by `run_front`."""

    def __init__(self, config: uvicorn.Config, state: FrontState, pulse: Pulse | None = None) -> None:
        super().__init__(config)
        self._state = state
        self._pulse = pulse or Pulse(None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until drained."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():  # only that one hears signals
            self._loop.add_signal_handler(signal.SIGUSR1, self._begin_leaving)
        sockets = [same for each in sockets or () for same in (each, *_duplicates(each))]
        await super().serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second, while serving."""
        self._pulse.beat(Stage.SERVING if self._state.engine.ready else Stage.STARTING)
        return await super().on_tick(counter)

    def _begin_leaving(self) -> None:
        if self._leaving is None and self.started:
            self._leaving = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        assert self._loop is not None
        _log.info("leaving to a successor", extra={"num_running": self._state.engine.num_running})
        self._state.leaving = True
        for server in self.servers:
            server.close()
        began_s = self._loop.time()
        # A client may be sending on a connection that looks idle: closing it now would lose a request.
        # uvicorn announces neither the end of a task nor of a connection, so this looks.
        while self.server_state.connections and (  # noqa: ASYNC110
            self.server_state.tasks or self._loop.time() < began_s + _LEAVE_IDLE_S
        ):
            await asyncio.sleep(_LEAVE_POLL_S)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In place of uvicorn's: the signal is not raised again, a drained server ends with 0."""
        if self._state.engine.draining:
            os._exit(128 + sig)
        self._state.engine.draining = True
        if self._loop is None or not self.started:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        for tell in self._state.when_ending:
            tell()
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        engine, limit_s = self._state.engine, self._state.settings.drain_timeout_s
        _log.info("draining %d running requests for at most %d s", engine.num_running, limit_s)
        await self._until_idle(limit_s)
        if engine.num_running:
            error = WorkerError("the server is shutting down", code=ErrorCode.SHUTTING_DOWN)
            _log.warning("the drain deadline passed: %d requests end with an error", engine.abort_all(error))
            await self._until_idle(_LAST_WORDS_S)
        self.should_exit = True

    async def _until_idle(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._state.engine.wait_idle()


def _duplicates(listener: socket.socket) -> Iterator[socket.socket]:
    """What else the loop listens on, so that it accepts several of one queue in a turn."""
    for _ in range(_ACCEPTS_PER_TURN - 1):
        duplicate = listener.dup()
        duplicate.setblocking(False)
        yield duplicate


def run_front(settings: Settings, socket_fd: int | None = None, pulse: Pulse | None = None) -> int:
    """Serve until a signal; the exit code. `socket_fd` is a listening socket to use instead of binding.

    Raises ConfigError, ModelFileError, RingError before anything is served.
    """
    with contextlib.closing(_listener(settings, socket_fd)) as listener:
        setup_logging(settings, "front")
        _raise_file_limit()
        sys.setswitchinterval(_SWITCH_S)
        state = FrontState.build(settings, Path(resolve_model(settings.model, progress=False)))
        config = uvicorn.Config(
            create_app(settings, state=state),
            loop="uvloop",
            http=bounded_connection(settings.max_body_bytes),
            ws="none",
            lifespan="off",  # started below, so that its errors end the process with their message
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody asks where a request came from
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_LAST_WORDS_S),
            backlog=_BACKLOG,
        )
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve(state, FrontServer(config, state, pulse), listener))
    return 0


async def _serve(state: FrontState, server: FrontServer, listener: socket.socket) -> None:
    await state.start()
    try:
        gc.collect()
        gc.freeze()  # what lives as long as the process is not looked at again
        gc.set_threshold(_GC_OBJECTS)  # else each step of a hundred streams is a collection
        _log.info("listening", extra={"address": ":".join(map(str, listener.getsockname()[:2]))})
        await server.serve([listener])
    finally:
        await state.close()


def _raise_file_limit() -> None:
    """A connection is a file: the usual soft limit of 1024 is no limit that anybody chose."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listener(settings: Settings, socket_fd: int | None) -> socket.socket:
    if socket_fd is not None:
        listener = socket.socket(fileno=socket_fd)
    else:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port",
                setting="port",
            ) from None
    listener.setblocking(False)
    return listener
