"""ds4/text/tokenizer.py with long texts: the same ids, and other threads go on meanwhile."""

import threading
import time
from pathlib import Path

import pytest

from ds4.model_file import ModelFile
from ds4.text.tokenizer import Tokenizer
from tests.support.tiny_model import write_tiny_model


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_model(ModelFile.open(write_tiny_model(tmp_path / "tiny.gguf")))


def test_a_long_text_has_the_ids_of_its_lines(tokenizer: Tokenizer) -> None:
    line = "hello world and the other one 😀 é"
    ids = tokenizer.encode(line, add_special=False, parse_special=False)
    long_ids = tokenizer.encode(line * 500, add_special=False, parse_special=False)
    assert long_ids == ids * 500


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    text = "hello world and the other one " * 20_000
    thread = threading.Thread(
        target=tokenizer.encode, args=(text,), kwargs={"add_special": False, "parse_special": False}
    )
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.0005)  # gives the interpreter up, and needs it to go on
        turns += 1
    assert turns > 20  # a handful where the encoder keeps the interpreter to itself
