"""What a GPU would get wrong, with or without a word, is reported: one deliberately wrong kernel each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

import tests.workers.kernels
from tests.workers.kernels.rig import needs_compiler
from workers.devices.emulator.backend import EmulatorBackend
from workers.devices.interface import DeviceFaultError
from workers.kernels.sources import Kernel, parameters

pytestmark = needs_compiler

BROKEN: Final = str(Path(tests.workers.kernels.__file__).parent / "broken.cu")


def floats(count: int) -> NDArray[np.float32]:
    return np.arange(count, dtype=np.float32)


def run(
    entry: str,
    arguments: Sequence[Any],
    *,
    block: int = 32,
    grid: int = 1,
    order: int = 0,
    shared_bytes: int = 0,
    result: int = 32,
) -> NDArray[Any]:
    """The first argument after the kernel; arrays are uploaded, an int in its place makes an empty one."""
    backend = EmulatorBackend(thread_order=order)
    out = backend.allocate(result, np.float32)
    given: list[Any] = [out]
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            device = backend.allocate(argument.shape, argument.dtype)
            backend.upload(argument, device)
            given.append(device)
        else:
            given.append(argument)
    backend.launch(Kernel(source=BROKEN, entry=entry), (grid, 1, 1), block, shared_bytes, given)
    host = backend.pinned(result, np.float32)
    backend.download(out, host)
    backend.synchronise()
    return host


REPORTED: Final[list[tuple[str, list[Any], dict[str, int], str]]] = [
    ("divergent_barrier", [], {"block": 64, "result": 64}, "divergent barrier: this thread is at line"),
    ("barrier_in_a_branch", [], {"block": 64, "result": 64}, "deadlock: none of the .* threads"),
    ("divergent_collective", [], {}, "in another warp operation"),
    ("divergent_matrix", [], {}, "in another warp operation"),
    ("wrong_mask", [], {}, "the mask 0000ffff lacks the calling lane"),
    ("lane_outside_the_mask", [], {}, "reads lane 20, which is not in the mask"),
    ("returned_lanes", [20], {}, "names lanes that have returned|while other lanes wait"),
    ("misaligned_load", [np.zeros(34 * 32 + 8, np.uint8)], {}, r"misaligned access at .*broken.cu:\d+"),
    ("misaligned_vector", [floats(128)], {}, r"misaligned access at .*broken.cu:\d+"),
    ("misaligned_copy", [floats(128)], {}, "cp.async of 16 bytes is misaligned"),
    ("misaligned_matrix_row", [], {}, "ldmatrix: the row address .* is not 16-byte aligned"),
    ("overrun", [], {"grid": 4, "result": 100}, r"illegal memory access at .*"),
    ("read_overrun", [floats(124)], {}, "illegal memory access"),
    ("null_pointer", [None], {}, "illegal memory access"),
    ("shared_overrun", [], {}, r"array index out of bounds at .*broken.cu:\d+"),
    ("dynamic_overrun", [], {"shared_bytes": 112}, "illegal memory access"),
    ("local_overrun", [0], {}, r"array index out of bounds at .*broken.cu:\d+"),
    ("forgotten_copy_wait", [floats(128)], {}, "cp.async copies it never waited for"),
    ("wide_shift", [5], {}, r"shift count too large at .*broken.cu:\d+"),
    ("deep_stack", [20000], {}, "stack overflow|illegal memory access"),
    ("store_value", [1], {"grid": 0}, "invalid launch configuration"),
    ("store_value", [1], {"block": 0}, "invalid launch configuration"),
    ("store_value", [1], {"shared_bytes": 300_000}, "invalid launch configuration"),
]


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize(("entry", "arguments", "launch", "text"), REPORTED)
def test_a_defect_is_an_error_that_names_the_kernel(
    entry: str, arguments: list[Any], launch: dict[str, int], text: str, order: int
) -> None:
    with pytest.raises(DeviceFaultError, match=text) as caught:
        run(entry, arguments, order=order, **launch)
    assert str(caught.value).startswith(entry)


@pytest.mark.parametrize(
    ("entry", "count", "wanted"),
    [
        ("missing_barrier", 64, floats(64)[::-1]),
        ("missing_second_barrier", 128, floats(64)[::-1] + 64 + floats(64)[::-1]),
        ("copy_without_barrier", 256, floats(256)[::4][::-1]),
    ],
)
def test_a_missing_barrier_shows_in_some_order_of_threads(
    entry: str, count: int, wanted: NDArray[np.float32]
) -> None:
    results = [run(entry, [floats(count)], block=64, order=order, result=64) for order in (0, 1, 2)]
    assert any(not np.array_equal(result, wanted) for result in results)


def test_a_warp_far_ahead_is_seen_in_a_greedy_order() -> None:
    wanted = np.zeros(64, np.float32)
    for row in floats(256).reshape(4, 64):
        wanted += 4 * row[:32].sum()
    results = [
        run("missing_barrier_far_ahead", [floats(256)], block=64, order=order, result=64)
        for order in (3, 5, 7)
    ]
    assert any(not np.array_equal(result, wanted) for result in results)


@pytest.mark.parametrize(
    ("entry", "arguments", "bad"),
    [
        ("unwritten_shared", [], slice(0, 1)),
        ("partly_unwritten", [], slice(0, None, 2)),
        ("short_copy_wait", [floats(128)], slice(None)),
    ],
)
def test_what_nobody_wrote_is_nan(entry: str, arguments: list[Any], bad: slice) -> None:
    result = run(entry, arguments)
    assert np.isnan(result[bad]).all()
    assert np.isnan(result).sum() == len(result[bad])


def test_every_broken_kernel_has_a_test() -> None:
    tested = {entry for entry, *_ in REPORTED}
    tested |= {
        "missing_barrier",
        "missing_second_barrier",
        "copy_without_barrier",
        "missing_barrier_far_ahead",
    }
    tested |= {"unwritten_shared", "partly_unwritten", "short_copy_wait"}
    assert tested == set(parameters(BROKEN))


def test_a_block_larger_than_the_kernels_bound_is_refused() -> None:
    with pytest.raises(TypeError, match="store_value is built for blocks of 32 threads, not 64"):
        run("store_value", [1], block=64)
