"""The CuPy backend against a stand-in: what it calls with what, and what CUDA's errors become."""

import ctypes
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.errors import ConfigError
from tests.support.fake_cupy import CompileException, FakeCupy
from workers.devices.cuda.driver import Driver
from workers.devices.interface import DeviceFaultError
from workers.kernels import sources
from workers.kernels.sources import Kernel

SOURCE = """
extern "C" __global__ void __launch_bounds__(128) scale(float* __restrict__ out, const float* in, int n, float by) {
}
extern "C" __global__ void __launch_bounds__(32) seed(u64* out, u64 value, u32 small) {
}
"""
SCALE = Kernel(source="toy.cu", entry="scale", defines=(("WIDTH", 4),))
SEED = Kernel(source="toy.cu", entry="seed", defines=(("WIDTH", 4),))
DRIVER = Driver(num_devices=1, cuda_version=13020)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCupy:
    (tmp_path / "toy.cu").write_text(SOURCE)
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    fake = FakeCupy()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def module(fake: FakeCupy) -> Iterator[Any]:
    yield importlib.import_module("workers.devices.cuda.cupy_backend")
    sources.parameters.cache_clear()
    del sys.modules["workers.devices.cuda.cupy_backend"]  # it holds on to the stand-in


@pytest.fixture
def backend(module: Any) -> Any:
    return module.open_backend(DRIVER)


def launches(fake: FakeCupy) -> list[Any]:
    return [call for call in fake.calls if call[0] == "launch"]


def test_arguments_get_the_width_that_the_kernel_declares(backend: Any, fake: FakeCupy) -> None:
    array = backend.allocate(8, np.float32)
    backend.launch(SCALE, (3, 2, 1), 128, 0, (array, None, 8, 2))
    ((_, entry, grid, block, arguments, shared),) = launches(fake)
    assert (entry, grid, block, shared) == ("scale", (3, 2, 1), (128,), 0)
    assert [type(argument) for argument in arguments] == [np.uint64, np.uint64, np.int32, np.float32]
    assert arguments[0] == array.address
    assert arguments[1] == 0
    backend.launch(SEED, (1, 1, 1), 32, 0, (array, 2**64 - 1, 7))
    assert [type(argument) for argument in launches(fake)[1][4]] == [np.uint64, np.uint64, np.uint32]


def test_arguments_of_another_kind_are_refused(backend: Any, fake: FakeCupy) -> None:
    array = backend.allocate(8, np.float32)
    for wrong in [
        (array, array, 8),
        (array, array, 8.0, 1.0),
        (np.zeros(8, np.float32), array, 8, 1.0),
        (array, array, array, 1.0),
        (8, array, 8, 1.0),
    ]:
        with pytest.raises(TypeError, match="scale"):
            backend.launch(SCALE, (1, 1, 1), 128, 0, wrong)
    with pytest.raises(ValueError, match="grid"):
        backend.launch(SCALE, (0, 1, 1), 128, 0, (array, array, 8, 1.0))
    assert launches(fake) == []


def test_kernels_of_one_file_share_a_module_and_are_compiled_once(backend: Any, fake: FakeCupy) -> None:
    backend.prepare([SCALE, SEED, SCALE])
    assert len(fake.sources) == 1
    text, options = fake.sources[0]
    assert "scale(" in text
    assert "-DWIDTH=4" in options


def test_more_shared_memory_than_usual_is_asked_for_once(backend: Any, fake: FakeCupy) -> None:
    array = backend.allocate(8, np.float32)
    for shared in (48 * 1024, 96 * 1024, 64 * 1024, 96 * 1024):
        backend.launch(SCALE, (1, 1, 1), 128, shared, (array, array, 8, 1.0))
    assert [call for call in fake.calls if call[0] == "shared"] == [("shared", 96 * 1024)]


def test_bytes_go_there_and_back(backend: Any) -> None:
    array = backend.allocate((4, 8), np.int32)
    assert array.nbytes == 128
    backend.upload(np.arange(32, dtype=np.int32), array)
    host = backend.pinned(4, np.int32)
    backend.download(array.part(32, 4, np.int32), host)
    assert host.tolist() == [8, 9, 10, 11]
    backend.fill(array.part(32, 4, np.int32), 0xFF)
    backend.download(array.part(32, 4, np.int32), host)
    assert host.tolist() == [-1] * 4


