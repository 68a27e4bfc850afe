"""ds4/ring/control.py: changes reach every process, and only those that were made."""

from pathlib import Path

import pytest

from ds4.config import TABLE
from ds4.errors import ConfigError
from ds4.ring.control import NAMES, ControlPage


def test_a_change_is_seen_through_another_mapping_and_can_be_taken_back(tmp_path: Path) -> None:
    writer, reader = ControlPage(tmp_path), ControlPage(tmp_path)
    before = reader.snapshot()
    assert reader.get("decode_coalesce_us", 2000) == 2000
    writer.set("decode_coalesce_us", 0)
    assert reader.get("decode_coalesce_us", 2000) == 0
    assert reader.is_set("decode_coalesce_us")
    assert not reader.is_set("batch_log")
    assert reader.snapshot() != before
    writer.set("decode_coalesce_us", None)
    assert reader.snapshot() == before
    for page in (writer, reader):
        page.close()


def test_the_supervisors_word_is_no_control(tmp_path: Path) -> None:
    supervisor, reader = ControlPage(tmp_path), ControlPage(tmp_path)
    before = reader.snapshot()
    assert reader.killed_worker == 0
    supervisor.note_killed(4711)
    assert reader.killed_worker == 4711
    assert reader.snapshot() == before
    for page in (supervisor, reader):
        page.close()


def test_the_page_is_private_and_every_control_is_a_setting(tmp_path: Path) -> None:
    ControlPage(tmp_path).close()
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o600
    assert set(NAMES) <= {setting.name for setting in TABLE}


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent cannot be used"):
        ControlPage(tmp_path / "absent")
