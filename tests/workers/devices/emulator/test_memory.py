"""Device memory of the emulator."""

import mmap

import numpy as np
import pytest

from workers.devices.emulator.memory import ALIGNMENT, EmulatorArray


def test_fresh_memory_is_nan() -> None:
    array = EmulatorArray.allocate((3, 5), np.float32)
    assert array.shape == (3, 5)
    assert array.nbytes == 60
    assert np.isnan(array.data).all()


@pytest.mark.parametrize("num_bytes", [1, 16, 100, mmap.PAGESIZE, mmap.PAGESIZE + 16])
def test_an_array_ends_just_before_its_fence(num_bytes: int) -> None:
    array = EmulatorArray.allocate(num_bytes, np.uint8)
    assert array.address % ALIGNMENT == 0
    assert -(array.address + num_bytes) % mmap.PAGESIZE < ALIGNMENT
    array.data[:] = 7  # all of it can be written
    assert array.bytes.tolist() == [7] * num_bytes


def test_a_part_shares_the_memory_and_keeps_it_alive() -> None:
    array = EmulatorArray.allocate(64, np.uint8)
    part = array.part(16, (2, 4), np.float32)
    part.data[:] = 1
    assert array.address + 16 == part.address
    assert (array.data[16:48].view(np.float32) == 1).all()
    lives = array.lives()
    del array
    assert lives()
    assert (part.data == 1).all()
    del part
    assert not lives()


@pytest.mark.parametrize(("start", "length"), [(8, 4), (48, 20), (-16, 4)])
def test_a_part_lies_within_its_array_at_an_aligned_place(start: int, length: int) -> None:
    with pytest.raises(ValueError):
        EmulatorArray.allocate(64, np.uint8).part(start, length, np.uint8)


def test_host_code_cannot_read_it() -> None:
    with pytest.raises(TypeError, match="download"):
        np.asarray(EmulatorArray.allocate(4, np.float32))


def test_an_empty_array_is_an_array() -> None:
    array = EmulatorArray.allocate(0, np.int32)
    assert (array.nbytes, array.shape) == (0, (0,))


def test_arrays_that_come_and_go_leave_no_holes_among_other_mappings() -> None:
    addresses = [EmulatorArray.allocate(1 << 20, np.uint8).address for _ in range(50)]
    assert addresses == sorted(addresses)
    assert addresses[-1] - addresses[0] < 60 << 20  # one after the other
    place = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8).ctypes.data
    assert abs(place - addresses[-1]) > 1 << 32
