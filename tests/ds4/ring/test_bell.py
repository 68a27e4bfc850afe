"""The doorbell: rings are remembered, never block, and survive either side."""

import os
from pathlib import Path

import pytest

from ds4.errors import RingError
from ds4.ring.bell import Bell


def test_a_ring_before_the_wait_ends_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bell"
    mine = Bell(path, create=True)
    theirs = Bell(path, create=False)
    theirs.ring()
    assert mine.wait(3600.0)
    mine.drain()
    assert not mine.wait(0.0)
    mine.close()
    theirs.close()


def test_a_full_fifo_does_not_block_the_ringer(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "bell", create=True)
    for _ in range(70_000):  # more than any pipe holds
        bell.ring()
    bell.drain()
    assert not bell.wait(0.0)
    bell.close()


def test_it_outlives_its_maker_and_an_absent_listener(tmp_path: Path) -> None:
    path = tmp_path / "bell"
    Bell(path, create=True).close()
    ringer = Bell(path, create=False)
    ringer.ring()  # nobody listens: no error
    again = Bell(path, create=True)
    assert again.wait(0.0)
    again.close()
    ringer.close()
    ringer.close()


def test_something_else_in_its_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bell"
    path.write_bytes(b"")
    with pytest.raises(RingError, match="not a FIFO"):
        Bell(path, create=True)
    link = tmp_path / "link"
    os.mkfifo(tmp_path / "real")
    link.symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic"):
        Bell(link, create=False)


def test_descriptors_beyond_the_reach_of_select_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4.ring.bell._SELECT_LIMIT", 0)
    bell = Bell(tmp_path / "bell", create=True)
    assert not bell.wait(0.001)
    bell.ring()
    assert bell.wait(3600.0)
    bell.close()
