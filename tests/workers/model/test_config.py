"""Hyper-parameters out of hostile metadata."""

import struct
from pathlib import Path

import pytest

from ds4.errors import ModelFileError
from ds4.model_file import ModelFile
from tests.support.tiny_model import write_tiny_model
from workers.model.config import read_config


def changed(path: Path, key: str, value: int) -> ModelFile:
    """The tiny model with one uint32 key replaced."""
    write_tiny_model(path)
    content = bytearray(path.read_bytes())
    position = content.index(key.encode() + b"\x04\x00\x00\x00") + len(key) + 4
    content[position : position + 4] = struct.pack("<I", value)
    path.write_bytes(content)
    return ModelFile.open(path)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("llama.block_count", 0, "must be between 1"),
        ("llama.block_count", 1 << 20, "must be between 1"),
        ("llama.embedding_length", 0, "must be between 1"),
        ("llama.attention.head_count", 0, "must be between 1"),
        ("llama.attention.head_count_kv", 0, "must be between 1"),
        ("llama.attention.head_count_kv", 8, "do not divide"),
        ("llama.attention.value_length", 32, "different sizes"),
        ("llama.rope.dimension_count", 15, "do not fit"),
        ("llama.rope.dimension_count", 32, "do not fit"),
        ("llama.context_length", 0, "must be between 1"),
    ],
)
def test_an_impossible_size_is_refused_by_name(tmp_path: Path, key: str, value: int, reason: str) -> None:
    model = changed(tmp_path / "tiny.gguf", key, value)
    with pytest.raises(ModelFileError, match=reason):
        read_config(model)


def test_the_rotary_size_may_be_smaller_than_the_head(tmp_path: Path) -> None:
    config = read_config(changed(tmp_path / "tiny.gguf", "llama.rope.dimension_count", 8))
    assert config.inverse_frequencies.shape == (4,)
    assert config.dimensions.head_size == 16
    assert config.attention_scale == 0.25


@pytest.mark.parametrize(
    ("key", "value"), [("llama.rope.scaling.attn_factor", 3e38), ("llama.rope.scaling.factor", 1e-30)]
)
def test_rope_parameters_out_of_all_reason_are_refused(tmp_path: Path, key: str, value: float) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", extra_float32={key: value})
    with pytest.raises(ModelFileError, match="RoPE parameters are out of range"):
        read_config(ModelFile.open(path))
