"""The door: who finds no slot is turned away before the body is read, and not too many at a time.

Owns: the refusal for want of a slot, and its pace. Runs in: front ends. Pure ASGI; routes check again once
they know how many slots a request needs.

A refusal takes time from the streams that run in the same loop. Polite clients take little of it: they come
back when they were told to. Others are slowed down: who comes when many were just turned away is held for a
moment, at no cost, and let in if a slot is free by then. So whoever comes back at once is refused every few
seconds on each of its connections, not thousands of times a second.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Collection
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from ds4.api.dialects import refusal
from ds4.api.errors import BusyError, failure
from ds4.api.state import FrontState
from ds4.errors import RingFullError

PER_SECOND: Final = 50  # refusals that leave as they come: 2 or 3 % of a core
BURST: Final = 50
MAX_HOLD_S: Final = 5.0
# The held leave together, and those that come back at once come together: many in a row cost a fraction of
# what they cost one by one, and an engine on the same cores is interrupted less often.
TICK_S: Final = 0.2
MAX_HELD: Final = 1024  # each is a connection with the beginning of a body


class Pace:
    """Tells each of many how long to wait, so that they leave one after the other. Owned by the door."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def hold_s(self, now_s: float) -> float:
        """How long to hold one more, at most MAX_HOLD_S and a tick. `now_s` is the loop's time."""
        self._next_s = max(self._next_s, now_s - BURST / PER_SECOND) + 1 / PER_SECOND
        if self._next_s <= now_s:
            return 0.0
        leave_s = self._next_s
        if leave_s > now_s + MAX_HOLD_S:
            # More than the pace allows: spread, lest they all leave at once.
            self._next_s = now_s + MAX_HOLD_S
            leave_s = now_s + random.uniform(MAX_HOLD_S / 2, MAX_HOLD_S)
        return math.ceil(leave_s / TICK_S) * TICK_S - now_s


class Door:
    """Stands before the routes whose requests take a slot."""

    def __init__(self, app: ASGIApp, state: FrontState, paths: Collection[str]) -> None:
        self._app = app
        self._state = state
        self._paths = frozenset(paths)
        self._pace = Pace()
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            full = self._full()
            if full is not None and self._num_held < MAX_HELD:
                self._num_held += 1
                try:
                    await self._hold(self._pace.hold_s(asyncio.get_running_loop().time()))
                finally:
                    self._num_held -= 1
                full = self._full()
            if full is not None:
                engine = self._state.engine
                told = failure(BusyError(engine.turn_away()))
                engine.metrics.add("ds4_requests_rejected_total", label=told.reason)
                await refusal(told, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _hold(self, seconds: float) -> None:
        """Wait so long, or until the process is about to end: nobody is left without an answer."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._state.ending.wait()

    def _full(self) -> RingFullError | None:
        try:
            self._state.engine.check_room()
        except RingFullError as error:
            return error
        return None
