"""Arguments of a launch are checked and typed by what the kernel declares."""

from typing import Any

import numpy as np
import pytest

from workers.devices.cuda.arguments import convert
from workers.devices.emulator.memory import EmulatorArray
from workers.kernels.sources import Kernel

ADVANCE = Kernel(source="rope_append.cu", entry="advance")  # pointer, pointer, int
QUANTISE = Kernel(source="quantise.cu", entry="rms_norm")  # a float among pointers and ints


def test_scalars_get_the_declared_type() -> None:
    cells = convert(QUANTISE, [None, None, None, 64, 1, None, None, None, 0])
    assert [type(cell) for cell in cells[3:5]] == [np.int32, np.float32]
    assert cells[4] == 1.0
    array = EmulatorArray.allocate(4, np.int32)
    given: list[Any] = [array, None, np.int64(4)]
    assert convert(ADVANCE, given) == [array, None, 4]


@pytest.mark.parametrize("value", [2.0, True, None, 2**31, -(2**31) - 1, "4", np.float32(4)])
def test_what_is_no_whole_number_of_the_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="argument 2"):
        convert(ADVANCE, [None, None, value])


@pytest.mark.parametrize("value", [True, None, "1", 1j])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="argument 4"):
        convert(QUANTISE, [None, None, None, 64, value, None, None, None, 0])


@pytest.mark.parametrize("value", [np.zeros(4, np.int32), 7, b"1234"])
def test_host_memory_is_no_device_array(value: Any) -> None:
    with pytest.raises(TypeError, match="argument 1 must be a device array"):
        convert(ADVANCE, [None, value, 4])


def test_an_array_is_no_number() -> None:
    with pytest.raises(TypeError, match="argument 2"):
        convert(ADVANCE, [None, None, EmulatorArray.allocate(1, np.int32)])


def test_the_number_of_arguments_counts() -> None:
    with pytest.raises(TypeError, match="advance has 3 parameters, 2 were given"):
        convert(ADVANCE, [None, None])


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match=r"rope_append.cu has no kernel retreat"):
        convert(Kernel(source="rope_append.cu", entry="retreat"), [])
