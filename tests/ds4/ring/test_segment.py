"""A segment is published whole or not at all, and only a whole one of ours is attached."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from ds4.errors import ConfigError, RingError, RingVersionError
from ds4.ring import layout
from ds4.ring.directory import SEGMENT_NAME
from ds4.ring.fence import process_fence
from ds4.ring.layout import RingShape
from ds4.ring.segment import Segment, attach_segment, create_segment
from ds4.ring.states import SlotState, WorkerState

SHAPE = RingShape(num_front_ends=2, slots_per_front_end=3)


def create(directory: Path, info: bytes = b"info") -> Segment:
    return create_segment(directory, SHAPE, info, process_fence())


def test_what_the_worker_writes_the_front_end_reads(tmp_path: Path) -> None:
    made = create(tmp_path)
    seen = attach_segment(tmp_path)
    assert seen.shape == SHAPE
    assert seen.epoch == made.epoch
    assert seen.model_info == b"info"
    assert seen.inode == made.inode
    made.words[layout.LIVE_STATE] = WorkerState.DRAINING
    assert seen.state == WorkerState.DRAINING
    made.events[5] = (1, 2, 3, 1 << 63)
    assert seen.events[5].tolist() == [1, 2, 3, 1 << 63]
    seen.front_end_words(1)[layout.FRONT_NONCE] = 77
    assert made.front_ends[1, layout.FRONT_NONCE] == 77
    made.worker_words(1)[layout.WORKER_ECHO] = 77
    assert seen.worker_blocks[1, layout.WORKER_ECHO] == 77
    assert (tmp_path / SEGMENT_NAME).stat().st_mode & 0o777 == 0o600


def test_the_parts_do_not_share_memory(tmp_path: Path) -> None:
    segment = create(tmp_path)
    parts = [
        segment.front_ends,
        segment.worker_blocks,
        segment.commands,
        segment.credits,
        segment.status,
        segment.events,
    ]
    for number, part in enumerate(parts):
        part[...] = number + 1
    segment.write_text(SHAPE.num_slots - 1, "x" * layout.TEXT_BYTES)
    assert all((part == number + 1).all() for number, part in enumerate(parts))
    assert segment.model_info == b"info"


def test_a_new_segment_replaces_the_old_one_and_leaves_its_mappings_alone(tmp_path: Path) -> None:
    create(tmp_path)
    old = attach_segment(tmp_path)
    new = create(tmp_path, b"newer")
    old.credits[:] = 5  # a straggler
    assert not new.credits.any()
    assert attach_segment(tmp_path).epoch == new.epoch != old.epoch
    assert os.listdir(tmp_path) == [SEGMENT_NAME]


@pytest.mark.parametrize(
    ("word", "value", "error"),
    [
        (layout.HEADER_MAGIC, 1, RingError),
        (layout.HEADER_VERSION, layout.VERSION + 1, RingVersionError),
        (layout.HEADER_SIZE, 4096, RingError),
        (layout.HEADER_FRONT_ENDS, 1 << 40, RingError),
        (layout.HEADER_SLOTS, 4, RingError),
        (layout.HEADER_CHECKSUM, 5, RingError),
        (layout.HEADER_EVENTS_PER_SLOT, 0, RingError),
    ],
)
def test_a_damaged_or_foreign_header_is_refused(
    tmp_path: Path, word: int, value: int, error: type[RingError]
) -> None:
    create(tmp_path).words[word] = value
    with pytest.raises(error) as caught:
        attach_segment(tmp_path)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_a_file_of_another_length_is_refused(tmp_path: Path) -> None:
    create(tmp_path)
    path = tmp_path / SEGMENT_NAME
    with path.open("r+b") as file:
        file.truncate(SHAPE.offsets().end + 4096)
    with pytest.raises(RingError, match="size"):
        attach_segment(tmp_path)
    path.write_bytes(b"short")
    with pytest.raises(RingError, match="short"):
        attach_segment(tmp_path)


def test_links_directories_and_others_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path)
    path = tmp_path / SEGMENT_NAME
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", lambda fd: os.stat_result((*os.stat(fd)[:4], 4242, *os.stat(fd)[5:10])))
        with pytest.raises(RingError, match="user 4242"):
            attach_segment(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RingError, match="symbolic link"):
        attach_segment(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RingError, match="not a file"):
        attach_segment(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        attach_segment(tmp_path)


def test_a_full_directory_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"no room .* MiB.*--slots-per-front-end"):
        create(tmp_path)
    assert os.listdir(tmp_path) == []


def test_all_memory_is_reserved_at_once(tmp_path: Path) -> None:
    create(tmp_path)
    found = (tmp_path / SEGMENT_NAME).stat()
    assert found.st_blocks * 512 >= found.st_size  # no hole that could turn into SIGBUS


def test_too_long_model_info_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="model info"):
        create(tmp_path, bytes(layout.MAX_INFO_BYTES + 1))
    assert create(tmp_path, bytes(layout.MAX_INFO_BYTES)).model_info == bytes(layout.MAX_INFO_BYTES)


@pytest.mark.parametrize("text", ["", "plain", "é€😀", "x" * layout.TEXT_BYTES])
def test_error_text_comes_back(tmp_path: Path, text: str) -> None:
    segment = create(tmp_path)
    for slot in (0, SHAPE.num_slots - 1):
        assert segment.read_text(slot, segment.write_text(slot, text)) == text


def test_error_text_is_cut_between_characters(tmp_path: Path) -> None:
    segment = create(tmp_path)
    length = segment.write_text(0, "x" + "é" * layout.TEXT_BYTES)
    assert length == layout.TEXT_BYTES - 1
    assert segment.read_text(0, length) == "x" + "é" * 511
    assert segment.write_text(0, "\ud800 lone") > 0  # never an exception for what the worker says


def test_unknown_numbers_are_shown_as_something_harmless(tmp_path: Path) -> None:
    segment = create(tmp_path)
    segment.words[layout.LIVE_STATE] = 99
    segment.status[1, layout.STATUS_STATE] = 99
    assert segment.state == WorkerState.RETIRED
    assert segment.slot_statuses()[1].state == SlotState.FREE


def test_pending_is_never_negative_and_counts_attached_front_ends_only(tmp_path: Path) -> None:
    segment = create(tmp_path)
    segment.front_ends[:, layout.FRONT_SUBMITTED] = np.array([9, 4], np.uint64)
    segment.worker_blocks[:, layout.WORKER_ADMITTED] = np.array([7, 6], np.uint64)
    assert segment.num_pending(process_fence()) == 0
    segment.worker_blocks[:, layout.WORKER_ECHO] = 1
    assert segment.num_pending(process_fence()) == 2


def test_a_read_only_mapping_changes_nothing(tmp_path: Path) -> None:
    create(tmp_path)
    seen = attach_segment(tmp_path, writable=False)
    with pytest.raises(TypeError):
        seen.words[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        seen.credits[0] = 1
