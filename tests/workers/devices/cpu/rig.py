"""What the tests of the CPU engine share: devices over tiny models, kernels called one by one.

Runs in: tests. Code is compiled once for each shape of attention, for all weight kinds, into the user's
cache directory, so that a second run of the tests compiles nothing.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from ds4.model_file import ModelFile
from tests.support.device_driver import DeviceDriver, small_limits
from tests.support.tiny_model import TinyShape, write_tiny_model
from workers.devices.cpu import device as device_module
from workers.devices.cpu.device import CpuDevice
from workers.devices.cpu.emit import Library
from workers.devices.cpu.formats import WeightKind
from workers.devices.cpu.machine_code import load_machine_code
from workers.devices.cpu.target import Isa, Target, host_target, target_machine
from workers.devices.interface import Limits
from workers.devices.reference.device import ReferenceDevice
from workers.model.program import Program
from workers.model.registry import load_program

ALL_KINDS = tuple(int(kind) for kind in WeightKind)


def every_kind(target: Target, spec: Any, directory: Path | None) -> Any:
    """Stands in for `load_machine_code`: code for all kinds serves every model of the same heads."""
    spec = msgspec.structs.replace(spec, kinds=ALL_KINDS, table_kinds=ALL_KINDS)
    return load_machine_code(target, spec, directory)


def tiny_program(directory: Path, quant: str, shape: TinyShape | None = None, seed: int = 0) -> Program:
    path = write_tiny_model(directory / f"{quant}-{seed}.gguf", quant=quant, shape=shape, seed=seed)
    return load_program(ModelFile.open(path))


class Pair:
    """The same program on the CPU device and on the reference."""

    def __init__(self, program: Program, limits: Limits, threads: int) -> None:
        self.cpu = CpuDevice(program, limits, threads)
        self.reference = ReferenceDevice(program, limits)
        self.drivers = [DeviceDriver(self.cpu, limits), DeviceDriver(self.reference, limits)]

    def logits(self, rows: dict[int, list[int]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits of the sampled rows of one step on both."""
        for driver in self.drivers:
            driver.step(rows)
        return np.array(self.cpu.logits()), np.array(self.reference.logits())

    def close(self) -> None:
        self.cpu.close()
        self.reference.close()


@contextmanager
def pair(program: Program, *, threads: int = 2, limits: Limits | None = None) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "load_machine_code", every_kind)
        both = Pair(program, limits or small_limits(max_seats=8), threads)
    try:
        yield both
    finally:
        both.close()


@contextmanager
def cpu_driver(
    program: Program, *, threads: int = 2, limits: Limits | None = None
) -> Iterator[tuple[CpuDevice, DeviceDriver]]:
    limits = limits or small_limits(max_seats=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "load_machine_code", every_kind)
        device = CpuDevice(program, limits, threads)
    try:
        yield device, DeviceDriver(device, limits)
    finally:
        device.close()


def distance(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """Largest root mean square difference of a row, in units of the right row's standard deviation."""
    return float((np.sqrt(((left - right) ** 2).mean(1)) / right.std(1)).max())


class Kernels:
    """The functions of a library, compiled for its target and callable from Python."""

    def __init__(self, library: Library) -> None:
        from workers.devices.cpu.build import compile_kernels

        module = compile_kernels(library)
        self.machine = target_machine(library.target)
        self.assembly = self.machine.emit_assembly(module)
        self.names = library.names
        self.has_unsigned_dot = library.target.has_unsigned_dot
        self._engine: Any = None
        if can_run(library.target):
            self._engine = llvm.create_mcjit_compiler(module, self.machine)
            self._engine.finalize_object()

    def call(self, name: str, *arguments: int) -> None:
        address = self._engine.get_function_address(name)
        ctypes.CFUNCTYPE(None, *([ctypes.c_int64] * len(arguments)))(address)(*arguments)


def can_run(target: Target) -> bool:
    """True where this machine has the target's instructions."""
    host = host_target()
    if target.triple.split("-")[0] != host.triple.split("-")[0]:
        return False
    better = {
        Isa.AMX: (Isa.AMX, Isa.AVX512_VNNI, Isa.AVX_VNNI, Isa.AVX2, Isa.PLAIN),
        Isa.AVX512_VNNI: (Isa.AVX512_VNNI, Isa.AVX_VNNI, Isa.AVX2, Isa.PLAIN),
        Isa.AVX_VNNI: (Isa.AVX_VNNI, Isa.AVX2, Isa.PLAIN),
        Isa.AVX2: (Isa.AVX2, Isa.PLAIN),
        Isa.NEON_DOT: (Isa.NEON_DOT, Isa.PLAIN),
        Isa.PLAIN: (Isa.PLAIN,),
    }
    return target.isa in better[host.isa]
