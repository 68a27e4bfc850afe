"""A real worker process whose device is the fake one: `python -m tests.support.fake_worker FLAGS`.

Everything but the device is what `ds4-worker` runs. `--fault-at-step N`, `--step-ms N` and `--room N`, the context
where none is asked for, come first, in this order.
"""

import sys
import time
import types

from ds4.config import Settings
from ds4.model_file import ModelFile
from tests.support.fake_device import FakeDevice
from workers.devices.interface import Limits, StepResult


class SlowDevice(FakeDevice):
    """Takes its time, so that a test can act while something runs."""

    step_s = 0.0

    def collect(self) -> StepResult:
        time.sleep(self.step_s)
        return super().collect()


def _take_number(arguments: list[str], flag: str) -> int | None:
    if arguments[:1] != [flag]:
        return None
    number = int(arguments[1])
    del arguments[:2]
    return number


def main() -> int:
    arguments = sys.argv[1:]
    fault_at_step = _take_number(arguments, "--fault-at-step")
    step_ms = _take_number(arguments, "--step-ms") or 0
    room = _take_number(arguments, "--room") or 512

    def open_device(settings: Settings, model: ModelFile) -> tuple[FakeDevice, Limits]:
        limits = Limits(
            max_rows=settings.max_batch_tokens,
            max_seats=max(1, settings.batched_sessions),
            max_context_tokens=settings.ctx or room,
            num_pages=256,
        )
        device = SlowDevice(
            limits, vocab_size=model.vocab_size, pipeline_depth=1, fault_at_step=fault_at_step
        )
        device.step_s = step_ms / 1000
        return device, limits

    registry = types.ModuleType("workers.devices.registry")
    registry.open_device = open_device  # type: ignore[attr-defined]
    sys.modules["workers.devices.registry"] = registry
    from workers.main import main as worker_main

    return worker_main(arguments)


if __name__ == "__main__":
    sys.exit(main())
