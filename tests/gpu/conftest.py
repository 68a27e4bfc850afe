"""The GPU in the emulator's place, for every test of this folder; a skip that says why where there is none.

With DS4_TEST_GPU set a GPU is promised: then one that is missing ends the run with an error.
"""

import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.workers.kernels import rig
from workers.devices.cuda.backend import Backend
from workers.devices.cuda.driver import probe
from workers.devices.cuda.opening import open_gpu

_HERE: Final = Path(__file__).parent


def problem() -> str:
    """Why these tests cannot run here; empty where they can."""
    found = probe().problem
    return found or ("" if find_spec("cupy") else "CuPy is not installed: pip install 'ds4-server[cuda12]'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder where there is no GPU. Raises UsageError where one was promised."""
    ours = [item for item in items if item.path.is_relative_to(_HERE)]
    if not ours or not (reason := problem()):
        return
    if os.environ.get("DS4_TEST_GPU"):  # noqa: TID251 - a promise to the tests, no setting
        raise pytest.UsageError(f"DS4_TEST_GPU promises a GPU, but there is none: {reason}")
    for item in ours:
        item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


@cache
def _gpu() -> Backend:
    return open_gpu()


@pytest.fixture(autouse=True, scope="module")
def on_the_gpu() -> Iterator[None]:
    """The one context of this process serves all tests: a fault in one would fail those after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig, "emulator", lambda thread_order=0: _gpu())
        yield
