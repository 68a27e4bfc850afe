"""A vocabulary from a stranger's file works or is refused; it never crashes the process."""

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import ModelFileError
from ds4.model_file import ModelFile
from ds4.text.tokenizer import Tokenizer
from tests.support.vocabulary_file import byte_fallback_tokens, byte_tokens

texts = st.sampled_from(
    ["a", "b", "ab", "ba", "aba", "", " ", "Ġ", "\u2581", "<s>", "</s>", "<0x41>", "<0xZZ>", "é", "[x]"]
)
merges = st.lists(st.one_of(st.tuples(texts, texts).map(" ".join), texts), max_size=8)
ids = st.integers(0, 300)


@st.composite
def metadata(draw: st.DrawFn) -> dict[str, Any]:
    model = draw(st.sampled_from(["gpt2", "llama", "gemma4"]))
    base = draw(st.sampled_from([[], byte_tokens(), byte_fallback_tokens()]))
    tokens = [token.text for token in base] + draw(st.lists(texts, max_size=12))
    size = len(tokens)
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": draw(st.sampled_from(["gpt-2", "llama-bpe", "default"])),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": draw(merges),
    }
    if draw(st.booleans()):
        keys["tokenizer.ggml.token_type"] = draw(st.lists(st.integers(-1, 7), min_size=size, max_size=size))
    if model == "llama" or draw(st.booleans()):
        scores = st.floats(allow_nan=True, allow_infinity=True, width=32)
        keys["tokenizer.ggml.scores"] = [draw(scores)] * size
    for name in ("bos", "eos", "eot", "unknown", "fim_pad"):
        if draw(st.booleans()):
            keys[f"tokenizer.ggml.{name}_token_id"] = draw(ids)
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if draw(st.booleans()):
            keys[f"tokenizer.ggml.{name}"] = draw(st.booleans())
    return keys


@settings(deadline=None)
@given(keys=metadata(), text=st.one_of(st.text(max_size=20), st.lists(texts, max_size=6).map("".join)))
def test_any_vocabulary_works_or_is_refused(keys: dict[str, Any], text: str) -> None:
    try:
        tokenizer = Tokenizer.from_model(ModelFile(Path("fuzz.gguf"), keys, {}, ""))
    except ModelFileError:
        return
    for special in (True, False):
        found = tokenizer.encode(text, add_special=special, parse_special=special)
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in found)
        tokenizer.decode(found, special=special)
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in tokenizer.end_ids)
    plain = tokenizer.encode(text, add_special=False, parse_special=False)
    allowed = {tokenizer.unknown_id} if tokenizer.unknown_id is not None else set()
    assert not {token_id for token_id in plain if tokenizer.is_control(token_id)} - allowed
