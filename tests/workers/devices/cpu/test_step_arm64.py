"""Whole steps of the engine's arm64 code on an emulated processor: QEMU's, and Debian's cross compiler links."""

import ctypes
import itertools
import mmap
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("numba", reason="the CPU engine needs numba")

from ds4.config import cache_dir
from ds4.generation import SamplingParams
from tests.support.device_driver import DeviceDriver, small_limits
from tests.workers.devices.cpu.rig import ALL_KINDS, distance, tiny_program
from tests.workers.devices.cpu.test_device import FLOAT, INT8
from workers.devices.cpu import device as device_module
from workers.devices.cpu.device import CpuDevice
from workers.devices.cpu.machine_code import object_code
from workers.devices.cpu.spec import StepSpec
from workers.devices.cpu.target import Isa, Target, restricted_target
from workers.devices.reference.device import ReferenceDevice

_EMULATOR: Final = shutil.which("qemu-aarch64")
_COMPILER: Final = shutil.which("aarch64-linux-gnu-gcc")
_ADDRESS: Final = 0x20_0000_0000  # free in the test and in the emulated process
_SIZE: Final = 1 << 30
_STEP_S: Final = 300.0  # takes one

pytestmark = pytest.mark.skipif(
    _EMULATOR is None or _COMPILER is None,
    reason="qemu-user and gcc-aarch64-linux-gnu are needed to run arm64 code",
)


class Region:
    """A file mapped at a fixed address, from which arrays are cut. Never unmapped: arrays live on in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("wb") as file:
            file.truncate(_SIZE)
        with path.open("r+b") as file:
            process = ctypes.CDLL(None, use_errno=True)
            process.mmap.restype = ctypes.c_void_p
            fixed_no_replace = 0x100000
            found = process.mmap(
                ctypes.c_void_p(_ADDRESS),
                ctypes.c_size_t(_SIZE),
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_SHARED | fixed_no_replace,
                file.fileno(),
                ctypes.c_long(0),
            )
        assert found == _ADDRESS
        self._memory = memoryview((ctypes.c_uint8 * _SIZE).from_address(_ADDRESS)).cast("B")
        self._used = 0

    def zeros(self, shape: Any, dtype: Any = float) -> NDArray[Any]:
        """As numpy.zeros."""
        kind: np.dtype[Any] = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        offset, self._used = self._used, self._used + -(-count * kind.itemsize // 64) * 64
        assert self._used <= _SIZE, "the region is full"
        found: NDArray[Any] = np.frombuffer(self._memory, kind, count, offset)
        return found.reshape(shape)


class EmulatedCode:
    """Stands in for `MachineCode`: each step is a run of the emulator over the region."""

    def __init__(self, program: Path, region: Region) -> None:
        assert _EMULATOR is not None
        self._command = [_EMULATOR, str(program), str(region.path), hex(_ADDRESS), hex(_SIZE)]

    def __call__(self, control: int, thread: int) -> None:
        assert thread == 0
        subprocess.run([*self._command, hex(control)], check=True, timeout=_STEP_S)


def linked(target: Target, spec: StepSpec, directory: Path) -> Path:
    """A program for the emulator that runs one step of the engine's code, which serves all kinds of weights."""
    assert _COMPILER is not None
    spec = msgspec.structs.replace(spec, kinds=ALL_KINDS, table_kinds=ALL_KINDS)
    code, program = directory / "step.o", directory / "emulated_step"
    code.write_bytes(object_code(target, spec, cache_dir() / "cpu"))
    source = Path(__file__).with_name("emulated_step.c")
    subprocess.run([_COMPILER, "-static", "-o", program, source, code], check=True)
    return program


def test_steps_are_the_references_for_every_weight_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, region = small_limits(max_rows=64, max_seats=3), Region(tmp_path / "memory")
    monkeypatch.setattr(
        device_module,
        "load_machine_code",
        lambda target, spec, _: EmulatedCode(linked(target, spec, tmp_path), region),
    )
    drawing = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5)
    for quant in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"):
        program = tiny_program(tmp_path, quant)
        reference = ReferenceDevice(program, limits)
        with monkeypatch.context() as patch:
            patch.setattr(np, "zeros", region.zeros)
            device = CpuDevice(program, limits, 1, target=restricted_target(Isa.NEON_DOT))
            drivers = DeviceDriver(device, limits), DeviceDriver(reference, limits)
        for driver, seat in itertools.product(drivers, range(3)):
            driver.seat(seat, drawing if seat == 2 else None)
        rng = np.random.default_rng(4)
        for lengths in ((40, 3, 17), (1, 1, 1), (1, 20, 1)):
            rows = {seat: rng.integers(0, 200, length).tolist() for seat, length in enumerate(lengths)}
            drawn = [driver.step(rows).token_ids[:3].tolist() for driver in drivers]
            found = device.logits()
            assert distance(found, reference.logits()) < (INT8 if quant.startswith("Q") else FLOAT), quant
            assert drawn[0][:2] == found[:2].argmax(1).tolist(), quant
            if not quant.startswith("Q"):
                assert drawn[0] == drawn[1], quant
        device.close()
