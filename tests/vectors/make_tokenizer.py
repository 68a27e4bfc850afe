"""Writes tests/vectors/tokenizer.json: texts and the ids that llama.cpp gives them.

Runs in: development only, by hand:

    python -m tests.vectors.make_tokenizer SDIST [--lib DIR] [--model FILE.gguf] [--write]

SDIST is an unpacked source distribution of `llama-cpp-python`, DIR the folder with its built shared
libraries (default: vendor/llama.cpp/build/bin in SDIST). Without --write it only compares:
1. every vocabulary of SDIST with the texts and ids that come with it;
2. every pre-tokenizer we claim, on the vocabularies of SDIST, with llama.cpp on a large corpus;
3. the small vocabulary that is committed, and FILE.gguf, with llama.cpp.

The committed vocabulary is trained here on the committed texts, without any pre-tokenizer, so that
its merges reach across every border a pre-tokenizer may draw: a missing cut changes the ids.
"""

import argparse
import random
import struct
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from ds4.errors import ModelFileError
from ds4.model_file import ModelFile
from ds4.pretokenizers import PRE_TOKENIZERS
from ds4.text.tokenizer import Tokenizer
from tests.support.vocabulary_file import (
    CONTROL,
    USER_DEFINED,
    Token,
    byte_fallback_tokens,
    byte_tokens,
    write_vocabulary,
)

OUTPUT: Final = Path(__file__).with_name("tokenizer.json")
NUM_MERGES: Final = 900
# llama.cpp's own engine has no case classes for combining marks and treats them as neither case; we use
# the models' published expressions, so texts with such marks differ there and are left out.
APPROXIMATED: Final = frozenset({"gpt-4o", "tekken"})
Encode = Callable[[str, bool], list[int]]  # (text, parse_special)

TEXTS: Final = [
    "Hello, world!",
    " Hello  World!!\n",
    "I'm you're we've they'll I'd it's IT'S WE'LL 'tis don't'VE",
    "naïve café résumé Ærøskøbing ŁÓDŹ",
    "Привет, мир! Как дела?",
    "你好，世界。今天天气怎么样？abc中文123字",
    "こんにちは世界 カタカナ 漢字ー",
    "안녕하세요 세계",
    "مرحبا بالعالم ١٢٣٤٥",
    "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก tiếng Việt có dấu",
    "🙂🙃👩‍👩‍👧‍👦 🇫🇷🇩🇪 ☃️ 🚀",
    "e\u0301a\u0300 combining o\u0308",
    "1234567890 3.14159 1,000,000 0x1F ２０２４ Ⅷ ½ ² 12 345 6789",
    "$100 €50 #hashtag @user a/b\\c <div>=</div> && || ~~ ``` *** ^_^",
    "a\u00a0b\u2003c\u3000d\u200be",
    "ﬀ ﬃ ℌ ⅷ ㎒ ǅǈ ß",
    "def f(x):\n\treturn x**2  # comment\n\n\n    if x:\n        pass\n",
    "\r\n\r\n \r\n x\r\ry",
    "  lead",
    "trail  ",
    "a  b   c    d     e",
    "\n\n\n\n\n",
    "\t\t\t x\t y",
    "  \n  \n",
    "x \n y \n\n z",
    "don’t ‘quote’ “q” — – … •",
    "iPhone XMLHttpRequest getURL HTTPServer camelCase ABCdef",
    "(text) [x] {y} \"quoted\" 'single' .dot ...dots !bang ?!",
    "foo_bar __init__ snake_case",
    "www.example.com/path?q=1&r=2#frag user@example.com",
    "ТЕСТ тест Тест ΑΒΓ αβγ",
    "1 22 333 4444 55555 666666 7777777",
    "3.3 3..3 3...3 -1 +2 1e-5",
    "\u0001\u0007\x7f",
    "<|im_start|>user text<|im_end|>",
    "",
    " ",
]


