"""The emulator's stream: order, deferral, capture, faults and memory behave as CUDA's do."""

from pathlib import Path
from typing import Final

import numpy as np
import pytest

import tests.workers.kernels
from tests.workers.kernels.rig import Rig, needs_compiler
from workers.devices.cuda.backend import Backend
from workers.devices.emulator import compiler
from workers.devices.emulator.backend import EmulatorBackend
from workers.devices.interface import DeviceFaultError
from workers.kernels import catalogue
from workers.kernels.sources import Kernel

pytestmark = needs_compiler

BROKEN: Final = str(Path(tests.workers.kernels.__file__).parent / "broken.cu")
STORE: Final = Kernel(source=BROKEN, entry="store_value")
MISALIGNED: Final = Kernel(source=BROKEN, entry="misaligned_load")


@pytest.fixture
def backend() -> EmulatorBackend:
    made = EmulatorBackend()
    made.prepare([STORE, MISALIGNED])
    return made


def store(backend: Backend, out: object, value: int) -> None:
    backend.launch(STORE, (1, 1, 1), 32, 0, [out, value])  # type: ignore[list-item]


def break_it(backend: EmulatorBackend) -> None:
    out, data = backend.allocate(32, np.int32), backend.allocate(34 * 32, np.uint8)
    backend.launch(MISALIGNED, (1, 1, 1), 32, 0, [out, data])
    with pytest.raises(DeviceFaultError, match="misaligned"):
        backend.synchronise()


def test_the_emulator_is_a_backend(backend: EmulatorBackend) -> None:
    accepted: Backend = backend
    assert accepted.name == "emulator"


def test_nothing_runs_before_something_waits(backend: EmulatorBackend) -> None:
    out, host = backend.allocate(32, np.int32), backend.pinned(32, np.int32)
    before = host.copy()
    store(backend, out, 3)
    backend.download(out, host)
    assert np.array_equal(host, before)
    assert backend.num_launches == 0
    backend.synchronise()
    assert (host == 3).all()


def test_an_event_waits_for_what_was_queued_before_it(backend: EmulatorBackend) -> None:
    out, host = backend.allocate(32, np.int32), backend.pinned(32, np.int32)
    store(backend, out, 1)
    backend.download(out, host)
    event = backend.record()
    store(backend, out, 2)
    backend.synchronise(event)
    assert (host == 1).all()
    assert backend.num_launches == 1


def test_asking_an_event_lets_time_pass(backend: EmulatorBackend) -> None:
    out = backend.allocate(32, np.int32)
    for value in range(3):
        store(backend, out, value)
    event = backend.record()
    answers = [event.reached for _ in range(3)]
    assert answers == [False, False, True]


def test_pinned_memory_is_read_when_the_copy_runs(backend: EmulatorBackend) -> None:
    device, host = backend.allocate(4, np.int32), backend.pinned(4, np.int32)
    host[:] = 1
    backend.upload(host, device)
    host[:] = 2  # too early
    backend.synchronise()
    assert (device.data == 2).all()


def test_other_memory_is_copied_before_the_call_returns(backend: EmulatorBackend) -> None:
    device, host = backend.allocate(4, np.int32), np.full(4, 1, np.int32)
    backend.upload(host, device)
    host[:] = 2
    backend.synchronise()
    assert (device.data == 1).all()


def test_a_download_needs_pinned_memory(backend: EmulatorBackend) -> None:
    with pytest.raises(ValueError, match="pinned"):
        backend.download(backend.allocate(4, np.int32), np.zeros(4, np.int32))


def test_a_copy_needs_room_and_contiguous_memory(backend: EmulatorBackend) -> None:
    device, host = backend.allocate(4, np.int32), backend.pinned((4, 4), np.int32)
    for bad in (host, host[:, 0]):
        with pytest.raises(ValueError, match="contiguous"):
            backend.upload(bad, device)
        with pytest.raises(ValueError, match="contiguous"):
            backend.download(device, bad)


def test_part_of_a_pinned_array_is_pinned(backend: EmulatorBackend) -> None:
    device, host = backend.allocate(8, np.int32), backend.pinned(8, np.int32)
    backend.fill(device, 1)
    backend.download(device, host[2:6])
    backend.synchronise()
    assert (host[2:6] == 0x01010101).all()


