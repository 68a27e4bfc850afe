"""The real server with a device that can be struck: `python -m tests.support.struck [flags]`.

Runs in: tests, where `python -m ds4` would. All is the product's but two functions: the supervisor starts
the worker through this module, and there the opened device is put into a `StruckDevice`.

- STRIKE, sent to the worker: the step in flight, and every one after it, fails with DeviceFaultError, as
  after an illegal access on a GPU.
- SLOW, sent to the worker: every step takes at least SLOW_STEP_S, so that what a test has started still runs
  when the test has come to its next line, on a machine of any speed. FAST: no more.
- A sequence whose prompt holds POISON ends the process with SIGSEGV in every step it takes part in.
"""

import os
import signal
import sys
import time
from typing import Final

import numpy as np

from ds4 import cli, supervisor
from ds4.children import module_command
from ds4.config import Settings
from ds4.model_file import ModelFile
from workers import main as worker
from workers.devices.cuda import opening
from workers.devices.cuda.backend import Backend
from workers.devices.interface import Device, DeviceFaultError, Limits, SeatParams, StepBatch, StepResult
from workers.devices.registry import open_device

STRIKE: Final = signal.SIGRTMIN
SLOW: Final = signal.SIGRTMAX
FAST: Final = signal.SIGRTMAX - 1
SLOW_STEP_S: Final = 0.5
POISON: Final = "\x07\x07\x07"
_POISON: Final = np.full(3, 10, np.uint32).tobytes()  # the tiny model's tokens for it
_WORKER: Final = "workers.main"


class StruckDevice:
    """The device it holds, with faults. Owned by the worker."""

    def __init__(self, device: Device) -> None:
        self.name = device.name
        self.pipeline_depth = device.pipeline_depth
        self._device = device
        self._poisoned: set[int] = set()
        self._is_broken = False
        self._pause_s = 0.0
        signal.signal(STRIKE, lambda number, frame: self._strike())
        signal.signal(SLOW, lambda number, frame: self._pause(SLOW_STEP_S))
        signal.signal(FAST, lambda number, frame: self._pause(0.0))

    def seat(self, seat: int, params: SeatParams) -> None:
        """As the interface says."""
        if _POISON in params.history.tobytes():
            self._poisoned.add(seat)
        else:
            self._poisoned.discard(seat)
        self._device.seat(seat, params)

    def submit(self, batch: StepBatch) -> None:
        """As the interface says."""
        self._check()
        if self._poisoned.intersection(batch.sequence_seats[: batch.num_sequences].tolist()):
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(self._pause_s)
        self._device.submit(batch)

    def collect(self) -> StepResult:
        """As the interface says."""
        self._check()
        return self._device.collect()

    def close(self) -> None:
        """As the interface says."""
        self._device.close()

    def _strike(self) -> None:
        self._is_broken = True

    def _pause(self, seconds: float) -> None:
        self._pause_s = seconds

    def _check(self) -> None:
        if self._is_broken:
            raise DeviceFaultError("an illegal memory access was encountered")


def _command(module: str) -> tuple[str, ...]:
    command = module_command(module)
    return (*command[:-1], "tests.support.struck", module) if module == _WORKER else command


def _open_struck(settings: Settings, model: ModelFile) -> tuple[Device, Limits]:
    device, limits = open_device(settings, model)
    return StruckDevice(device), limits


def _open_emulator() -> Backend:
    from workers.devices.emulator.backend import EmulatorBackend

    return EmulatorBackend()


if __name__ == "__main__":
    if sys.argv[1:2] == [_WORKER]:
        opening.open_gpu = _open_emulator
        worker.open_device = _open_struck  # type: ignore[attr-defined]
        sys.exit(worker.main(sys.argv[2:]))
    supervisor.module_command = _command  # type: ignore[attr-defined]
    sys.exit(cli.main())