def corpus() -> list[str]:
    """Texts for the large comparison: the committed ones, their joins, white space, random Unicode."""
    chance = random.Random(0)
    texts = TEXTS + [first + second for first in TEXTS for second in chance.sample(TEXTS, 3)]
    blanks = [
        *" \t\n\r",
        "  ",
        "\r\n",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x0b",
        "\x0c",
        "a",
        "1",
        ".",
        "é",
        "中",
    ]
    texts += ["".join(chance.choices(blanks, k=chance.randint(1, 24))) for _ in range(300)]
    ranges = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x4FF), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F)]
    ranges += [(0x1E00, 0x1FFF), (0x2000, 0x27BF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
    ranges += [(0xFE00, 0xFFEF), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF)]
    for _ in range(600):
        chosen = [*chance.sample(ranges, 3), (0x20, 0x7E)]
        size = chance.randint(1, 60)
        texts.append("".join(chr(chance.randint(*chance.choice(chosen))) for _ in range(size)))
    return texts


class Peer:
    """llama.cpp, through the ctypes bindings of the source distribution."""

    def __init__(self, sdist: Path, lib: Path) -> None:
        import os

        os.environ["LLAMA_CPP_LIB_PATH"] = str(lib)  # noqa: TID251 - how the peer is told
        sys.modules.setdefault("diskcache", types.ModuleType("diskcache"))
        sys.path.insert(0, str(sdist))
        import llama_cpp

        self._llama: Any = llama_cpp.Llama

    def load(self, path: Path) -> Encode:
        """A function from text to ids. Raises ValueError where the peer refuses the file."""
        model = self._llama(str(path), vocab_only=True, verbose=False)

        def encode(text: str, parse_special: bool) -> list[int]:
            return list(model.tokenize(text.encode(), add_bos=False, special=parse_special))

        return encode


def ours(path: Path) -> Encode:
    """Our tokenizer on the same file."""
    tokenizer = Tokenizer.from_model(ModelFile.open(path))
    return lambda text, parse_special: tokenizer.encode(text, add_special=False, parse_special=parse_special)


def with_pre(source: Path, pre: str, target: Path) -> Path:
    """A copy of a vocabulary file (no tensors, so nothing needs alignment) with another `pre`."""
    key = b"tokenizer.ggml.pre"
    raw = source.read_bytes()
    start = raw.index(key) + len(key) + 4
    (length,) = struct.unpack_from("<Q", raw, start)
    value = pre.encode()
    target.write_bytes(raw[:start] + struct.pack("<Q", len(value)) + value + raw[start + 8 + length :])
    return target


def train() -> tuple[list[str], list[str]]:
    """(tokens beyond the 256 bytes, merges): byte-pair encoding of TEXTS without borders."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + NUM_MERGES,
        min_frequency=1,
        initial_alphabet=[token.text for token in byte_tokens()],
        show_progress=False,
    )
    trained.train_from_iterator([text for text in TEXTS if "<|" not in text], trainer)
    merges = [" ".join(pair) for pair in msgspec.json.decode(trained.to_str())["model"]["merges"]]
    # Whole words that no merge leads to: found only where merges are ignored.
    words = ["Ġcamel", "XML", "ĠHTTP", "pass", "snake"]
    made = [merge.replace(" ", "") for merge in merges]
    return list(dict.fromkeys(made + words)), merges


def small_bpe(path: Path, pre: str, tokens: Sequence[str], merges: Sequence[str]) -> Path:
    """The committed byte-level vocabulary under one pre-tokenizer."""
    special = [Token("<|im_start|>", CONTROL), Token("<|im_end|>", CONTROL), Token("    ", USER_DEFINED)]
    everything = [*byte_tokens(), *map(Token, tokens), *special]
    return write_vocabulary(path, everything, pre=pre, merges=merges, settings={"ggml.add_bos_token": False})


def small_spm(path: Path, pieces: Sequence[str], *, space_prefix: bool) -> Path:
    """The committed SentencePiece vocabulary: earlier pieces have better scores."""
    everything = [
        Token("<unk>", 2),
        Token("<s>", CONTROL),
        Token("</s>", CONTROL),
        *byte_fallback_tokens(),
        *(Token(piece, score=-float(rank)) for rank, piece in enumerate(pieces)),
        Token("<|im_start|>", CONTROL),
        Token("<|im_end|>", CONTROL),
        Token("\n\n\n", USER_DEFINED),
    ]
    return write_vocabulary(path, everything, model="llama", settings={"ggml.add_space_prefix": space_prefix})


def train_pieces() -> list[str]:
    """SentencePiece-like pieces of TEXTS: characters last, longer pieces in the order of training."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, min_frequency=2, show_progress=False)
    spaced = [text.replace(" ", "\u2581") for text in TEXTS if "<|" not in text]
    trained.train_from_iterator(spaced, trainer)
    vocab: dict[str, int] = trained.get_vocab()
    ordered = sorted(vocab, key=vocab.__getitem__)
    return [piece for piece in ordered if len(piece) > 1] + [piece for piece in ordered if len(piece) == 1]


def compare(name: str, theirs: Encode, mine: Encode, texts: Sequence[str]) -> bool:
    """Prints how many texts give the same ids, and the first that does not."""
    cases = [(text, special) for text in texts for special in (True, False)]
    wrong = [(text, special) for text, special in cases if theirs(text, special) != mine(text, special)]
    print(f"{name:24} {len(cases) - len(wrong):5} / {len(cases)}", flush=True)
    for text, special in wrong[:2]:
        print("   ", repr(text), theirs(text, special), mine(text, special))
    return not wrong


def shipped_vectors(models: Path) -> Iterator[tuple[Path, list[str], list[list[int]]]]:
    """The vocabularies of SDIST that come with texts and ids."""
    for path in sorted(models.glob("ggml-vocab-*.gguf")):
        inputs, outputs = path.with_name(path.name + ".inp"), path.with_name(path.name + ".out")
        if inputs.exists():
            with inputs.open(encoding="utf-8", newline="") as file:
                texts = file.read().split("\n__ggml_vocab_test__\n")
            lines = outputs.read_text().splitlines()
            yield path, texts, [[int(number) for number in line.split()] for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--lib", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    vendor = options.sdist / "vendor" / "llama.cpp"
    for path, texts, expected in shipped_vectors(vendor / "models"):
        try:
            encode = ours(path)
        except ModelFileError as error:
            print(f"{path.name:32} refused: {str(error).partition(': ')[2][:90]}")
            continue
        equal = sum(encode(text, True) == ids for text, ids in zip(texts, expected, strict=False))
        print(f"{path.name:32} {equal} / {min(len(texts), len(expected))}")
    peer = Peer(options.sdist, options.lib or vendor / "build" / "bin")
    large = corpus()
    result: dict[str, Any] = {"texts": TEXTS}
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory) / "vocabulary.gguf"
        tokens, merges = train()
        result |= {"tokens": tokens, "merges": merges, "pre": {}}
        names: dict[int, list[str]] = {}
        for name, entry in PRE_TOKENIZERS.items():
            if entry.byte_level:
                names.setdefault(id(entry), []).append(name)
        carrier = vendor / "models" / "ggml-vocab-llama-bpe.gguf"
        for group in names.values():
            path = with_pre(carrier, group[0], scratch)
            compare(f"{group[0]} (large)", peer.load(path), ours(path), large)
            for name in group:
                path = small_bpe(scratch, name, tokens, merges)
                theirs = peer.load(path)
                mine = ours(path)
                compare(name, theirs, mine, TEXTS)
                ids: list[list[int] | None] = [theirs(text, False) for text in TEXTS]
                if group[0] in APPROXIMATED:
                    pairs = [(text, mine(text, False)) for text in TEXTS]
                    ids = [found if theirs(text, False) == found else None for text, found in pairs]
                if name == group[0]:
                    result["pre"][name] = ids
                elif ids != result["pre"][group[0]]:
                    print(f"    {name} is not the same as {group[0]}")
        pieces = train_pieces()
        result |= {"pieces": pieces, "spm": {}}
        for prefix in (True, False):
            path = small_spm(scratch, pieces, space_prefix=prefix)
            theirs = peer.load(path)
            compare(f"llama, prefix {prefix}", theirs, ours(path), large)
            result["spm"][str(prefix).lower()] = [theirs(text, False) for text in TEXTS]
    if options.model:
        theirs = peer.load(options.model)
        compare("embedded model", theirs, ours(options.model), large)
        result["smollm"] = [theirs(text, True) for text in TEXTS]
    if options.write:
        lines = [f"{msgspec.json.encode(key).decode()}: {_lines(value)}" for key, value in result.items()]
        OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    """JSON with one line for each group, so that differences can be read."""
    if isinstance(value, dict):
        inner = ",\n".join(
            f" {msgspec.json.encode(key).decode()}: {_lines(item)}" for key, item in value.items()
        )
        return "{\n" + inner + "\n}"
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    main()
