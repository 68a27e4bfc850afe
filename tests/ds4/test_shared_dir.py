"""The shared directory: its default place, who holds it, what is swept, what is left alone."""

import os
from pathlib import Path

import pytest

from ds4 import shared_dir
from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.ring.liveness import WORKER_BYTE, Leases
from ds4.shared_dir import (
    SUPERVISOR_BYTE,
    Tenancy,
    prepare_shared_directory,
    shared_directory,
    sweep_orphans,
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for /dev/shm."""
    monkeypatch.setattr(shared_dir, "_MEMORY", tmp_path)
    return tmp_path


def _leave_behind(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    for name in ("ring", ".ring.123", "worker.bell", "front-0.bell", "metrics", "lease"):
        (path / name).touch()
    (path / "prompts").mkdir()
    (path / "prompts" / "0-1").touch()


def test_the_default_is_one_directory_for_each_user_and_port(base: Path) -> None:
    assert shared_directory(Settings(port=8081)) == base / f"ds4-server-{os.geteuid()}-8081"
    assert shared_directory(Settings(port=8082)) != shared_directory(Settings(port=8081))


def test_without_a_writable_memory_file_system_it_is_in_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_dir, "_MEMORY", tmp_path / "absent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert shared_directory(Settings()).parent == tmp_path


def test_it_is_made_private(base: Path) -> None:
    assert prepare_shared_directory(Settings()).stat().st_mode & 0o777 == 0o700


def test_the_end_removes_what_is_ours_and_the_default_directory(base: Path) -> None:
    tenancy = Tenancy(Settings())
    _leave_behind(tenancy.path)
    tenancy.end()
    assert list(base.iterdir()) == []


def test_stored_responses_outlive_their_server_where_the_next_one_finds_them(base: Path) -> None:
    for is_found_again in (True, False):
        tenancy = Tenancy(Settings(), is_found_again=is_found_again)
        _leave_behind(tenancy.path)
        (tenancy.path / "responses.sqlite").write_text("kept")
        (tenancy.path / "responses.sqlite-journal").touch()
        tenancy.end()
        left = sorted(entry.name for entry in tenancy.path.iterdir()) if tenancy.path.exists() else None
        assert left == (["responses.sqlite", "responses.sqlite-journal"] if is_found_again else None)


def test_the_sweep_leaves_a_directory_that_a_server_has_just_made(base: Path) -> None:
    path = prepare_shared_directory(Settings())
    sweep_orphans()
    assert list(path.iterdir()) == []


def test_the_sweep_spares_stored_responses(base: Path) -> None:
    dead = base / f"ds4-server-{os.geteuid()}-1"
    _leave_behind(dead)
    (dead / "responses.sqlite").touch()
    sweep_orphans()
    assert [entry.name for entry in dead.iterdir()] == ["responses.sqlite"]


def test_a_server_finds_nothing_of_one_that_was_killed_but_stored_responses(base: Path) -> None:
    _leave_behind(base)
    (base / "responses.sqlite").touch()
    (base / "notes.txt").touch()
    tenancy = Tenancy(Settings(shared_dir=str(base)))
    assert {entry.name for entry in base.iterdir()} == {"lease", "notes.txt", "responses.sqlite"}
    roles = Leases(base)
    assert roles.take(WORKER_BYTE)
    assert roles.take(1)
    assert not roles.take(SUPERVISOR_BYTE)
    roles.abandon()
    tenancy.end()


def test_a_server_leaves_a_role_that_lives_what_it_has(base: Path) -> None:
    front = Leases(base)
    assert front.take(1)
    _leave_behind(base)
    tenancy = Tenancy(Settings(shared_dir=str(base)))
    assert (base / "front-0.bell").exists()
    tenancy.end()
    front.abandon()


def test_the_end_deletes_nothing_foreign(base: Path) -> None:
    tenancy = Tenancy(Settings(shared_dir=str(base)))
    _leave_behind(base)
    (base / "notes.txt").touch()
    tenancy.end()
    assert [entry.name for entry in base.iterdir()] == ["notes.txt"]


def test_two_servers_cannot_hold_one_directory(base: Path) -> None:
    first = Tenancy(Settings())
    with pytest.raises(ConfigError, match=r"another server uses .*choose another --shared-dir"):
        Tenancy(Settings())
    first.end()
    Tenancy(Settings()).end()


def test_a_directory_with_a_worker_started_alone_is_refused_and_left_alone(base: Path) -> None:
    settings = Settings(shared_dir=str(base))
    worker = Leases(base)
    assert worker.take(WORKER_BYTE)
    (base / "ring").touch()
    with pytest.raises(ConfigError, match="another server uses"):
        Tenancy(settings)
    assert (base / "ring").exists()
    worker.abandon()


def test_a_role_that_still_lives_keeps_its_files_at_the_end(base: Path) -> None:
    tenancy = Tenancy(Settings())
    front = Leases(tenancy.path)
    assert front.take(1)
    (tenancy.path / "front-0.bell").touch()
    tenancy.end()
    assert (tenancy.path / "front-0.bell").exists()
    front.abandon()


def test_the_sweep_removes_the_dead_and_spares_the_living_and_the_foreign(base: Path) -> None:
    dead, alive = (base / f"ds4-server-{os.geteuid()}-{port}" for port in (1, 2))
    foreign = base / "ds4-server-987654-1"
    for path in (dead, alive, foreign):
        _leave_behind(path)
    holder = Leases(alive)
    assert holder.take(WORKER_BYTE)
    sweep_orphans()
    assert not dead.exists()
    assert (alive / "ring").exists()
    assert (foreign / "ring").exists()
    holder.abandon()
