"""The worker's watchdog: shows that the process runs, and ends it when its loop does not come round.

Owns: one thread. Runs in the worker, beside the engine's loop. It touches nothing of the engine's: it
reads when the loop last polled the ring, writes the pulse, and where a step outlasts its limit (a
device that hangs, a lost wake-up) it ends the process, because no thread can free another one. Who
started us starts us again, and front ends resume what ran.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from ds4.pulse import BEAT_S, Pulse, Stage
from ds4.ring.worker_end import WorkerRing

log = logging.getLogger(__name__)

_AWAY_S: Final = 2.0  # this thread itself slept so long: the whole process was stopped


class Watchdog:
    """Owned by `workers.main`. `on_hang` ends the process; it is not expected to return."""

    def __init__(
        self,
        ring: WorkerRing,
        pulse: Pulse,
        *,
        timeout_s: float,
        on_hang: Callable[[], None],
        beat_s: float = BEAT_S,
    ) -> None:
        self._ring = ring
        self._pulse = pulse
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._beat_s = beat_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ds4-watchdog", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Before the ring is closed."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        previous_s = since_s = time.monotonic()
        while True:
            self._ring.pulse()
            self._pulse.beat(Stage.SERVING)
            if self._stop.wait(self._beat_s):
                return
            now_s = time.monotonic()
            if now_s - previous_s > self._beat_s + _AWAY_S:
                since_s = now_s  # the loop could not run either
            previous_s = now_s
            silent_s = now_s - max(since_s, self._ring.last_poll_s)
            if 0 < self._timeout_s < silent_s:
                log.critical("a step does not end, giving up", extra={"silent_s": round(silent_s, 1)})
                self._on_hang()
                return


def end_process(code: int) -> Callable[[], None]:
    """What a worker does about a loop that hangs: the kernel cleans up, and the lease falls."""

    def end() -> None:
        logging.shutdown()
        os._exit(code)

    return end
