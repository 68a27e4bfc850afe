"""The shared directory is private and ours, or the start ends with one line that names the cure."""

import os
import stat
from pathlib import Path

import pytest

from ds4.errors import ConfigError
from ds4.ring.directory import leave, open_directory, remove_orphan_bells
from ds4.ring.liveness import Leases


def message(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_directory(path)
    assert caught.value.setting == "shared_dir"
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    open_directory(path)
    open_directory(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert "not a directory" in message(path)


def test_a_symbolic_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "not a directory" in message(tmp_path / "link")


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert "--shared-dir" in message(tmp_path / "file" / "ring")


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o500, 0o600])
def test_a_directory_that_others_may_enter_or_we_cannot_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "ring"
    path.mkdir()
    path.chmod(mode)
    assert f"chmod 700 {path}" in message(path)
    path.chmod(0o700)
    open_directory(path)


def test_another_users_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ring"
    open_directory(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert "belongs to user" in message(path)


def test_only_bells_of_the_dead_are_removed(tmp_path: Path) -> None:
    living, worker = Leases(tmp_path), Leases(tmp_path)
    assert living.take(1 + 7)
    for name in ("front-7.bell", "front-8.bell", "worker.bell", "front-x.bell"):
        (tmp_path / name).write_bytes(b"")
    remove_orphan_bells(tmp_path, worker)
    assert sorted(os.listdir(tmp_path)) == ["front-7.bell", "front-x.bell", "lease", "worker.bell"]
    assert not worker.is_held_by_other(1 + 8)  # the place is free again
    living.abandon()
    worker.abandon()


def test_the_last_one_to_leave_clears_the_directory_and_only_ours(tmp_path: Path) -> None:
    first, last = Leases(tmp_path), Leases(tmp_path)
    assert first.take(1)
    assert last.take(2)
    (tmp_path / "prompts").mkdir()
    for name in ("ring", ".ring.abc", "front-3.bell", "worker.bell", "prompts/3-00ff", "somebody-elses"):
        (tmp_path / name).write_bytes(b"")
    leave(tmp_path, first)
    assert "ring" in os.listdir(tmp_path)
    leave(tmp_path, last)
    assert os.listdir(tmp_path) == ["somebody-elses"]


def test_of_two_that_leave_at_the_same_moment_one_clears_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Leases(tmp_path), Leases(tmp_path)
    assert first.take(0)
    assert second.take(1)
    (tmp_path / "ring").write_bytes(b"")
    take_all = first.take_all

    def take_all_meanwhile() -> bool:
        monkeypatch.undo()
        is_last = take_all()
        leave(tmp_path, second)  # looks while the first still has its place
        return is_last

    monkeypatch.setattr(first, "take_all", take_all_meanwhile)
    leave(tmp_path, first)
    assert os.listdir(tmp_path) == []
