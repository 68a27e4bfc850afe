"""A successor is sized as the first worker was, or has at least its context, or does not start."""

import os
from pathlib import Path

import pytest

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from ds4.ring.directory import leave
from ds4.ring.liveness import Leases
from tests.support.fake_device import FakeDevice
from tests.support.tiny_model import TinyShape, write_tiny_model
from workers.devices.interface import Device, Limits
from workers.devices.kept_limits import keep_limits, open_with_kept_limits
from workers.devices.limits import Need, compute_limits
from workers.model.registry import load_program

SETTINGS = Settings(batched_sessions=2)
NEED = Need(weight_bytes=0, kv_value_bytes=2, kv_share=0.5)
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 2  # 16 tokens, keys and values, layers, heads, head size, bytes a value
MODEL_CONTEXT = 1024


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    path = write_tiny_model(tmp_path / "tiny.gguf", shape=TinyShape(max_context_tokens=MODEL_CONTEXT))
    return ModelFile.open(path)


class Machine:
    """Opens devices in so many pages of free memory."""

    def __init__(self, directory: Path, model: ModelFile) -> None:
        self.directory = directory
        self.model = model
        self.free_pages = 0

    def open(self, free_pages: int, settings: Settings = SETTINGS) -> Limits:
        self.free_pages = free_pages
        _, limits = open_with_kept_limits(self._open, settings, self.model, self.directory)
        keep_limits(settings, self.model, self.directory, limits)
        return limits

    def _open(self, settings: Settings, model: ModelFile) -> tuple[Device, Limits]:
        sizes = load_program(model).dimensions
        limits = compute_limits(settings, sizes, NEED, self.free_pages * PAGE_BYTES)
        return FakeDevice(limits, vocab_size=model.vocab_size), limits


@pytest.fixture
def machine(tmp_path: Path, model: ModelFile) -> Machine:
    directory = tmp_path / "shared"
    directory.mkdir(mode=0o700)
    return Machine(directory, model)


def test_a_successor_with_less_free_memory_gets_the_same_limits(machine: Machine) -> None:
    first = machine.open(100)
    assert (first.num_pages, first.max_context_tokens) == (50, 800)
    assert machine.open(64) == first
    assert machine.open(4000) == first


def test_a_successor_without_room_for_the_pages_keeps_the_context(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine.open(1000)
    assert (first.num_pages, first.max_context_tokens) == (128, 1024)
    second = machine.open(127)
    assert second.max_context_tokens == 1024
    assert (second.num_pages, "less memory" in caplog.text) == (64, True)
    assert machine.open(1000) == first, "one short of memory does not decide for those after it"


def test_a_successor_without_room_for_the_context_does_not_start(machine: Machine) -> None:
    first = machine.open(100)
    with pytest.raises(
        ConfigError, match=r"KV cache of 800 tokens needs .* the context of 800 tokens that the worker before"
    ):
        machine.open(49)
    assert machine.open(100) == first


def test_other_settings_or_another_model_are_sized_anew(machine: Machine, tmp_path: Path) -> None:
    machine.open(100)
    assert machine.open(100, Settings(batched_sessions=2, ctx=512)).max_context_tokens == 512
    assert machine.open(200, Settings(batched_sessions=2)).max_context_tokens == 1024
    assert machine.open(100).max_context_tokens == 1024  # those of the latest count
    machine.model = ModelFile.open(write_tiny_model(tmp_path / "other.gguf"))
    assert machine.open(2000).max_context_tokens == 512


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"{}", b'{"key":"","max_context_tokens":0,"num_pages":-1}']
)
def test_a_damaged_file_is_ignored(machine: Machine, content: bytes) -> None:
    (machine.directory / "limits").write_bytes(content)
    assert machine.open(100).max_context_tokens == 800
    assert machine.open(64).max_context_tokens == 800


def test_a_pipe_or_a_link_in_its_place_is_not_read(machine: Machine, tmp_path: Path) -> None:
    machine.open(100)
    (machine.directory / "limits").rename(tmp_path / "elsewhere")
    os.mkfifo(machine.directory / "limits")
    assert machine.open(120).num_pages == 60
    (machine.directory / "limits").unlink()
    (machine.directory / "limits").symlink_to(tmp_path / "elsewhere")
    assert machine.open(130).num_pages == 65


def test_a_mistake_that_is_not_about_memory_is_told_as_it_is(machine: Machine) -> None:
    machine.open(100)

    def broken(settings: Settings, model: ModelFile) -> tuple[Device, Limits]:
        raise ConfigError("no usable GPU", setting="device")

    with pytest.raises(ConfigError, match=r"^no usable GPU$"):
        open_with_kept_limits(broken, SETTINGS, machine.model, machine.directory)


def test_a_directory_that_cannot_be_written_stops_nobody(machine: Machine) -> None:
    machine.directory.rmdir()
    assert machine.open(100).num_pages == 50


def test_the_last_one_to_leave_takes_the_limits_along(machine: Machine) -> None:
    staying, leaving = Leases(machine.directory), Leases(machine.directory)
    assert staying.take(1)
    assert leaving.take(0)
    machine.open(100)
    leave(machine.directory, leaving)
    assert (machine.directory / "limits").exists(), "its streams go on with the next worker"
    leave(machine.directory, staying)
    assert os.listdir(machine.directory) == []
