"""The engine's threads: one leads a step, the others live in machine code and wait for it there.

Owns: the control block, the helpers' mailboxes and threads. Runs in the worker process. Helpers never
return to Python between steps: they spin for about 100 us, then sleep on a condition variable.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workers.devices.cpu.control import (
    MAIL_CONDITION,
    MAIL_LOCK,
    MAIL_STOP,
    MAILBOX_BYTES,
    Control,
)

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")
_TOPOLOGY: Final = Path("/sys/devices/system/cpu")


class ThreadPool:
    """One owner, the device; the thread that calls `run` is thread 0 of every step."""

    def __init__(self, code: Callable[[int, int], None], num_threads: int) -> None:
        self.num_threads = num_threads
        self._code = code
        self._control_memory = np.zeros(Control.COUNT + 8, np.int64)
        skip = -self._control_memory.ctypes.data % 64 // 8
        self.control: NDArray[np.int64] = self._control_memory[skip : skip + Control.COUNT]
        self._mail_memory = np.zeros(num_threads * MAILBOX_BYTES + 64, np.uint8)
        self._control_address = int(self.control.ctypes.data)
        self._mail_address = (int(self._mail_memory.ctypes.data) + 63) // 64 * 64
        self.control[Control.MAILBOXES] = self._mail_address
        process = ctypes.CDLL(None)
        self._lock, self._unlock = process.pthread_mutex_lock, process.pthread_mutex_unlock
        self._signal = process.pthread_cond_signal
        self._threads = []
        for thread in range(1, num_threads):
            mail = self._mail_address + thread * MAILBOX_BYTES
            process.pthread_mutex_init(ctypes.c_void_p(mail + MAIL_LOCK), None)
            process.pthread_cond_init(ctypes.c_void_p(mail + MAIL_CONDITION), None)
            helper = threading.Thread(
                target=code, args=(self._control_address, thread), name=f"ds4-cpu-{thread}", daemon=True
            )
            helper.start()
            self._threads.append(helper)

    def run(self, num_threads: int) -> None:
        """One step over the filled control block, on the first `num_threads` threads."""
        self.control[Control.NUM_THREADS] = num_threads
        self._code(self._control_address, 0)

    def close(self) -> None:
        """End the helpers. Idempotent; no step may be running."""
        for thread, helper in enumerate(self._threads, start=1):
            mail = self._mail_address + thread * MAILBOX_BYTES
            self._lock(ctypes.c_void_p(mail + MAIL_LOCK))
            ctypes.c_int64.from_address(mail + MAIL_STOP).value = 1
            self._signal(ctypes.c_void_p(mail + MAIL_CONDITION))
            self._unlock(ctypes.c_void_p(mail + MAIL_LOCK))
            helper.join()
        self._threads.clear()


def physical_cores(topology: Path = _TOPOLOGY, cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Cores this process may use: hardware threads of one core count once, container limits hold."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        place = topology / f"cpu{cpu}" / "topology"
        try:
            cores.add(((place / "physical_package_id").read_text(), (place / "core_id").read_text()))
        except OSError:
            cores.add((str(cpu), ""))
    return max(1, min(len(cores), _container_limit(cgroup_limit)))


def _container_limit(path: Path) -> int:
    """Whole CPUs that the control group grants, rounded up."""
    unlimited = 1 << 20
    try:
        quota, period = path.read_text().split()[:2]
        return unlimited if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return unlimited
