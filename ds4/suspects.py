"""Which request kills the worker: who was in flight at a crash, who waits for whom, who is not tried again.

Owns: a request's record of crashes, the turns of suspects, and the folder `quarantine` in the shared
directory. Runs in: front ends. Source: ours.

A crash happens among many requests, and mostly none of them is to blame. So after a first crash all are
resumed at once. Who was there at a second one as well is a suspect: suspects go on one at a time, over
all front ends, each until it has proved itself by a few new tokens. What kills the worker while it has
the turn is to blame and soon runs out of attempts; its prompt is remembered for a while, so that a client that
tries again cannot go on with it. The others in flight then are cleared if they had proved themselves: who is
new may be a second one of the kind, and would else spoil one turn after the other. A worker that somebody killed
from outside costs an attempt and makes nobody a suspect.
"""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

SUSPECT_AFTER: Final = 2  # crashes
PROOF_TOKENS: Final = 3  # new ones, that end a suspect's turn: past what was in flight at the crash
TURN_S: Final = 10.0  # of running, the longest turn: a slow prompt or reader shall not hold up the others
FORGIVE_AFTER_S: Final = 60.0  # of running since the latest crash, with
FORGIVE_TOKENS: Final = 64  # new tokens: that crash was not ours
REMEMBER_S: Final = 600.0
MAX_REMEMBERED: Final = 1000
FOLDER: Final = "quarantine"
NONE_CAME: Final = "the worker was lost and none came back in time"
_MOST_OUTAGES: Final = 4  # a hunt takes about that many restarts of the worker
_LOOK_S: Final = 0.5  # how often a suspect that waits looks whether there is a worker at all
_POLL_S: Final = 0.005
_GIVE_WAY_S: Final = 3 * _POLL_S  # who had the turn last lets other front ends come first


class Record:
    """The crashes that one request was in flight at. Owned by its generation."""

    __slots__ = ("_crashed_s", "_num_acquittals", "_num_tokens", "num_crashes")

    def __init__(self) -> None:
        self.num_crashes = 0
        self._num_acquittals = 0
        self._crashed_s = 0.0
        self._num_tokens = 0

    def crashed(self, num_tokens: int, now_s: float) -> None:
        """The worker crashed when this request had `num_tokens` tokens of output."""
        if now_s - self._crashed_s >= FORGIVE_AFTER_S and num_tokens - self._num_tokens >= FORGIVE_TOKENS:
            self.num_crashes = self._num_acquittals = 0
        self.num_crashes += 1
        self._crashed_s, self._num_tokens = now_s, num_tokens

    def acquit(self) -> None:
        """The latest crash was no request's doing."""
        self._num_acquittals += 1

    @property
    def is_suspect(self) -> bool:
        """It goes on only in its turn."""
        return self.num_crashes - self._num_acquittals >= SUSPECT_AFTER

    def is_proved(self, num_tokens: int) -> bool:
        """Enough came since the crash."""
        return num_tokens >= self._num_tokens + PROOF_TOKENS


class Turns:
    """One suspect at a time. `take` and `drop` hold one place that all front ends share, without waiting."""

    def __init__(self, take: Callable[[], bool], drop: Callable[[], None]) -> None:
        self._take = take
        self._drop = drop
        self._lock = asyncio.Lock()  # first come, first served, within this front end
        self._had_it_last = False

    async def begin(self) -> "Turn":
        """Wait for the turn."""
        await self._lock.acquire()
        try:
            if self._had_it_last:
                await asyncio.sleep(_GIVE_WAY_S)
            while not self._take():  # noqa: ASYNC110 - a lock of the kernel announces nothing
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self._lock.release()
            raise
        self._had_it_last = True
        return Turn(self._release)

    async def wait(self, is_attached: Callable[[], bool], limit_s: float) -> "Turn":
        """`begin`, but not for ever. Raises TimeoutError, with the reason, after `limit_s` without a worker
        or a few times that in all.
        """
        loop = asyncio.get_running_loop()
        began_s = attached_s = loop.time()
        waiting = asyncio.ensure_future(self.begin())
        try:
            while not (await asyncio.wait((waiting,), timeout=_LOOK_S))[0]:
                if is_attached():
                    attached_s = loop.time()
                elif loop.time() - attached_s > limit_s:
                    raise TimeoutError(NONE_CAME)
                if loop.time() - began_s > _MOST_OUTAGES * limit_s:
                    raise TimeoutError("the worker crashed again and again, and the request could not go on")
            return waiting.result()
        except BaseException:
            if not waiting.cancel() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().end()
            raise

    def _release(self) -> None:
        self._drop()
        self._lock.release()


class Turn:
    """One suspect's turn; ends by itself when a worker has had the suspect for TURN_S.

    Only such time counts: a new worker may load its model for minutes, and nobody could go on meanwhile.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self.is_over = False
        self._release = release
        self._timer: asyncio.TimerHandle | None = None

    def resume(self) -> None:
        """A worker has the suspect."""
        self.pause()
        if not self.is_over:
            self._timer = asyncio.get_running_loop().call_later(TURN_S, self.end)

    def pause(self) -> None:
        """The worker is lost. Whoever has the turn sees to it that this does not last for ever."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """The next one may begin. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self.pause()
            self._release()


class Quarantine:
    """Prompts that are not tried again, as empty files that all front ends see. Forgotten in time."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER

    def add(self, prompt: NDArray[np.uint32], grammar: str) -> None:
        """Remember a request. Best effort: without room for it the request is only tried again."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._forget_old()
            path = self._folder / _digest(prompt, grammar)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            os.utime(path, (now_s := time.monotonic(), now_s))

    def holds(self, prompt: NDArray[np.uint32], grammar: str) -> bool:
        """Whether a request like this one was found to kill the worker lately."""
        if not self._folder.exists():  # nearly always, and cheap
            return False
        return 0.0 <= _age_s(self._folder / _digest(prompt, grammar)) < REMEMBER_S

    def _forget_old(self) -> None:
        aged = sorted((_age_s(path), path) for path in self._folder.iterdir())
        for index, (age_s, path) in enumerate(aged):
            if age_s >= REMEMBER_S or index >= MAX_REMEMBERED - 1:
                path.unlink(missing_ok=True)


def _age_s(path: Path) -> float:
    """Its time is of the monotonic clock, which is one for all processes and does not jump."""
    try:
        return time.monotonic() - path.stat().st_mtime
    except OSError:
        return float("inf")


def _digest(prompt: NDArray[np.uint32], grammar: str) -> str:
    return hashlib.blake2b(prompt.tobytes() + b"\0" + grammar.encode(), digest_size=16).hexdigest()
