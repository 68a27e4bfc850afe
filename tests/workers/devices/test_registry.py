"""Which device is chosen."""

import logging
import sys
from pathlib import Path

import pytest

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from tests.support.tiny_model import write_tiny_model
from workers.devices.registry import open_device


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    return ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf"))


def test_the_reference_is_opened_by_name(model: ModelFile) -> None:
    device, limits = open_device(Settings(device="reference", batched_sessions=3), model)
    assert device.name == "reference"
    assert limits.max_seats == 3
    device.close()


def test_cuda_is_refused_until_it_exists(model: ModelFile) -> None:
    with pytest.raises(ConfigError, match="--device cpu") as caught:
        open_device(Settings(device="cuda"), model)
    assert caught.value.setting == "device"


def test_without_the_cpu_device_auto_falls_back_with_one_warning(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "workers.devices.cpu.device", None)  # importing it now fails
    with caplog.at_level(logging.WARNING):
        device, _ = open_device(Settings(batched_sessions=2), model)
    assert device.name == "reference"
    (record,) = caplog.records
    assert "slower" in record.getMessage()
    with pytest.raises(ConfigError, match="needs Numba"):
        open_device(Settings(device="cpu"), model)
