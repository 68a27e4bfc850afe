"""From a llama file to a program: sizes, weights, RoPE scaling, and files we must not run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.errors import ModelFileError
from ds4.ggml_types import GgmlType
from ds4.model_file import ModelFile
from tests.support.tiny_model import TinyShape, vocabulary, write_tiny_model
from workers.model.program import (
    Attention,
    DownMatmul,
    Embed,
    GateUpMatmul,
    Logits,
    Norm,
    OutputMatmul,
    Program,
    QkvMatmul,
    RopeAppend,
)
from workers.model.registry import load_program


def load(tmp_path: Path, **options: Any) -> Program:
    return load_program(ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf", **options)))


def rope_of(program: Program) -> RopeAppend:
    return next(operation for operation in program.operations if isinstance(operation, RopeAppend))


def test_a_program_is_the_layers_between_embedding_and_logits(tmp_path: Path) -> None:
    program = load(tmp_path)
    layer = [
        Norm,
        QkvMatmul,
        RopeAppend,
        Attention,
        OutputMatmul,
        Norm,
        GateUpMatmul,
        DownMatmul,
    ]
    assert [type(operation) for operation in program.operations] == [Embed, *layer, *layer, Logits]
    sizes = program.dimensions
    assert (sizes.num_layers, sizes.hidden_size, sizes.ffn_size) == (2, 64, 128)
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_size) == (4, 2, 16)
    assert sizes.vocab_size == len(vocabulary())
    assert [op.layer for op in program.operations if isinstance(op, Attention)] == [0, 1]


def test_weights_stay_the_blocks_of_the_file(tmp_path: Path) -> None:
    program = load(tmp_path, quant="Q4_1")
    qkv = program.operations[2]
    assert isinstance(qkv, QkvMatmul)
    assert qkv.q.ggml_type == GgmlType.Q4_1
    model = ModelFile.open(tmp_path / "tiny.gguf")
    info = model.tensors["blk.0.attn_k.weight"]
    raw = (tmp_path / "tiny.gguf").read_bytes()[info.offset : info.offset + info.num_bytes]
    assert qkv.k.data.tobytes() == raw
    assert not qkv.k.data.flags.writeable
    assert qkv.q_bias is None


def test_a_file_without_an_output_tensor_uses_the_embedding_as_its_head(tmp_path: Path) -> None:
    tied = load(tmp_path, shape=TinyShape(tied_head=True))
    embed, logits = tied.operations[0], tied.operations[-1]
    assert isinstance(embed, Embed)
    assert isinstance(logits, Logits)
    assert logits.weight is embed.table
    untied = load(tmp_path).operations[-1]
    assert isinstance(untied, Logits)
    assert untied.weight.name == "output.weight"


def test_biases_are_taken_where_the_file_has_them(tmp_path: Path) -> None:
    qkv = load(tmp_path, shape=TinyShape(biases=True)).operations[2]
    assert isinstance(qkv, QkvMatmul)
    assert qkv.q_bias is not None
    assert qkv.v_bias is not None
    assert (qkv.q_bias.shape, qkv.v_bias.shape) == ((64,), (32,))


def test_plain_rope_falls_by_the_base_over_adjacent_pairs(tmp_path: Path) -> None:
    rope = rope_of(load(tmp_path))
    assert rope.interleaved
    assert rope.magnitude == 1
    np.testing.assert_allclose(rope.inverse_frequencies, 10000.0 ** (-np.arange(8) / 8), rtol=1e-6)


def test_linear_scaling_divides_every_frequency(tmp_path: Path) -> None:
    plain = rope_of(load(tmp_path)).inverse_frequencies
    for kind in ({"llama.rope.scaling.type": "linear"}, {}):  # linear is what a factor alone means
        scaled = rope_of(load(tmp_path, extra_string=kind, extra_float32={"llama.rope.scaling.factor": 4.0}))
        np.testing.assert_allclose(scaled.inverse_frequencies, plain / 4, rtol=1e-6)


def test_the_rope_freqs_tensor_divides_each_frequency_by_its_factor(tmp_path: Path) -> None:
    plain = rope_of(load(tmp_path)).inverse_frequencies
    factors = np.linspace(1, 8, 8).astype(np.float32)
    scaled = rope_of(load(tmp_path, extra_tensors={"rope_freqs.weight": factors}))
    np.testing.assert_allclose(scaled.inverse_frequencies, plain / factors, rtol=1e-6)


def test_yarn_keeps_fast_dimensions_and_interpolates_slow_ones(tmp_path: Path) -> None:
    plain = rope_of(load(tmp_path)).inverse_frequencies
    yarn = rope_of(
        load(
            tmp_path,
            extra_string={"llama.rope.scaling.type": "yarn"},
            extra_float32={"llama.rope.scaling.factor": 4.0},
            extra_uint32={"llama.rope.scaling.original_context_length": 4096},
        )
    )
    ratio = plain / yarn.inverse_frequencies
    np.testing.assert_allclose(ratio[0], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[-1], 4, rtol=1e-6)
    assert (np.diff(ratio) >= 0).all()
    assert yarn.magnitude == pytest.approx(1 + 0.1 * np.log(4))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"extra_uint32": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"extra_string": {"llama.rope.scaling.type": "longrope"}}, "'longrope' is not supported"),
        ({"extra_float32": {"llama.rope.scaling.factor": -2.0}}, "scaling factor is -2"),
        (
            {"extra_tensors": {"blk.0.attn_gate.weight": np.ones((4, 4), np.float32)}},
            "blk.0.attn_gate.weight",
        ),
        ({"extra_tensors": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "not positive"),
        ({"extra_tensors": {"rope_freqs.weight": np.ones(7, np.float32)}}, "has the shape"),
        ({"shape": TinyShape(num_heads=4, num_kv_heads=3)}, "do not divide"),
    ],
)
def test_a_file_we_would_compute_wrongly_is_refused(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelFileError, match=reason):
        load(tmp_path, **options)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_dowm.weight"))
    with pytest.raises(ModelFileError, match=r"'blk.1.ffn_down.weight' is missing"):
        load_program(ModelFile.open(path))
    key = b"llama.feed_forward_length\x04\x00\x00\x00"
    assert content.count(key) == 1
    start = content.index(key) + len(key)
    path.write_bytes(content[:start] + (96).to_bytes(4, "little") + content[start + 4 :])
    with pytest.raises(ModelFileError, match=r"ffn_gate.weight' has the shape \[128, 64\].*\[96, 64\]"):
        load_program(ModelFile.open(path))
