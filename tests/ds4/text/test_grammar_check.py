"""The checking process on its own: its frames, its verdicts, and how it ends."""

import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ds4.generation import MAX_GRAMMAR_BYTES
from ds4.text.grammar import GrammarSource, Verdict, choice_source, json_source
from ds4.text.grammar_check import check
from tests.support import schemas
from tests.support.grammar_walk import vocabulary
from tests.support.tiny_model import write_tiny_model

BOMB = json_source({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(1, 30)]})


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (json_source({"properties": {"a": {"not": {}, "if": {}}}}), "unsupported_parameter", '"if", "not"'),
        (json_source({"type": "string", "format": "idn-email"}), "invalid_grammar", "idn-email"),
        (json_source({"$ref": "http://example.com/x"}), "invalid_grammar", "example.com"),
        (json_source({"$ref": "#"}), "invalid_grammar", "NoExtension"),
        (json_source([]), "invalid_json_schema", "object"),
        (GrammarSource("regex", "(a"), "invalid_grammar", "unclosed"),
        (GrammarSource("regex", "(?=a)b"), "invalid_grammar", "look-ahead"),
        (GrammarSource("grammar", "start: missing"), "invalid_grammar", "missing"),
        (GrammarSource("grammar", "root ::= missing"), "invalid_grammar", "missing"),
        (choice_source(["x" * MAX_GRAMMAR_BYTES]), "grammar_too_large", "larger"),
        (GrammarSource("json", '{"items":' * 5000 + "{}" + "}" * 5000), "grammar_too_complex", "nested"),
        (GrammarSource("json", '{"items":' * 500 + "{}" + "}" * 500), "invalid_grammar", "recursion"),
        (GrammarSource("grammar", "start: " + "(" * 9999 + '"a"' + ")" * 9999), "invalid_grammar", "nested"),
    ],
)
def test_what_cannot_be_used_is_said_in_words(source: GrammarSource, code: str, words: str) -> None:
    verdict = check(source, vocabulary())
    assert verdict.grammar == ""
    assert verdict.code == code
    assert words in verdict.problem
    assert "\n" not in verdict.problem


def test_a_good_source_becomes_a_grammar() -> None:
    assert check(json_source(schemas.PERSON), vocabulary()) == Verdict(
        grammar=schemas.grammar(schemas.PERSON)
    )


class Child:
    """The process, as its front end sees it."""

    def __init__(self, model: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ds4.text.grammar_check", str(model)],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: Any) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def send(self, source: GrammarSource) -> None:
        assert self.process.stdin is not None
        raw = msgspec.msgpack.encode(source)
        self.process.stdin.write(struct.pack("<I", len(raw)) + raw)
        self.process.stdin.flush()

    def read(self) -> Verdict | None:
        assert self.process.stdout is not None
        head = self.process.stdout.read(4)
        if len(head) < 4:
            return None
        return msgspec.msgpack.decode(self.process.stdout.read(*struct.unpack("<I", head)), type=Verdict)


def test_it_answers_until_its_input_ends(tmp_path: Path) -> None:
    with Child(write_tiny_model(tmp_path / "tiny.gguf")) as child:
        assert child.read() == Verdict()
        for source in (json_source(schemas.PERSON), choice_source(["a"])):
            child.send(source)
            verdict = child.read()
            assert verdict is not None
            assert verdict.grammar
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.process.wait(timeout=60) == 0


def test_what_takes_years_ends_the_process_even_without_a_parent_that_looks(tmp_path: Path) -> None:
    with Child(write_tiny_model(tmp_path / "tiny.gguf")) as child:
        assert child.read() == Verdict()
        child.send(BOMB)
        assert child.read() is None
        # Of processor time, or of time where other processes leave it hardly any.
        assert child.process.wait(timeout=60) in (-signal.SIGPROF, -signal.SIGALRM)


def test_a_model_without_a_usable_vocabulary_is_said(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with Child(tmp_path / "broken.gguf") as child:
        verdict = child.read()
        assert verdict is not None
        assert "broken.gguf" in verdict.problem
        assert child.process.wait(timeout=60) == 0
