"""Tensors by name: shapes and types are checked, vectors are plain float32."""

from pathlib import Path

import numpy as np
import pytest

from ds4.errors import ModelFileError
from ds4.ggml_types import GgmlType
from ds4.model_file import ModelFile
from tests.support.tiny_model import write_tiny_model
from workers.model.weights import Weights


def open_weights(path: Path) -> Weights:
    half = np.arange(8, dtype=np.float16)
    extra = {"half": half, "whole": np.zeros(4, np.int32)}
    return Weights(ModelFile.open(write_tiny_model(path, extra_tensors=extra)))  # type: ignore[arg-type]


def test_a_vector_of_another_type_is_widened(tmp_path: Path) -> None:
    tensor = open_weights(tmp_path / "tiny.gguf").take_vector("half", 8)
    assert tensor.ggml_type == GgmlType.F32
    np.testing.assert_array_equal(tensor.data.view(np.float32), np.arange(8))


def test_a_type_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="'whole' has the type I32"):
        open_weights(tmp_path / "tiny.gguf").take("whole", (4,))


def test_an_optional_tensor_may_be_missing_but_not_misshapen(tmp_path: Path) -> None:
    weights = open_weights(tmp_path / "tiny.gguf")
    assert weights.optional_vector("blk.0.attn_q.bias", 64) is None
    with pytest.raises(ModelFileError, match="has the shape"):
        weights.optional_vector("half", 9)


def test_a_file_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    model = ModelFile.open(path)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(ModelFileError, match="became shorter"):
        Weights(model).take("output.weight", model.tensors["output.weight"].shape)


def test_tensors_that_nobody_took_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"does not know: .* and .* more"):
        open_weights(tmp_path / "tiny.gguf").finish()
