"""Requests survive the way through a slot or a file, at every size; nothing half-checked comes out."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import RequestError, RingFullError, RingUnavailableError
from ds4.ring import layout
from ds4.ring.descriptor import DescriptorError, read_descriptor, write_descriptor
from ds4.ring.fence import process_fence
from ds4.ring.layout import RingShape
from ds4.ring.segment import Segment, create_segment

SHAPE = RingShape(num_front_ends=1, slots_per_front_end=2, descriptor_bytes=512)
ROOM = SHAPE.descriptor_bytes - layout.DESCRIPTOR_HEAD_BYTES


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ring")
    (directory / "prompts").mkdir()
    return directory


@pytest.fixture(scope="module")
def segment(place: Path) -> Segment:
    return create_segment(place, SHAPE, b"", process_fence())


def files(place: Path) -> list[str]:
    return os.listdir(place / "prompts")


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=700), st.integers(0, 200), st.integers(1, (1 << 64) - 1))
def test_a_request_comes_back_as_it_was(
    place: Path, segment: Segment, params: bytes, num_tokens: int, request_id: int
) -> None:
    prompt = np.arange(num_tokens, dtype=np.uint32) * np.uint32(0x01010101)
    write_descriptor(place, segment, 0, 1, request_id, params, prompt)
    padded = -(-len(params) // 4) * 4
    assert bool(files(place)) == (padded + 4 * num_tokens > ROOM)
    got_params, got_prompt = read_descriptor(place, segment, 0, 1, request_id)
    assert got_params == params
    assert got_prompt.dtype == np.uint32
    assert np.array_equal(got_prompt, prompt)
    assert files(place) == []


def test_the_last_size_that_fits_needs_no_file(place: Path, segment: Segment) -> None:
    for num_tokens, needs_file in ((ROOM // 4, False), (ROOM // 4 + 1, True)):
        write_descriptor(place, segment, 0, 0, 5, b"", np.zeros(num_tokens, np.uint32))
        assert bool(files(place)) == needs_file
        assert len(read_descriptor(place, segment, 0, 0, 5)[1]) == num_tokens


def test_what_was_read_is_a_copy(place: Path, segment: Segment) -> None:
    write_descriptor(place, segment, 0, 0, 5, b"abc", np.arange(3, dtype=np.uint32))
    params, prompt = read_descriptor(place, segment, 0, 0, 5)
    write_descriptor(place, segment, 0, 0, 6, b"xyz", np.arange(7, 10, dtype=np.uint32))
    assert params == b"abc"
    assert prompt.tolist() == [0, 1, 2]


def test_a_slot_that_holds_another_request_is_refused(place: Path, segment: Segment) -> None:
    write_descriptor(place, segment, 0, 0, 5, b"", np.zeros(1, np.uint32))
    with pytest.raises(DescriptorError, match="not this request"):
        read_descriptor(place, segment, 0, 0, 6)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (layout.DESCRIPTOR_PARAMS_BYTES, ROOM + 1),
        (layout.DESCRIPTOR_PARAMS_BYTES, layout.MAX_PARAMS_BYTES + 1),
        (layout.DESCRIPTOR_PARAMS_BYTES, 1 << 63),
        (layout.DESCRIPTOR_PROMPT_TOKENS, 2),
        (layout.DESCRIPTOR_PROMPT_TOKENS, ROOM),
        (layout.DESCRIPTOR_PROMPT_TOKENS, layout.MAX_PROMPT_TOKENS + 1),
        (layout.DESCRIPTOR_PROMPT_TOKENS, 1 << 62),
        (layout.DESCRIPTOR_KIND, layout.KIND_FILE),
        (layout.DESCRIPTOR_CHECKSUM, 0),
    ],
)
def test_a_word_that_lies_is_refused(place: Path, segment: Segment, word: int, value: int) -> None:
    write_descriptor(place, segment, 0, 0, 5, b"par", np.ones(3, np.uint32))
    segment.words[segment.offsets.descriptors // 8 + word] = value
    with pytest.raises(DescriptorError):
        read_descriptor(place, segment, 0, 0, 5)


@pytest.mark.parametrize("change", ["shorter", "longer", "other bytes", "link", "fifo"])
def test_a_prompt_file_that_is_not_the_one_written_is_refused(
    place: Path, segment: Segment, change: str
) -> None:
    write_descriptor(place, segment, 0, 0, 5, b"", np.ones(5000, np.uint32))
    [path] = (place / "prompts").iterdir()
    if change == "shorter":
        path.write_bytes(b"x")
    elif change == "longer":
        path.write_bytes(bytes(20_004))
    elif change == "other bytes":
        path.write_bytes(bytes(20_000))
    else:
        path.unlink()
        if change == "link":
            path.symlink_to("/etc/hostname")
        else:
            os.mkfifo(path)
    with pytest.raises(DescriptorError):
        read_descriptor(place, segment, 0, 0, 5)
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("call", ["open", "posix_fallocate"])
def test_a_full_directory_means_try_later_and_leaves_no_file(
    place: Path, segment: Segment, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(RingFullError, match="no room"):
        write_descriptor(place, segment, 0, 0, 5, b"", np.ones(5000, np.uint32))
    assert files(place) == []


def test_a_missing_prompt_folder_means_that_the_worker_left(tmp_path: Path, segment: Segment) -> None:
    with pytest.raises(RingUnavailableError):
        write_descriptor(tmp_path, segment, 0, 0, 5, b"", np.ones(5000, np.uint32))


def test_requests_beyond_the_limits_are_the_clients_fault(place: Path, segment: Segment) -> None:
    with pytest.raises(RequestError, match="parameters"):
        write_descriptor(place, segment, 0, 0, 5, bytes(layout.MAX_PARAMS_BYTES + 1), np.ones(1, np.uint32))
    too_long = np.broadcast_to(np.uint32(1), layout.MAX_PROMPT_TOKENS + 1)
    with pytest.raises(RequestError, match="tokens"):
        write_descriptor(place, segment, 0, 0, 5, b"", too_long)
    assert files(place) == []