def test_copies_and_parts_past_the_end_are_refused(backend: Any) -> None:
    array = backend.allocate(8, np.int32)
    with pytest.raises(ValueError, match="36 bytes do not fit 32"):
        backend.upload(np.zeros(9, np.int32), array)
    with pytest.raises(ValueError, match="bytes 16 to 36 of 32"):
        array.part(16, 5, np.int32)
    with pytest.raises(ValueError, match="bytes 4 to 8"):
        array.part(4, 1, np.int32)


def test_a_graph_counts_its_launches_and_runs_on_the_stream(backend: Any, fake: FakeCupy) -> None:
    array = backend.allocate(8, np.float32)
    backend.begin_capture()
    for _ in range(3):
        backend.launch(SCALE, (1, 1, 1), 128, 0, (array, array, 8, 1.0))
    graph = backend.end_capture()
    assert graph.num_launches == 3
    backend.replay(graph)
    assert fake.calls[-2:] == [("upload", 7), ("replay", 7)]


def test_events_mark_the_stream(backend: Any, fake: FakeCupy) -> None:
    event = backend.record()
    assert event.reached
    backend.synchronise(event)
    backend.synchronise()
    assert [call[0] for call in fake.calls[-4:]] == ["record", "query", "wait", "synchronise"]
    fake.fail["query"] = 600  # not ready
    assert not event.reached


@pytest.mark.parametrize("call", ["copy", "launch", "wait", "synchronise", "query", "replay", "begin", "end"])
def test_an_error_of_cuda_is_a_device_fault(backend: Any, fake: FakeCupy, call: str) -> None:
    array = backend.allocate(8, np.float32)
    event = backend.record()
    backend.begin_capture()
    graph = backend.end_capture()
    fake.fail[call] = 700  # illegal address
    with pytest.raises(DeviceFaultError, match="cudaErrorNumber700"):
        _everything(backend, array, event, graph)


def _everything(backend: Any, array: Any, event: Any, graph: Any) -> None:
    backend.upload(np.zeros(8, np.float32), array)
    backend.launch(SCALE, (1, 1, 1), 128, 0, (array, array, 8, 1.0))
    assert event.reached
    backend.synchronise(event)
    backend.synchronise()
    backend.replay(graph)
    backend.begin_capture()
    backend.end_capture()


def test_memory_that_ran_out_is_no_fault_but_a_memory_error(backend: Any, fake: FakeCupy) -> None:
    fake.fail["allocate"] = 2
    with pytest.raises(MemoryError, match="allocating"):
        backend.allocate(1 << 40, np.uint8)


def test_a_kernel_that_does_not_compile_is_told_in_one_line(backend: Any, fake: FakeCupy) -> None:
    fake.compile_error = CompileException("toy.cu(3): error: expected a ;\nmore")
    with pytest.raises(ConfigError, match=r"toy\.cu.*expected a ;\)$"):
        backend.prepare([SCALE])


def test_a_cache_that_cannot_be_written_is_told_in_one_line(backend: Any, fake: FakeCupy) -> None:
    fake.compile_error = OSError(28, "No space left on device")
    with pytest.raises(ConfigError, match=r"toy\.cu.*No space left"):
        backend.prepare([SCALE])


def test_a_closed_backend_waits_for_the_copies_it_holds(backend: Any, fake: FakeCupy) -> None:
    backend.upload(np.zeros(8, np.uint8), backend.allocate(8, np.uint8))
    backend.close()
    assert fake.calls[-1] == ("synchronise",)
    fake.fail["synchronise"] = 700
    backend.close()


def test_a_driver_too_old_for_this_cupy_is_named_with_both_cures(module: Any) -> None:
    with pytest.raises(ConfigError, match=r"runs CUDA 12\.4.*needs 13\.0.*ds4-server\[cuda12\]") as caught:
        module.open_backend(Driver(num_devices=1, cuda_version=12040))
    assert caught.value.setting == "device"


def test_a_driver_older_than_every_cupy_has_one_cure(module: Any) -> None:
    with pytest.raises(ConfigError, match=r"runs CUDA 11\.8, .*update the driver$"):
        module.open_backend(Driver(num_devices=1, cuda_version=11080))


def test_a_compiler_newer_than_the_driver_is_told_with_what_to_remove(module: Any, fake: FakeCupy) -> None:
    """CuPy for CUDA 12 loads NVRTC 13 where both are installed, and makes code that the driver cannot load."""
    fake.runtime_version, fake.nvrtc_version = 12090, (13, 5)
    with pytest.raises(
        ConfigError, match=r"newer \(13\.5\).*CUDA 12\.8; pip uninstall nvidia-cuda-nvrtc nvidia"
    ):
        module.open_backend(Driver(num_devices=1, cuda_version=12080))


