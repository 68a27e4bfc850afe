"""What the driver's answer means, with a library that answers as told."""

import ctypes
from typing import Any

import pytest

from workers.devices.cuda.driver import probe


class Library:
    """Stands in for libcuda: `status` of cuInit, then the number of devices."""

    def __init__(self, *, status: int = 0, devices: int = 1, version: int = 13020) -> None:
        self._status, self._devices, self._version = status, devices, version

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's name
        return self._status

    def cuDriverGetVersion(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self._version
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self._devices
        return 0


def test_a_machine_with_a_gpu_says_how_many_and_which_version() -> None:
    driver = probe(lambda name: Library(devices=2, version=12080))
    assert (driver.num_devices, driver.cuda, driver.problem) == (2, "12.8", "")


@pytest.mark.parametrize(
    ("library", "problem"),
    [
        (Library(devices=0), "sees no GPU"),
        (Library(status=100), "sees no GPU"),
        (Library(status=999), "does not start (CUDA error 999)"),
    ],
)
def test_a_driver_without_a_usable_gpu_says_why(library: Library, problem: str) -> None:
    driver = probe(lambda name: library)
    assert driver.num_devices == 0
    assert problem in driver.problem


def test_a_machine_without_a_driver_says_so() -> None:
    def missing(name: str) -> ctypes.CDLL:
        assert name == "libcuda.so.1"
        raise OSError("cannot open shared object file")

    assert "no NVIDIA driver" in probe(missing).problem
