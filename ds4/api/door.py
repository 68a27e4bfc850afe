"""The door: who finds no slot is turned away before the body is read, and not too many at a time.

Owns: the refusal for want of a slot, and its pace. Runs in: front ends. Pure ASGI; routes check again once
they know how many slots a request needs.

A refusal takes time from the streams that run in the same loop. Polite clients take little of it: they come
back when they were told to. Others are slowed down: who comes when many were just turned away is held for a
while, at next to no cost. Whoever is held longest is let in when a slot is free. So whoever comes back at once
is refused every few seconds on each of its connections, not thousands of times a second.
"""

import asyncio
import contextlib
import functools
import math
import random
from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ds4.api.dialects import is_anthropic, refusal
from ds4.api.errors import BusyError, failure
from ds4.api.state import FrontState
from ds4.errors import RingFullError

PER_SECOND: Final = 150  # refusals that leave as they come: 3 to 5 % of a core
BURST: Final = 50
MAX_HOLD_S: Final = 5.0
# The held leave together, and those that come back at once come together: many in a row cost a fraction of
# what they cost one by one, and an engine on the same cores is interrupted less often.
TICK_S: Final = 0.2


@functools.cache
def _busy(seconds: int) -> Response:
    """The same for everybody, and so made once for each of a minute's seconds."""
    return failure(BusyError(seconds)).response()


def _refusal(seconds: int, scope: Scope) -> Response:
    if is_anthropic(scope["path"]):  # the body has the request's id
        return refusal(failure(BusyError(seconds)), scope)
    return _busy(seconds)


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
        self._held: OrderedDict[asyncio.Future[None], None] = OrderedDict()  # who came first is first
        state.when_ending.append(self._wake_all)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        full = self._full()
        if full and (hold_s := self._pace.hold_s(asyncio.get_running_loop().time())):
            await self._hold(hold_s)
            full = self._full()
        if full:
            engine = self._state.engine
            engine.metrics.add("ds4_requests_rejected_total", label="full")
            await _refusal(engine.turn_away(), scope)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._wake_one()  # there is a free slot now

    async def _hold(self, seconds: float) -> None:
        """Wait so long, or until a slot is free, or until the process is about to end."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[waiter] = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await waiter
        finally:
            self._held.pop(waiter, None)

    def _wake_one(self) -> None:
        while self._held:
            waiter, _ = self._held.popitem(last=False)
            if not waiter.done():
                waiter.set_result(None)
                return

    def _wake_all(self) -> None:
        while self._held:
            self._wake_one()

    def _full(self) -> bool:
        """Whether to refuse. A process that is about to end says that instead, in its routes."""
        engine = self._state.engine
        if engine.draining:
            return False
        try:
            engine.check_room()
        except RingFullError:
            return True
        return False
