"""Which device runs the model.

Owns: the choice. Runs in: the worker, at start. What needs a package of its own (Numba, CuPy) is
imported only when chosen, so that a machine without it still has the other devices.
"""

import importlib
import logging
from typing import Any

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from workers.devices.cuda import opening
from workers.devices.cuda.backend import Backend
from workers.devices.cuda.driver import probe
from workers.devices.cuda.shapes import check_shape
from workers.devices.interface import Device, Limits
from workers.devices.limits import Need, compute_limits
from workers.devices.memory import available_bytes
from workers.devices.mock import open_mock
from workers.model.program import Program
from workers.model.registry import load_program

log = logging.getLogger(__name__)


def _device_class(name: str) -> Any:
    if name == "reference":
        from workers.devices.reference.device import ReferenceDevice

        return ReferenceDevice
    return importlib.import_module("workers.devices.cpu.device").CpuDevice


def _without_cpu(settings: Settings, reason: str, remedy: str) -> str:
    """What to run instead of the cpu device, with a warning. Raises ConfigError where it was asked for."""
    if settings.device == "cpu":
        raise ConfigError(f"{reason}; {remedy}use --device reference", setting="device")
    log.warning(
        "%s: falling back to the NumPy reference, which is 10 to 20 times slower and takes four bytes a weight",
        reason,
    )
    return "reference"


def _without_numba(settings: Settings, error: ImportError) -> str:
    reason = f"the cpu device needs Numba, which does not work here ({error})"
    return _without_cpu(settings, reason, "install ds4-server[cpu] or ")


def _gpu(settings: Settings, program: Program) -> Backend | None:
    """The GPU, where one is asked for, or where there is one that runs `program` and nothing else is asked for."""
    if settings.device == "cuda":
        return opening.open_gpu()
    if settings.device != "auto" or probe().problem:
        return None
    try:
        check_shape(program.dimensions)
        return opening.open_gpu()
    except ConfigError as error:
        log.warning("there is a GPU, but it is not used: %s", error)
        return None


def _choose(settings: Settings, program: Program) -> str:
    """The name of the device without a GPU: what was asked for, or the best that runs `program`."""
    if settings.device == "reference":
        return "reference"
    try:
        problem = _device_class("cpu").unsupported(program)
    except ImportError as error:
        return _without_numba(settings, error)
    return _without_cpu(settings, problem, "") if problem else "cpu"


def open_device(settings: Settings, model: ModelFile) -> tuple[Device, Limits]:
    """Load `model` onto the device that `settings` name. Raises ConfigError (ModelFileError included)."""
    if settings.device == "mock":
        log.warning("the mock device invents words: no model is run")
        return open_mock(settings, model)
    program = load_program(model)
    gpu = _gpu(settings, program)
    if gpu is not None:
        return opening.load(settings, model, program, gpu)
    name = _choose(settings, program)
    try:
        return _open(name, settings, model, program)
    except ImportError as error:  # Numba itself is imported only where no compiled code is cached
        return _open(_without_numba(settings, error), settings, model, program)


def _open(name: str, settings: Settings, model: ModelFile, program: Program) -> tuple[Device, Limits]:
    kind = _device_class(name)
    need = Need(
        weight_bytes=kind.weight_bytes(program),
        kv_value_bytes=kind.kv_value_bytes,
        kv_scale_bytes=kind.kv_scale_bytes,
    )
    limits = compute_limits(settings, program.dimensions, need, available_bytes())
    try:
        device: Device = kind(program, limits, threads=settings.threads)
    except MemoryError:
        raise ConfigError(
            f"not enough memory for {model.path} on the {name} device with {limits.num_pages} KV pages; "
            "lower --kv-cache-tokens, --ctx or --batched-sessions",
            setting="kv_cache_tokens",
        ) from None
    return device, limits
