"""workers/watchdog.py: a loop that hangs ends the process, a process that was stopped does not."""

import threading
import types
from pathlib import Path

import pytest

from ds4.pulse import Pulse
from ds4.ring import layout
from ds4.ring.layout import RingShape
from ds4.ring.worker_end import WorkerRing
from tests.support.server import wait_until
from workers import watchdog as module
from workers.watchdog import Watchdog


class _Rig:
    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.ring = WorkerRing(directory, RingShape(num_front_ends=1, slots_per_front_end=1), b"")
        self.hung = threading.Event()
        self.watchdog = Watchdog(
            self.ring, Pulse(None), timeout_s=timeout_s, on_hang=self.hung.set, beat_s=0.005
        )

    @property
    def pulses(self) -> int:
        return int(self.ring._words[layout.LIVE_PULSE])

    def close(self) -> None:
        self.watchdog.stop()
        self.ring.close()


def test_a_loop_that_does_not_come_round_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = _Rig(tmp_path, timeout_s=10)
    now_s = rig.ring.last_poll_s = 1000.0
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    rig.watchdog.start()

    def advance() -> None:
        """A second passes, and the watchdog looks once in it at least."""
        nonlocal now_s
        before, now_s = rig.pulses, now_s + 1
        wait_until(lambda: rig.pulses >= before + 2 or rig.hung.is_set(), "a look")

    for _ in range(30):
        advance()
        rig.ring.last_poll_s = now_s
    assert not rig.hung.is_set()
    while not rig.hung.is_set():
        advance()
    assert now_s == rig.ring.last_poll_s + 11
    rig.close()


def test_without_a_limit_it_only_beats(tmp_path: Path) -> None:
    rig = _Rig(tmp_path, timeout_s=0)
    rig.ring.last_poll_s -= 1e6
    rig.watchdog.start()
    wait_until(lambda: rig.pulses >= 20, "pulses")
    assert not rig.hung.is_set()
    rig.close()


def test_time_in_which_the_whole_process_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AWAY_S", -1.0)  # every pause is one in which nothing could run
    rig = _Rig(tmp_path, timeout_s=0.05)
    rig.ring.last_poll_s -= 1e6
    rig.watchdog.start()
    wait_until(lambda: rig.pulses >= 20, "pulses")
    assert not rig.hung.is_set()
    rig.close()


def test_one_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    _Rig(tmp_path, timeout_s=1).close()