def test_a_gpu_without_the_instructions_is_refused_by_name(module: Any, fake: FakeCupy) -> None:
    fake.compute_capability = (7, 5)
    with pytest.raises(ConfigError, match=r"too old: Fake GPU has compute capability 7\.5.*need 8\.0"):
        module.open_backend(DRIVER)


def test_a_gpu_is_named_in_the_log(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        module.open_backend(DRIVER)
    (record,) = caplog.records
    assert (record.__dict__["gpu"], record.__dict__["compute_capability"]) == ("Fake GPU", "9.0")


@pytest.mark.parametrize(
    ("runtime", "package"), [(13020, "nvidia-cuda-nvrtc "), (12080, "nvidia-cuda-nvrtc-cu12 ")]
)
def test_a_missing_compiler_is_told_with_the_package(
    module: Any, fake: FakeCupy, runtime: int, package: str
) -> None:
    fake.runtime_version = runtime
    fake.nvrtc_error = RuntimeError("libnvrtc.so not found\nsearched there")
    with pytest.raises(ConfigError, match=rf"\(libnvrtc\.so not found\); pip install {package}"):
        module.open_backend(DRIVER)


def test_a_gpu_that_does_not_answer_is_a_config_error(module: Any, fake: FakeCupy) -> None:
    fake.fail["stream"] = 46  # devices unavailable
    with pytest.raises(ConfigError, match="cannot be used: cudaErrorNumber46"):
        module.open_backend(DRIVER)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_product_is_given_to_cublas_by_columns(backend: Any, fake: FakeCupy, accumulate: bool) -> None:
    out, x, weight = (backend.allocate(size, np.uint8) for size in (4 * 3 * 7, 2 * 3 * 8, 2 * 5 * 8))
    seen: list[float] = []

    def gemm(*arguments: Any) -> None:
        fake.calls.append(("gemm", *arguments))
        seen.extend(ctypes.c_float.from_address(arguments[index]).value for index in (6, 13))

    fake.cupy.cuda.cublas.gemmEx = gemm
    assert backend.can_multiply
    backend.multiply(out, 7, x, weight, (3, 5, 8), accumulate=accumulate)
    ((_, handle, *arguments),) = [call for call in fake.calls if call[0] == "gemm"]
    assert handle == 99
    assert arguments[:5] == [1, 0, 5, 3, 8]
    assert arguments[6:9] == [weight.address, 14, 8]
    assert arguments[9:12] == [x.address, 14, 8]
    assert arguments[13:16] == [out.address, 0, 7]
    assert seen == [1.0, float(accumulate)]


@pytest.mark.parametrize(
    "error", [ImportError("libcublas.so.13"), RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")]
)
def test_without_cublas_there_are_no_products_and_one_warning(
    backend: Any, fake: FakeCupy, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    fake.cublas_error = error
    assert not backend.can_multiply
    assert not backend.can_multiply
    assert caplog.text.count("cuBLAS cannot be loaded") == 1


def test_a_failure_of_cublas_is_a_device_fault(backend: Any, fake: FakeCupy) -> None:
    array = backend.allocate(64, np.uint8)
    fake.fail["gemm"] = 13
    with pytest.raises(DeviceFaultError, match="a matrix product: cudaErrorNumber13"):
        backend.multiply(array, 1, array, array, (1, 1, 8), accumulate=False)


def test_a_small_source_that_is_not_pinned_is_held_until_the_copy_ran(backend: Any, fake: FakeCupy) -> None:
    array = backend.allocate(64, np.uint8)
    sources: list[int] = []
    copy = fake.cupy.cuda.runtime.memcpyAsync

    def late(target: int, source: int, size: int, kind: int, stream: int) -> None:
        sources.append(source)
        copy(target, source, size, kind, stream)

    fake.cupy.cuda.runtime.memcpyAsync = late
    host, pinned = np.arange(64, dtype=np.uint8), backend.pinned(64, np.uint8)
    backend.upload(host, array)
    assert sources[-1] != host.ctypes.data
    assert len(backend._held) == 1
    backend.upload(pinned[:32], array)
    assert sources[-1] == pinned.ctypes.data
    backend.upload(host, array)
    assert len(backend._held) == 1  # the first copy's event was reached
    assert ("synchronise",) not in fake.calls


def test_a_large_source_that_is_not_pinned_is_waited_for(backend: Any, fake: FakeCupy) -> None:
    size = (1 << 20) + 16
    backend.upload(np.zeros(size, np.uint8), backend.allocate(size, np.uint8))
    assert [call[0] for call in fake.calls[-2:]] == ["copy", "synchronise"]
