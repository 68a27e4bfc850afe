"""Architectures by name."""

from pathlib import Path

import pytest

from ds4.errors import ModelFileError
from ds4.model_file import ModelFile
from tests.support.tiny_model import write_tiny_model
from workers.model.registry import load_program


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    model = ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf", architecture="mamba"))
    with pytest.raises(ModelFileError, match=r"'mamba' is not supported; known: .*llama") as caught:
        load_program(model)
    assert caught.value.path == str(model.path)
