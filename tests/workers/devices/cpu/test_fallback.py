"""A Numba that is installed but does not work."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("llvmlite", reason="the CPU engine needs llvmlite")
pytest.importorskip("numba", reason="the CPU engine needs numba")

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from tests.support.tiny_model import write_tiny_model
from workers.devices.registry import open_device


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFile:
    """A model to open where no compiled code is cached and importing Numba fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    (tmp_path / "numba.py").write_text("raise ImportError('no LLVM here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the process that compiles
    return ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf"))


def test_a_broken_numba_falls_back_to_the_reference_with_one_warning(
    model: ModelFile, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        device, _ = open_device(Settings(batched_sessions=2), model)
    assert device.name == "reference"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    device.close()


def test_a_broken_numba_is_an_error_where_the_cpu_device_was_asked_for(model: ModelFile) -> None:
    with pytest.raises(ConfigError, match=r"needs Numba.*no LLVM here"):
        open_device(Settings(device="cpu", batched_sessions=2), model)
