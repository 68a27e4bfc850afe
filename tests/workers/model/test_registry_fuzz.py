"""A model file from a stranger, changed where it hurts: it loads, or is refused with a ModelFileError.

Every word of the head is set to the values that break readers (counts, lengths, types, shapes, offsets,
hyper-parameters alike), then the whole way is gone that start-up goes: metadata, vocabulary, tokenizer,
template, program and weights.
"""

import random
import tracemalloc
from pathlib import Path
from typing import Final

import pytest

from ds4.errors import ConfigError
from ds4.model_file import ModelFile
from ds4.text.chat_template import ChatTemplate
from ds4.text.tokenizer import Tokenizer
from tests.support.tiny_model import TinyShape, write_tiny_model
from workers.model.registry import load_program

_CASES: Final = 600
_MAX_BYTES: Final = 64 << 20  # for a file of some ten thousand
_EXTREMES_4: Final = [0, 1, 2, 0x7F, 0xFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF]
_EXTREMES_8: Final = [0, 1, 1 << 31, 1 << 32, (1 << 40) + 1, (1 << 62) - 1, 1 << 63, (1 << 64) - 1]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A small model, and where its head ends."""
    shape = TinyShape(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, ffn_size=32)
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", shape=shape)
    return path.read_bytes(), min(info.offset for info in ModelFile.open(path).tensors.values())


def _go_the_whole_way(path: Path) -> bool:
    """True where the file is accepted. Raises nothing but what is a defect."""
    try:
        model = ModelFile.open(path)
        tokenizer = Tokenizer.from_model(model)
        tokenizer.encode("hello world", add_special=True, parse_special=True)
        ChatTemplate.from_model(model, tokenizer)
        load_program(model)
    except ConfigError:
        return False
    return True


def _change(content: bytes, head: int, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        width, values = rng.choice(((4, _EXTREMES_4), (8, _EXTREMES_8)))
        # Strings shift everything, so that words lie anywhere.
        at = rng.randrange(0, head - width)
        changed[at : at + width] = rng.choice(values).to_bytes(width, "little")
    return bytes(changed)


def test_extremes_anywhere_in_the_head_are_refused_or_harmless(
    tmp_path: Path, small: tuple[bytes, int]
) -> None:
    content, head = small
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert _go_the_whole_way(path), "the unchanged file must load"
    rng = random.Random(20)
    accepted = 0
    tracemalloc.start()
    try:
        for _ in range(_CASES):
            path.write_bytes(_change(content, head, rng))
            tracemalloc.reset_peak()
            accepted += _go_the_whole_way(path)
            assert tracemalloc.get_traced_memory()[1] < _MAX_BYTES
    finally:
        tracemalloc.stop()
    assert 0 < accepted < _CASES, "changes that all fail, or all pass, show nothing"