def test_a_graph_freezes_values_and_addresses_and_runs_only_when_replayed(backend: EmulatorBackend) -> None:
    out = backend.allocate(32, np.int32)
    backend.begin_capture()
    store(backend, out, 1)
    store(backend, out, 2)
    graph = backend.end_capture()
    assert graph.num_launches == 2
    backend.synchronise()
    assert backend.num_launches == 0
    backend.replay(graph)
    backend.replay(graph)
    backend.synchronise()
    assert backend.num_launches == 4
    assert (out.data == 2).all()


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda b, d, h: b.allocate(4, np.int32),
        lambda b, d, h: b.upload(h, d),
        lambda b, d, h: b.download(d, h),
        lambda b, d, h: b.fill(d, 0),
        lambda b, d, h: b.record(),
        lambda b, d, h: b.synchronise(),
        lambda b, d, h: b.begin_capture(),
        lambda b, d, h: b.multiply(d, 1, d, d, (1, 1, 1), accumulate=False),
        lambda b, d, h: b.launch(Kernel(source=BROKEN, entry="overrun"), (1, 1, 1), 32, 0, [d]),
    ],
    ids=[
        "allocate",
        "upload",
        "download",
        "fill",
        "record",
        "synchronise",
        "capture",
        "cuBLAS",
        "load a kernel",
    ],
)
def test_what_may_not_be_captured_breaks_the_capture(backend: EmulatorBackend, forbidden: object) -> None:
    device, host = backend.allocate(32, np.int32), backend.pinned(32, np.int32)
    backend.begin_capture()
    with pytest.raises(DeviceFaultError, match="while a graph is captured"):
        forbidden(backend, device, host)  # type: ignore[operator]
    with pytest.raises(DeviceFaultError, match="the capture is broken"):
        backend.end_capture()
    store(backend, device, 5)  # the stream itself lives on
    backend.synchronise()
    assert (device.data == 5).all()


def test_an_event_may_not_be_asked_during_capture(backend: EmulatorBackend) -> None:
    event = backend.record()
    backend.begin_capture()
    with pytest.raises(DeviceFaultError, match="while a graph is captured"):
        _ = event.reached
    with pytest.raises(DeviceFaultError, match="broken"):
        backend.end_capture()


def test_a_capture_that_was_not_begun_cannot_end(backend: EmulatorBackend) -> None:
    with pytest.raises(DeviceFaultError, match="no graph is being captured"):
        backend.end_capture()


def test_the_first_fault_is_raised_by_every_later_call(backend: EmulatorBackend) -> None:
    out = backend.allocate(32, np.int32)
    break_it(backend)
    with pytest.raises(DeviceFaultError, match="misaligned"):
        store(backend, out, 1)
    with pytest.raises(DeviceFaultError, match="misaligned"):
        backend.synchronise()
    with pytest.raises(DeviceFaultError, match="misaligned"):
        backend.begin_capture()
    assert (out.data == -1).all()


def test_memory_freed_too_early_is_found_in_a_launch_a_copy_and_a_graph() -> None:
    for use in ("launch", "copy", "graph"):
        backend = EmulatorBackend()
        backend.prepare([STORE])
        out = backend.allocate(32, np.int32)
        if use == "launch":
            store(backend, out, 1)
        elif use == "copy":
            backend.upload(np.zeros(32, np.int32), out)
        else:
            backend.begin_capture()
            store(backend, out, 1)
            graph = backend.end_capture()
            backend.replay(graph)
        del out
        with pytest.raises(DeviceFaultError, match=r"illegal memory access|was freed"):
            backend.synchronise()


def test_memory_is_limited_and_counted() -> None:
    backend = EmulatorBackend(memory_bytes=1000)
    backend.allocate(600, np.uint8)
    assert backend.memory_info() == (400, 1000)
    with pytest.raises(MemoryError, match="600 bytes wanted, 400 free"):
        backend.allocate((3, 50), np.float32)


def test_closing_twice_is_fine(backend: EmulatorBackend) -> None:
    store(backend, backend.allocate(32, np.int32), 1)
    backend.close()
    backend.close()
    assert backend.num_launches == 0


def test_fibers_switch_without_assembly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other processors than x86-64 use."""
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DEMULATOR_PORTABLE"))
    rig = Rig(EmulatorBackend(thread_order=1))
    hidden = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    out, weight = rig.empty((2, 64)), rig.put(np.ones(64, np.float32))
    rig.run(catalogue.norm(2, 64), [rig.put(hidden), None, weight, 64, 0.0, out, None, None, 0])
    assert np.allclose(rig.get(out), hidden / np.sqrt((hidden**2).mean(1, keepdims=True)), rtol=1e-5)
