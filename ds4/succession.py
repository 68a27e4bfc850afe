"""Replacing children while the server serves: front ends one by one, the worker by hand-over.

Owns: the successor that is coming up, those that are leaving, and the notice `supervisor` in the shared
directory, by which `ds4-server reload` finds the supervisor and learns how it went. Runs in: the
supervisor.

A successor shares its predecessor's listening socket, so a connection is accepted by one of them at any
moment. A predecessor is told to leave (SIGUSR1) only when its successor serves: it then accepts no more
connections, and ends with the last request on those it has. A new worker loads its model beside the old
one, which then leaves the ring to it; front ends resume what ran.
"""

import logging
import os
import signal
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from ds4.children import Child
from ds4.pulse import Stage

_LOG: Final = logging.getLogger(__name__)

POLL_S: Final = 0.05
NOTICE_NAME: Final = "supervisor"
FRONT_END_START_S: Final = 120.0
WORKER_START_S: Final = 1800.0  # a large model from a slow disk
WORKER_LEAVE_S: Final = 10.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the notice says. `num_done` counts requests for replacement, whatever came of them."""

    pid: int
    num_asked: int = 0
    num_done: int = 0
    failure: str = ""  # of the latest one; empty: it went well


class Notice:
    """The file that says who supervises, and what came of the latest replacement."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NOTICE_NAME

    def write(self, state: State) -> None:
        """Replace the notice; a full directory is no reason to fail."""
        unfinished = self.path.with_name(f".{NOTICE_NAME}.new")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(state))
            unfinished.replace(self.path)
        except OSError as error:
            _LOG.warning("the notice cannot be written", extra={"error": error.strerror})

    def read(self) -> State | None:
        """The latest notice; None where there is none."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=State)
        except (OSError, msgspec.DecodeError):
            return None


class Succession:
    """At most one successor at a time. Owned by the supervisor, which calls `step` at every turn."""

    def __init__(
        self,
        children: list[Child],
        environment: dict[str, str],
        max_front_ends: int,
        notice: Notice | None,
    ) -> None:
        self._children = children  # the supervisor's own list; a successor takes its predecessor's place
        self._environment = environment
        self._max_front_ends = max_front_ends
        self._notice = notice
        self._queue: deque[int] = deque()  # places in `_children` still to be renewed
        self._successor: Child | None = None
        self._place = 0
        self._deadline_s = 0.0
        self._leaving: dict[Child, float] = {}  # and when it is killed; 0: never
        self._failure = ""
        self._num_asked = 0
        self._num_done = 0

    @property
    def others(self) -> list[Child]:
        """Children beside the supervisor's own: the successor and those that leave."""
        return [*([self._successor] if self._successor is not None else []), *self._leaving]

    @property
    def is_busy(self) -> bool:
        """True while something has to be looked at often."""
        return bool(self._queue or self._successor is not None or self._leaving)

    def announce(self) -> None:
        """Say who supervises."""
        if self._notice is not None:
            state = State(
                pid=os.getpid(), num_asked=self._num_asked, num_done=self._num_done, failure=self._failure
            )
            self._notice.write(state)

    def ask_for_front_ends(self) -> None:
        """Renew every front end, one after the other."""
        self._ask([at for at, child in enumerate(self._children) if not child.spec.is_worker])

    def ask_for_worker(self) -> None:
        """Renew the worker."""
        self._ask([at for at, child in enumerate(self._children) if child.spec.is_worker])

    def _ask(self, places: list[int]) -> None:
        self._num_asked += 1
        self._queue.extend(place for place in places if place not in self._queue)
        if self._successor is None and len(self._queue) == len(places):
            self._failure = ""
        _LOG.info("replacing children", extra={"count": len(self._queue)})
        self.announce()

    def step(self, now_s: float) -> None:
        """Go on with what was asked for."""
        for child, deadline_s in list(self._leaving.items()):
            if child.ended() is not None or not child.running:
                del self._leaving[child]
                _LOG.info("left", extra={"child": child.spec.name})
            elif 0 < deadline_s < now_s:
                child.send(signal.SIGKILL)
        if self._successor is not None:
            self._look_at(self._successor, now_s)
        elif self._queue:
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        child = self._children[self._queue[0]]
        if not child.spec.is_worker:
            num_places = sum(not one.spec.is_worker for one in (*self._children, *self._leaving))
            if num_places >= self._max_front_ends:
                if not any(not one.spec.is_worker for one in self._leaving):
                    self._fail("there is no front-end place for a successor; raise --max-front-ends")
                return  # one that leaves gives its place back
        self._place = self._queue.popleft()
        self._successor = Child(child.spec)
        options = ("--take-over",) if child.spec.is_worker else ()
        self._successor.start(self._environment, *options)
        self._deadline_s = now_s + (WORKER_START_S if child.spec.is_worker else FRONT_END_START_S)
        assert self._successor.process is not None
        _LOG.info(
            "successor started",
            extra={"child": child.spec.name, "child_pid": self._successor.process.pid},
        )

    def _look_at(self, successor: Child, now_s: float) -> None:
        successor.listen(now_s)
        code = successor.ended()
        if code is not None:
            self._fail(f"the new {successor.spec.name} ended with {code}, the old one stays")
        elif successor.stage >= (Stage.LOADED if successor.spec.is_worker else Stage.SERVING):
            predecessor, self._children[self._place] = self._children[self._place], successor
            self._successor = None
            predecessor.send(signal.SIGUSR1)
            if predecessor.running:
                is_worker = predecessor.spec.is_worker
                self._leaving[predecessor] = now_s + WORKER_LEAVE_S if is_worker else 0.0
            if not self._queue:
                self._finish()
        elif now_s > self._deadline_s:
            successor.send(signal.SIGKILL)
            self._fail(f"the new {successor.spec.name} did not start in time, the old one stays")

    def _fail(self, why: str) -> None:
        _LOG.error("replacing failed", extra={"why": why})
        if self._successor is not None and self._successor.running:
            self._leaving[self._successor] = 0.0
        self._failure = why
        self._queue.clear()
        self._finish()

    def _finish(self) -> None:
        self._successor = None
        self._num_done = self._num_asked
        self.announce()
