"""What goes wrong on the device and below it: memory, kernels, captures; and what is left then."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from tests.support.device_driver import small_limits
from tests.support.tiny_model import write_tiny_model
from tests.workers.devices.cuda.rig import PROMPT, needs_compiler, pair, tiny_program
from workers.devices.cuda import opening
from workers.devices.cuda.backend import Argument, DeviceArray, Kernel
from workers.devices.cuda.device import CudaDevice
from workers.devices.cuda.plan import RESERVE_BYTES
from workers.devices.emulator.backend import EmulatorBackend
from workers.devices.emulator.memory import EmulatorArray
from workers.devices.interface import DeviceFaultError
from workers.model.program import Program
from workers.model.registry import load_program

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return tiny_program(tmp_path_factory.mktemp("tiny"), "F32")


class Faulty(EmulatorBackend):
    """The emulator with a fault at one kernel, from a given moment on."""

    def __init__(self) -> None:
        super().__init__()
        self.broken_entry = ""
        self.error: Exception | None = None
        self.only_in_capture = False

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        capturing = self._captured is not None
        if kernel.entry == self.broken_entry and (capturing or not self.only_in_capture):
            if self.error is not None:
                raise self.error
            arguments = [
                broken(argument) if isinstance(argument, EmulatorArray) else argument
                for argument in arguments
            ]
        super().launch(kernel, grid, block, shared_bytes, arguments)


def broken(array: EmulatorArray) -> DeviceArray:
    """An array too small for what its kernel does with it."""
    return EmulatorArray.allocate(1, np.uint8) if array.nbytes > 4096 else array


def test_a_fault_on_the_device_is_reported_when_the_step_is_collected_and_stays(program: Program) -> None:
    backend = Faulty()
    with pair(program, make_backend=lambda: backend) as both:
        both.driver.step({0: PROMPT})
        backend.broken_entry = "embed"
        with pytest.raises(DeviceFaultError, match="embed"):
            both.driver.step({0: [5]})
        backend.broken_entry = ""
        for _ in range(2):
            with pytest.raises(DeviceFaultError):
                both.driver.step({0: [5]})
            with pytest.raises(DeviceFaultError):
                both.driver.seat(1)


def test_memory_that_runs_out_in_a_step_is_a_device_fault(program: Program) -> None:
    backend = Faulty()
    with pair(program, make_backend=lambda: backend) as both:
        backend.broken_entry, backend.error = "rope_append", MemoryError("8 MiB wanted")
        with pytest.raises(DeviceFaultError, match="out of memory in a step of 23 rows: 8 MiB wanted"):
            both.driver.step({0: PROMPT})
        backend.broken_entry = ""
        with pytest.raises(DeviceFaultError, match="out of memory"):
            both.driver.step({0: PROMPT})


def test_a_step_that_cannot_be_captured_runs_all_the_same(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(program) as both:
        expected = both.driver.generate([PROMPT, PROMPT[:4]], 6)
    backend = Faulty()
    backend.broken_entry, backend.only_in_capture = "rope_append", True
    backend.error = DeviceFaultError("operation not permitted when stream is capturing")
    with pair(program, make_backend=lambda: backend) as both, caplog.at_level(logging.WARNING):
        assert both.driver.generate([PROMPT, PROMPT[:4]], 6) == expected
        assert both.cuda.num_graphs == 0
    (record,) = caplog.records
    assert "not permitted when stream is capturing" in record.getMessage()


def test_a_gpu_that_cannot_capture_is_warm_with_one_warning(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Faulty()
    backend.broken_entry, backend.only_in_capture = "rope_append", True
    backend.error = DeviceFaultError("operation not permitted when stream is capturing")
    with pair(program, make_backend=lambda: backend) as both, caplog.at_level(logging.WARNING):
        both.cuda.warm_up()
        assert both.driver.step({0: PROMPT}).ok[0]
    (record,) = caplog.records
    assert "they run slower" in record.getMessage()


def test_a_fault_in_the_warm_up_belongs_to_the_load(tmp_path: Path) -> None:
    backend = Faulty()
    backend.broken_entry = "rope_append"
    model = ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf"))
    with pytest.raises(ConfigError, match=r"failed while .*tiny.gguf was loaded: .*rope_append"):
        opening.load(Settings(batched_sessions=2), model, load_program(model), backend)


def test_memory_that_runs_out_at_load_says_what_to_lower(tmp_path: Path) -> None:
    class Shrinking(EmulatorBackend):
        """Says it has more memory than it has, as when another process takes some meanwhile."""

        def memory_info(self) -> tuple[int, int]:
            return 8 << 30, 8 << 30

    model = ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf"))
    settings = Settings(batched_sessions=4)
    with pytest.raises(ConfigError, match=r"ran out while .*tiny.gguf.*--gpu-memory-fraction") as caught:
        opening.load(settings, model, load_program(model), Shrinking(memory_bytes=1 << 20))
    assert caught.value.setting == "gpu_memory_fraction"


def test_a_model_larger_than_the_gpu_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model = ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf"))
    backend = EmulatorBackend(memory_bytes=RESERVE_BYTES + (1 << 20))
    with pytest.raises(ConfigError, match=r"does not fit: .* MiB of weights"):
        opening.load(Settings(batched_sessions=4), model, load_program(model), backend)
    assert backend.num_allocations == 0


def test_a_gpu_that_fails_while_it_loads_is_told_in_one_line(tmp_path: Path) -> None:
    class Dead(EmulatorBackend):
        def synchronise(self, event: object | None = None) -> None:
            raise DeviceFaultError("uncorrectable ECC error")

    model = ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf"))
    with pytest.raises(ConfigError, match=r"failed while .*: uncorrectable ECC error"):
        opening.load(Settings(batched_sessions=4), model, load_program(model), Dead())


def test_a_device_without_memory_for_one_page_raises_at_once(program: Program) -> None:
    with pytest.raises(MemoryError):
        CudaDevice(program, small_limits(max_seats=2), EmulatorBackend(memory_bytes=1000))
