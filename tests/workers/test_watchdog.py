"""workers/watchdog.py: a loop that hangs ends the process, a process that was stopped does not."""

import threading
import time
from pathlib import Path

import pytest

from ds4.pulse import Pulse
from ds4.ring import layout
from ds4.ring.layout import RingShape
from ds4.ring.worker_end import WorkerRing
from workers import watchdog as module
from workers.watchdog import Watchdog

DEADLINE_S = 60.0


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


def test_a_loop_that_does_not_come_round_is_given_up(tmp_path: Path) -> None:
    rig = _Rig(tmp_path, timeout_s=0.2)
    rig.watchdog.start()
    began_s = time.monotonic()
    while time.monotonic() < began_s + 0.6:
        rig.ring.poll()
        time.sleep(0.005)
    assert not rig.hung.is_set()
    assert rig.pulses > 1
    assert rig.hung.wait(DEADLINE_S)
    rig.close()


def test_without_a_limit_it_only_beats(tmp_path: Path) -> None:
    rig = _Rig(tmp_path, timeout_s=0)
    rig.ring.last_poll_s -= 1e6
    rig.watchdog.start()
    deadline_s = time.monotonic() + DEADLINE_S
    while rig.pulses < 20:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    assert not rig.hung.is_set()
    rig.close()


def test_time_in_which_the_whole_process_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AWAY_S", -1.0)  # every pause is one in which nothing could run
    rig = _Rig(tmp_path, timeout_s=0.05)
    rig.ring.last_poll_s -= 1e6
    rig.watchdog.start()
    deadline_s = time.monotonic() + DEADLINE_S
    while rig.pulses < 20:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    assert not rig.hung.is_set()
    rig.close()


def test_one_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    _Rig(tmp_path, timeout_s=1).close()
