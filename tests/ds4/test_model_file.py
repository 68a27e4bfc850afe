"""The GGUF parser: equal to the gguf package on good files, one clear error on every bad one."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4 import model_file
from ds4.errors import ModelFileError
from ds4.ggml_types import GgmlType
from ds4.model_file import ModelFile
from tests.support.embedded_model import embedded_model
from tests.support.gguf_pieces import (
    ARRAY,
    BOOL,
    FLOAT32,
    LLAMA,
    STRING,
    UINT32,
    gguf_bytes,
    pair,
    tensor,
    text,
)
from tests.support.tiny_model import CHAT_TEMPLATE, TinyShape, vocabulary, write_tiny_model

SAMPLED_ABOVE = 2000


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_file(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write_file


def assert_equal_to_the_gguf_package(path: Path) -> None:
    ours, theirs = ModelFile.open(path), gguf.GGUFReader(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, field in fields.items():
        mine = ours.metadata[key]
        if len(field.data) <= SAMPLED_ABOVE:
            assert (mine, type(mine)) == (field.contents(), type(field.contents())), key
        else:  # the package takes seconds for a whole vocabulary
            assert len(mine) == len(field.data)
            for index in [*range(0, len(mine), len(mine) // 500), len(mine) - 1]:
                assert mine[index] == field.contents(index), key
    assert len(ours.tensors) == len(theirs.tensors)
    for other in theirs.tensors:
        tensor_info = ours.tensors[other.name]
        assert tensor_info.shape == tuple(int(size) for size in other.shape[::-1])
        assert tensor_info.ggml_type == int(other.tensor_type)
        assert (tensor_info.offset, tensor_info.num_bytes) == (other.data_offset, other.n_bytes)


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_reads_what_the_gguf_package_reads(tmp_path: Path, quant: str) -> None:
    assert_equal_to_the_gguf_package(write_tiny_model(tmp_path / "tiny.gguf", quant=quant))


def test_reads_the_embedded_model_as_the_gguf_package_does() -> None:
    assert_equal_to_the_gguf_package(embedded_model())


def test_every_value_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a", 200)
    writer.add_int8("b", -100)
    writer.add_uint16("c", 60000)
    writer.add_int16("d", -30000)
    writer.add_int32("e", -(1 << 30))
    writer.add_uint64("f", 1 << 63)
    writer.add_int64("g", -(1 << 62))
    writer.add_float64("h", 0.1)
    writer.add_bool("i", True)
    writer.add_array("j", [1, 2, 3])
    writer.add_array("k", [0.5, 0.25])
    writer.add_array("l", [True, False])
    writer.add_array("m", ["ä", "", "東京"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert_equal_to_the_gguf_package(path)


def test_answers_what_the_front_end_asks(tmp_path: Path) -> None:
    shape = TinyShape(max_context_tokens=384)
    model = ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf", shape=shape))
    assert model.architecture == "llama"
    assert model.name == "Tiny Random"
    assert model.vocab_size == len(vocabulary())
    assert model.max_context_tokens == 384
    assert model.chat_template == CHAT_TEMPLATE
    assert model.get_list("tokenizer.ggml.tokens", str) == vocabulary()


def test_a_nameless_model_is_called_after_its_file(write: Callable[[bytes], Path]) -> None:
    model = ModelFile.open(write(gguf_bytes()))
    assert model.name == "model"
    assert model.chat_template is None


def test_version_2_is_read_like_version_3(write: Callable[[bytes], Path]) -> None:
    assert ModelFile.open(write(gguf_bytes(version=2))).architecture == "llama"


def test_the_tokenizer_hash_follows_the_vocabulary_and_nothing_else(write: Callable[[bytes], Path]) -> None:
    def digest(*pairs: bytes) -> str:
        return ModelFile.open(write(gguf_bytes([LLAMA, *pairs]))).tokenizer_hash

    a = pair("tokenizer.ggml.model", STRING, text("gpt2"))
    b = pair("tokenizer.ggml.pre", STRING, text("smollm"))
    assert digest(a, b) == digest(b, a)
    assert digest(a, b) == digest(a, b, pair("general.name", STRING, text("other")))
    assert digest(a, b) != digest(a)
    assert digest(a, b) != digest(a, pair("tokenizer.ggml.pre", STRING, text("qwen2")))
    # The same bytes cut elsewhere are another vocabulary.
    assert digest(pair("tokenizer.ggml.x", STRING, text("y"))) != digest(
        pair("tokenizer.ggml.xy", STRING, text(""))
    )


F32 = int(GgmlType.F32)
Q4_0 = int(GgmlType.Q4_0)
HUGE = (1 << 64) - 1


BROKEN: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"GG", "truncated"),
    (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    (gguf_bytes(version=1), "version 1 is not supported"),
    (gguf_bytes(version=4), "version 4 is not supported"),
    (gguf_bytes(version=0x03000000), "big-endian"),
    (gguf_bytes(num_tensors=HUGE), "the limits are"),
    (gguf_bytes(num_pairs=HUGE), "the limits are"),
    (gguf_bytes(num_pairs=2), "key 1 has no name"),
    (gguf_bytes([]), "'general.architecture' is missing"),
    (gguf_bytes([LLAMA, LLAMA]), "appears twice"),
    (gguf_bytes([pair("general.architecture", UINT32, struct.pack("<I", 1))]), "is a int, not a str"),
    (gguf_bytes([LLAMA, struct.pack("<Q", HUGE)]), "the limit is"),
    (gguf_bytes([LLAMA, struct.pack("<Q", 60_000)]), "truncated"),
    (gguf_bytes([LLAMA, struct.pack("<Q", 2) + b"\xff\xfe"]), "not valid UTF-8"),
    (gguf_bytes([LLAMA, pair("k", STRING, struct.pack("<Q", HUGE))]), "the limit is"),
    (gguf_bytes([LLAMA, pair("k", STRING, struct.pack("<Q", 3) + b"a\xffb")]), "not valid UTF-8"),
    (gguf_bytes([LLAMA, pair("k", 13, b"")]), "unknown value type 13"),
    (gguf_bytes([LLAMA, pair("k", BOOL, b"\x02")]), "truth value of 2"),
    (gguf_bytes([LLAMA, pair("k", ARRAY, struct.pack("<IQ", UINT32, HUGE))]), "items; the limit"),
    (gguf_bytes([LLAMA, pair("k", ARRAY, struct.pack("<IQ", UINT32, 1 << 20))]), "truncated"),
    (
        gguf_bytes([LLAMA, pair("k", ARRAY, struct.pack("<IQ", STRING, 1 << 20))]),
        "claims 1048576 strings",
    ),
    (gguf_bytes([LLAMA, pair("k", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 40))]), "passes the end"),
    (
        gguf_bytes([LLAMA, pair("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("abcdefghij"))]).rstrip(
            b"\0"
        ),
        "truncated: item 1",
    ),
    (gguf_bytes([LLAMA, pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "array of arrays"),
    (gguf_bytes([LLAMA, pair("k", ARRAY, struct.pack("<IQ", 99, 1))]), "unknown value type 99"),
    (
        gguf_bytes([LLAMA, pair("k", ARRAY, struct.pack("<IQ", BOOL, 2) + b"\x01\x02")]),
        "other than 0 and 1",
    ),
    (gguf_bytes([LLAMA, pair("split.count", UINT32, struct.pack("<I", 3))]), "split into 3 files"),
    (gguf_bytes([LLAMA, pair("general.alignment", UINT32, struct.pack("<I", 24))]), "power of two"),
    (gguf_bytes([LLAMA, pair("general.alignment", UINT32, struct.pack("<I", 0))]), "power of two"),
    (gguf_bytes([LLAMA, pair("general.alignment", STRING, text("32"))]), "power of two"),
    (gguf_bytes(None, [tensor("t", [], F32, 0)]), "0 dimensions"),
    (gguf_bytes(None, [tensor("t", [1] * 5, F32, 0)]), "5 dimensions"),
    (gguf_bytes(None, [tensor("t", [4, 0], F32, 0)]), "empty dimension"),
    (gguf_bytes(None, [tensor("t", [4], 4, 0)]), "unknown type 4"),
    (gguf_bytes(None, [tensor("t", [48], Q4_0, 0)], data=64), "multiple of 32"),
    (gguf_bytes(None, [tensor("t", [8], F32, 4)], data=64), "not aligned"),
    (gguf_bytes(None, [tensor("t", [9], F32, 0)], data=32), "was the download complete"),
    (gguf_bytes(None, [tensor("t", [8], F32, HUGE - 31)], data=32), "was the download complete"),
    (gguf_bytes(None, [tensor("t", [HUGE, HUGE], F32, 0)], data=32), "was the download complete"),
    (gguf_bytes(None, [tensor("t", [8], F32, 0)] * 2, data=64), "appears twice"),
    (
        gguf_bytes(None, [tensor("a", [16], F32, 0), tensor("b", [8], F32, 32)], data=64),
        "'a' and 'b' overlap",
    ),
    (gguf_bytes(None, [tensor("n" * 300, [8], F32, 0)], data=64), "the limit is 255"),
]


@pytest.mark.parametrize(("content", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_a_broken_file_is_refused_with_its_name_and_the_fault(
    write: Callable[[bytes], Path], content: bytes, reason: str
) -> None:
    path = write(content)
    with pytest.raises(ModelFileError) as caught:
        ModelFile.open(path)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.path == str(path)


def test_many_arrays_are_refused_before_they_fill_memory(
    write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_file, "MAX_TOTAL_ITEMS", 100)
    arrays = [pair(f"k{index}", ARRAY, struct.pack("<IQ", 0, 40) + bytes(40)) for index in range(3)]
    assert len(ModelFile.open(write(gguf_bytes([LLAMA, *arrays[:2]]))).metadata) == 3
    with pytest.raises(ModelFileError, match="in all"):
        ModelFile.open(write(gguf_bytes([LLAMA, *arrays])))


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    for path, reason in (
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path, "is a directory"),
        (fifo, "not a regular file"),
        (tmp_path / "big-00001-of-00003.gguf", "one of 3 parts"),
        (tmp_path / "nul\0.gguf", "null"),
    ):
        with pytest.raises(ModelFileError, match=reason):
            ModelFile.open(path)


def test_typed_accessors_name_the_key_that_is_wrong(write: Callable[[bytes], Path]) -> None:
    model = ModelFile.open(
        write(
            gguf_bytes(
                [
                    LLAMA,
                    pair("llama.n", UINT32, struct.pack("<I", 7)),
                    pair("llama.f", FLOAT32, struct.pack("<f", 0.5)),
                    pair("llama.nan", FLOAT32, struct.pack("<f", float("nan"))),
                    pair("llama.b", BOOL, b"\x01"),
                    pair("llama.a", ARRAY, struct.pack("<IQII", UINT32, 2, 5, 6)),
                ]
            )
        )
    )
    assert model.get_int(model.key("n")) == 7
    assert model.get_float("llama.n") == 7.0
    assert model.get_float("llama.f") == 0.5
    assert model.get_bool("llama.b") is True
    assert model.get_list("llama.a", int) == [5, 6]
    assert model.get_int("llama.none", 3) == 3
    assert model.get_str("llama.none", "x") == "x"
    faults: list[tuple[str, Callable[[], Any]]] = [
        ("'llama.none' is missing", lambda: model.get_int("llama.none")),
        ("'llama.n' is 7; it must be between 8", lambda: model.get_int("llama.n", low=8)),
        ("'llama.f' is a float, not a int", lambda: model.get_int("llama.f")),
        ("'llama.b' is a bool, not a int", lambda: model.get_int("llama.b")),
        ("'llama.nan' is nan", lambda: model.get_float("llama.nan")),
        ("'llama.a' is a list, not a str", lambda: model.get_str("llama.a")),
        ("'llama.a' holds int items, not str", lambda: model.get_list("llama.a", str)),
        ("'llama.context_length' is missing", lambda: model.max_context_tokens),
    ]
    for reason, read in faults:
        with pytest.raises(ModelFileError, match=reason.replace("(", r"\(")):
            read()


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    shape = TinyShape(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, ffn_size=32)
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", shape=shape).read_bytes()


def opens_or_refuses(path: Path) -> None:
    """The promise to the operator: a model or a ModelFileError, never anything else."""
    try:
        model = ModelFile.open(path)
    except ModelFileError:
        return
    size = path.stat().st_size
    assert all(info.offset + info.num_bytes <= size for info in model.tensors.values())


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 9000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4)
)
def test_changed_bytes_never_crash_the_reader(
    tmp_path: Path, small_file: bytes, edits: list[tuple[int, bytes]]
) -> None:
    content = bytearray(small_file)
    for position, replacement in edits:
        content[position : position + len(replacement)] = replacement
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    opens_or_refuses(path)


def test_every_truncation_of_the_head_is_refused(tmp_path: Path, small_file: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_file)
    end = max(info.offset + info.num_bytes for info in ModelFile.open(path).tensors.values())
    for length in {*range(200), *np.linspace(200, end - 1, 120).astype(int).tolist()}:
        path.write_bytes(small_file[:length])
        with pytest.raises(ModelFileError):
            ModelFile.open(path)
