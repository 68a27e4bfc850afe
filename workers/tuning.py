"""What may change while the worker runs, from the control page to those it concerns.

Owns: the values in force. Runs in the worker, on its only thread. Arrays are sized at start, so a limit
can be lowered and raised again, never above what the worker was started with.
"""

import logging
from typing import Final

from ds4.config import Settings
from ds4.ring.control import ControlPage
from workers.admission import CoalescingWindow
from workers.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

_NOTHING: Final = b""


class Tuning:
    """Owned by the engine, which calls `apply` at every turn: it costs a comparison of a few bytes."""

    def __init__(
        self,
        control: ControlPage | None,
        settings: Settings,
        scheduler: Scheduler,
        window: CoalescingWindow,
    ) -> None:
        self.batch_log = settings.batch_log
        self._control = control
        self._settings = settings
        self._scheduler = scheduler
        self._window = window
        self._seen = _NOTHING if control is None else bytes(len(control.snapshot()))

    def apply(self) -> None:
        """Put what changed into force."""
        if self._control is None or (seen := self._control.snapshot()) == self._seen:
            return
        self._seen = seen
        control, settings, scheduler = self._control, self._settings, self._scheduler
        self.batch_log = bool(control.get("batch_log", settings.batch_log))
        window_us = control.get("decode_coalesce_us", settings.decode_coalesce_us)
        self._window.set(window_us)
        seats = control.get("batched_sessions", scheduler.max_seats)
        scheduler.seat_limit = max(1, min(seats, scheduler.max_seats))
        rows = control.get("max_batch_tokens", scheduler.max_rows)
        scheduler.row_limit = max(scheduler.seat_limit, min(rows, scheduler.max_rows))
        log.info(
            "controls changed",
            extra={
                "decode_coalesce_us": window_us,
                "batch_log": self.batch_log,
                "batched_sessions": scheduler.seat_limit,
                "max_batch_tokens": scheduler.row_limit,
            },
        )
