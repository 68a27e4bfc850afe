"""One child of the supervisor: how it is started, watched, signalled and started again.

Owns: `Child`, its process and its signs of life. Runs in: the supervisor, on its one thread.
"""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

import ds4
from ds4.pulse import PulseWatch, Stage

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 10.0
LONGEST_ONCE_READY_S: Final = 2.0  # the server has worked, and clients wait
START_STALLED_S: Final = 60.0  # a disk may keep a load waiting, but hardly for so long without a single page
# For so long after the kernel killed for want of memory, that may be why others died.
MEMORY_KILL_S: Final = 60.0
HEALTHY_AFTER_S: Final = 10.0  # a child that lived this long starts again with the first delay

_LOOKS: Final = 8  # within `start_stalled_s`
_PR_SET_PDEATHSIG: Final = 1


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one child. `socket_fd` stays open across the start; the child must name it.

    `hang_after_s`: silence after which it is killed; 0: never. `start_stalled_s`: the same before its first sign
    of life, when what counts is whether it does anything at all: loading a model may take long.
    """

    name: str
    command: tuple[str, ...]
    socket_fd: int | None = None
    is_worker: bool = False
    hang_after_s: float = 0.0
    start_stalled_s: float = START_STALLED_S


class Child:
    """One child and its restarts. Owned and changed by the supervisor only."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.num_failures = 0
        self.started_at = 0.0
        self.restart_at = 0.0
        self.pid = 0  # of the latest process
        self.is_killed = False  # by us
        self._pulse: PulseWatch | None = None
        self._activity: tuple[int, ...] = ()
        self._active_s = self._look_again_s = 0.0

    @property
    def running(self) -> bool:
        """True until its end was noticed."""
        return self.process is not None

    @property
    def stage(self) -> Stage:
        """How far it has come, as of the latest `listen`."""
        return Stage.STARTING if self._pulse is None else self._pulse.stage

    def start(self, environment: dict[str, str], *options: str) -> None:
        """Start it in a session of its own, so that Ctrl-C reaches the supervisor only.

        `options` go behind its command, this once.
        """
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died before the line above
                os.kill(os.getpid(), signal.SIGTERM)

        self._close_pulse()
        self._pulse = PulseWatch()
        fds = [self._pulse.fd]
        if self.spec.socket_fd is not None:
            fds.append(self.spec.socket_fd)
        self.is_killed = False
        self.started_at = self._active_s = time.monotonic()
        self.process = subprocess.Popen(
            [*self.spec.command, "--pulse-fd", str(self._pulse.fd), *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,
            preexec_fn=die_with_parent,  # one thread here, so forking with Python code is sound
        )
        self.pid = self.process.pid

    def ended(self) -> int | None:
        """Its exit code (negative: the signal) if it has just ended; None while it runs."""
        code = None if self.process is None else self.process.poll()
        if code is not None:
            self.process = None
            self._close_pulse()
        return code

    def listen(self, now_s: float) -> float:
        """Bring `stage` up to date; for how long it was silent since its latest sign of life."""
        return 0.0 if self._pulse is None else self._pulse.silent_s(now_s)

    def hung_s(self, now_s: float) -> float:
        """For how long it has been silent, where that is too long for what it does; else 0."""
        silent_s = self.listen(now_s)
        if self._pulse is None or self.process is None or self._pulse.is_heard:
            return silent_s if 0 < self.spec.hang_after_s < silent_s else 0.0
        limit_s = self.spec.start_stalled_s
        if limit_s == 0 or now_s < self._look_again_s:
            return 0.0
        self._look_again_s = now_s + limit_s / _LOOKS
        if (activity := _activity(self.process.pid)) != self._activity:
            self._activity, self._active_s = activity, now_s
        return now_s - self._active_s if now_s - self._active_s > limit_s else 0.0

    def forgive(self) -> None:
        """Its silence so far does not count."""
        self._active_s = time.monotonic()
        if self._pulse is not None:
            self._pulse.forgive()

    def schedule_restart(self, longest_s: float | None = None) -> float:
        """Choose when to start again, later with each failure in a row; the delay in seconds."""
        now = time.monotonic()
        self.num_failures = 1 if now - self.started_at >= HEALTHY_AFTER_S else self.num_failures + 1
        delay = float(min(FIRST_DELAY_S * 2.0 ** (self.num_failures - 1), longest_s or LONGEST_DELAY_S))
        self.restart_at = now + delay
        return delay

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still runs."""
        if self.process is not None:
            self.process.send_signal(number)
            self.is_killed = self.is_killed or number == signal.SIGKILL

    def _close_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None


class MemoryWatch:
    """Whether the kernel killed for want of memory lately: that may have been a request's doing."""

    def __init__(self) -> None:
        self._num_kills = _num_memory_kills()
        self._changed_s = -math.inf

    def look(self, now_s: float) -> None:
        """Count anew. Once a second or so: a large process takes its time to die of what was counted."""
        if (num_kills := _num_memory_kills()) != self._num_kills:
            self._num_kills, self._changed_s = num_kills, now_s

    def is_clear(self, now_s: float) -> bool:
        """It did not, for certain."""
        self.look(now_s)
        return self._num_kills is not None and now_s - self._changed_s > MEMORY_KILL_S


def _num_memory_kills() -> int | None:
    """Of the whole machine, in containers too; None where the kernel does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _activity(session: int) -> tuple[int, ...]:
    """What the kernel counts of a child and all it started: stands still only where none of them does anything.

    Page faults and processor time, by proc_pid_stat(5): a load waits for pages, a compiler is another process.
    """
    totals = [0, 0, 0, 0, 0]
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session:
            counted = (1, *(int(fields[at]) for at in (7, 9, 11, 12)))
            totals = [total + count for total, count in zip(totals, counted, strict=True)]
    return tuple(totals)


def module_command(module: str) -> tuple[str, ...]:
    """The command that runs one of our modules with this interpreter.

    Outside the source tree the current directory stays off the module path, so that a folder of
    the user's that happens to be called `workers` is not run in place of ours.
    """
    in_source_tree = Path(ds4.__file__).parent.parent == Path.cwd()
    return (sys.executable, *(() if in_source_tree else ("-P",)), "-m", module)
