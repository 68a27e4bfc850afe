"""Which device is chosen."""

import logging
import math
import sys
from pathlib import Path

import pytest

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from tests.support.tiny_model import TinyShape, write_tiny_model
from tests.workers.kernels.rig import needs_compiler
from workers.devices import registry
from workers.devices.cuda import opening
from workers.devices.cuda.driver import Driver
from workers.devices.emulator.backend import EmulatorBackend
from workers.devices.interface import Limits
from workers.devices.limits import Need, compute_limits, page_bytes
from workers.devices.registry import open_device
from workers.model.program import Dimensions
from workers.model.registry import load_program


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    return ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf"))


def test_the_reference_is_opened_by_name(model: ModelFile) -> None:
    device, limits = open_device(Settings(device="reference", batched_sessions=3), model)
    assert device.name == "reference"
    assert limits.max_seats == 3
    device.close()


def no_gpu() -> Driver:
    return Driver(problem="no NVIDIA driver is installed")


def one_gpu() -> Driver:
    return Driver(num_devices=1, cuda_version=13000)


@pytest.fixture(autouse=True)
def machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (registry, opening):
        monkeypatch.setattr(module, "probe", no_gpu)


def test_cuda_without_a_gpu_is_refused_with_the_reason(model: ModelFile) -> None:
    with pytest.raises(ConfigError, match=r"no NVIDIA driver is installed; use --device cpu") as caught:
        open_device(Settings(device="cuda"), model)
    assert caught.value.setting == "device"


def test_without_a_gpu_cupy_is_never_imported(model: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it now fails
    monkeypatch.setitem(sys.modules, "workers.devices.cpu.device", None)
    device, _ = open_device(Settings(device="auto", batched_sessions=2), model)
    assert device.name == "reference"


@pytest.mark.parametrize(("version", "extra"), [(12080, "cuda12"), (13000, "cuda13")])
def test_a_gpu_without_cupy_names_what_to_install(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch, version: int, extra: str
) -> None:
    monkeypatch.setattr(opening, "probe", lambda: Driver(num_devices=1, cuda_version=version))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=rf"needs CuPy.*pip install 'ds4-server\[{extra}\]'"):
        open_device(Settings(device="cuda"), model)


def test_auto_with_a_gpu_that_cannot_be_used_warns_and_runs_on_the_cpu(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (registry, opening):
        monkeypatch.setattr(module, "probe", one_gpu)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with caplog.at_level(logging.WARNING):
        device, _ = open_device(Settings(batched_sessions=2), model)
    assert device.name != "cuda"
    device.close()
    assert "there is a GPU, but it is not used" in caplog.text


class Unwritable:
    """CuPy where it cannot make its folder of compiled kernels."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "cupy":
            raise PermissionError(13, "Permission denied", "/.cupy/kernel_cache")


def test_a_folder_that_cupy_cannot_make_is_told_with_the_cure(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "probe", one_gpu)
    monkeypatch.delitem(sys.modules, "workers.devices.cuda.cupy_backend", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Unwritable(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"/\.cupy/kernel_cache'\); name another in CUPY_CACHE_DIR"):
        open_device(Settings(device="cuda"), model)


@needs_compiler
def test_auto_leaves_a_shape_without_kernels_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = TinyShape(hidden_size=96, num_heads=4, num_kv_heads=2, head_size=24)
    odd = ModelFile.open(write_tiny_model(tmp_path / "odd.gguf", shape=shape))
    monkeypatch.setattr(registry, "probe", one_gpu)
    monkeypatch.setattr(opening, "open_gpu", EmulatorBackend)
    with caplog.at_level(logging.WARNING):
        device, _ = open_device(Settings(batched_sessions=2), odd)
    assert device.name == "reference"
    device.close()
    assert "it is not used: the GPU's kernels do not run heads of 24" in caplog.text
    with pytest.raises(ConfigError, match="heads of 24"):
        open_device(Settings(device="cuda"), odd)


@needs_compiler
def test_auto_takes_the_gpu_where_there_is_one(model: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "probe", one_gpu)
    monkeypatch.setattr(opening, "open_gpu", EmulatorBackend)
    device, limits = open_device(Settings(batched_sessions=2), model)
    assert device.name == "cuda"
    assert limits.num_pages >= 2 * 512 // 16
    device.close()


def test_without_the_cpu_device_auto_falls_back_with_one_warning(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "workers.devices.cpu.device", None)  # importing it now fails
    with caplog.at_level(logging.WARNING):
        device, _ = open_device(Settings(batched_sessions=2), model)
    assert device.name == "reference"
    (record,) = caplog.records
    assert "slower" in record.getMessage()
    with pytest.raises(ConfigError, match="needs Numba"):
        open_device(Settings(device="cpu"), model)


def test_a_model_that_the_cpu_device_cannot_run_falls_back_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba", reason="the CPU engine needs numba")
    shape = TinyShape(hidden_size=96, num_heads=4, num_kv_heads=2, head_size=24)
    model = ModelFile.open(write_tiny_model(tmp_path / "odd.gguf", shape=shape))
    with caplog.at_level(logging.WARNING):
        device, _ = open_device(Settings(batched_sessions=2), model)
    assert device.name == "reference"
    device.close()
    (record,) = caplog.records
    assert "head size that is a multiple of 16, and this model has 24" in record.getMessage()
    assert "slower" in record.getMessage()
    with pytest.raises(ConfigError, match=r"head size .* 24; use --device reference"):
        open_device(Settings(device="cpu"), model)


def test_the_weights_are_counted_as_the_device_keeps_them(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: list[Need] = []

    def noted(settings: Settings, sizes: Dimensions, need: Need, free_bytes: int) -> Limits:
        needs.append(need)
        return compute_limits(settings, sizes, need, free_bytes)

    monkeypatch.setattr(registry, "compute_limits", noted)
    open_device(Settings(device="reference", batched_sessions=2), model)[0].close()
    program = load_program(model)
    num_values = sum(math.prod(tensor.shape) for tensor in program.tensors())
    assert (needs[0].weight_bytes, needs[0].kv_value_bytes) == (4 * num_values, 4)
    pytest.importorskip("numba", reason="the CPU engine needs numba")
    from workers.devices.cpu import groups
    from workers.devices.cpu.device import CpuDevice

    open_device(Settings(device="cpu", batched_sessions=2), model)[0].close()
    assert needs[1].weight_bytes == CpuDevice.weight_bytes(program)
    sizes = program.dimensions
    counted = page_bytes(sizes, needs[1].kv_value_bytes, needs[1].kv_scale_bytes)
    assert counted == 2 * sizes.num_layers * sizes.num_kv_heads * groups.page_bytes(sizes.head_size)
