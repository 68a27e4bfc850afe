"""From settings to a loaded CUDA device: the GPU, the memory plan, the device.

Owns: nothing. Runs in: the worker, at start. CuPy is imported here, inside `open_gpu`, and only once the
driver has said that there is a GPU.
"""

import logging
import time

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from workers.devices.cuda.backend import Backend
from workers.devices.cuda.dense import DENSE_ROWS, copy_bytes
from workers.devices.cuda.device import CudaDevice, memory_needs
from workers.devices.cuda.driver import probe
from workers.devices.cuda.launches import KV_VALUE_BYTES
from workers.devices.cuda.plan import plan_memory
from workers.devices.cuda.shapes import check_shape
from workers.devices.interface import DeviceFaultError, Limits
from workers.devices.limits import step_limits
from workers.model.program import Program

log = logging.getLogger(__name__)


def open_gpu() -> Backend:
    """The first visible GPU. Raises ConfigError saying what is missing and what to install."""
    driver = probe()
    if driver.problem:
        raise ConfigError(f"no usable GPU: {driver.problem}; use --device cpu", setting="device")
    try:
        from workers.devices.cuda.cupy_backend import open_backend
    except ImportError as error:
        extra = "cuda13" if driver.cuda_version >= 13000 else "cuda12"
        raise ConfigError(
            f"the GPU needs CuPy, which cannot be imported ({error}); pip install 'ds4-server[{extra}]'",
            setting="device",
        ) from None
    except OSError as error:  # it makes its folder when it is imported
        raise ConfigError(
            f"CuPy keeps compiled kernels in a folder that it cannot make ({error}); name another in CUPY_CACHE_DIR",
            setting="device",
        ) from None
    return open_backend(driver)


def load(
    settings: Settings, model: ModelFile, program: Program, backend: Backend
) -> tuple[CudaDevice, Limits]:
    """The model on the GPU. Raises ConfigError where it does not fit or is of a shape without kernels."""
    sizes = program.dimensions
    check_shape(sizes)
    weight_bytes, buffer_bytes = memory_needs(
        program, step_limits(settings, sizes), batch_invariant=settings.batch_invariant
    )
    uses_copies = (
        not settings.batch_invariant and settings.max_batch_tokens >= DENSE_ROWS and backend.can_multiply
    )
    free_bytes, total_bytes = backend.memory_info()
    plan = plan_memory(
        settings,
        sizes,
        weight_bytes=weight_bytes,
        buffer_bytes=buffer_bytes,
        copy_bytes=copy_bytes(program) if uses_copies else 0,
        kv_value_bytes=KV_VALUE_BYTES,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )
    started_s = time.monotonic()
    try:
        device = CudaDevice(
            program,
            plan.limits,
            backend,
            batch_invariant=settings.batch_invariant,
            keeps_copies=plan.copy_bytes > 0,
        )
        device.warm_up()
    except MemoryError as error:
        raise ConfigError(
            f"the GPU's memory ran out while {model.path} was loaded ({error}); lower --gpu-memory-fraction "
            f"({settings.gpu_memory_fraction:g}), --max-batch-tokens or --ctx",
            setting="gpu_memory_fraction",
        ) from None
    except DeviceFaultError as error:
        raise ConfigError(
            f"the GPU failed while {model.path} was loaded: {error}", setting="device"
        ) from None
    log.info(
        "model on the GPU",
        extra={
            "after_s": round(time.monotonic() - started_s, 1),
            "free_mib": backend.memory_info()[0] >> 20,
        },
    )
    return device, plan.limits
