"""The GPU in the emulator's place, for every test of this folder; a skip that says why where there is none.

With DS4_TEST_GPU set a GPU is promised: then one that is missing ends the run with an error. DS4_TEST_GPU=stand-in
rehearses without one: the emulator plays it, as kind as a GPU is. That shows which of these tests a GPU could pass
at all, since they were written on an emulator that is stricter.
"""

import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

import pytest
from numpy.typing import DTypeLike

from tests.workers.kernels import rig
from workers.devices.cuda.backend import Backend
from workers.devices.cuda.driver import probe
from workers.devices.cuda.opening import open_gpu
from workers.devices.emulator.backend import EmulatorBackend
from workers.devices.emulator.compiler import compiler
from workers.devices.emulator.memory import EmulatorArray

_HERE: Final = Path(__file__).parent
_PROMISE: Final = os.environ.get("DS4_TEST_GPU", "")  # noqa: TID251 - a promise to the tests, no setting
_IS_REHEARSAL: Final = _PROMISE == "stand-in"


class StandIn(EmulatorBackend):
    """Memory that nobody wrote holds numbers, not NaN, and all tests share it, closed and used again."""

    def __init__(self) -> None:
        super().__init__(memory_bytes=1 << 50)  # it never counts what was freed

    def allocate(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> EmulatorArray:
        array = super().allocate(shape, dtype)
        array.bytes.fill(0x5A)
        return array


def problem() -> str:
    """Why these tests cannot run here; empty where they can."""
    if _IS_REHEARSAL:
        return "" if compiler() else "the emulator needs g++"
    found = probe().problem
    return found or ("" if find_spec("cupy") else "CuPy is not installed: pip install 'ds4-server[cuda12]'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder where there is no GPU. Raises UsageError where one was promised."""
    ours = [item for item in items if item.path.is_relative_to(_HERE)]
    if not ours or not (reason := problem()):
        return
    if _PROMISE:
        raise pytest.UsageError(f"DS4_TEST_GPU promises a GPU, but there is none: {reason}")
    for item in ours:
        item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


@cache
def _gpu() -> Backend:
    return StandIn() if _IS_REHEARSAL else open_gpu()


def _refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("this would run on the emulator and prove nothing about the GPU: leave the test out")


@pytest.fixture(autouse=True, scope="module")
def on_the_gpu() -> Iterator[None]:
    """The one context of this process serves all tests: a fault in one would fail those after it."""
    gpu = _gpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig, "make_backend", lambda thread_order: gpu)
        patch.setattr(EmulatorBackend, "__init__", _refuse)
        yield
