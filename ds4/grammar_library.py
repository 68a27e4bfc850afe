"""The grammar library's view of a vocabulary, and the limits under which every grammar is compiled.

Owns: how llguidance is set up. Runs in: the worker, and the front end's checking process; both compile
alike, so what the front end took the worker takes too. Source: llguidance's Python interface.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ds4.errors import Ds4Error
from ds4.merger import build_merger
from ds4.model_file import ModelFile
from ds4.vocabulary import TokenType, byte_table, read_vocabulary

# A state takes one to two kilobytes, and every sequence may come to have that many.
_MAX_LEXER_STATES: Final = 20_000
_MAX_REASON_CHARS: Final = 300
_MAX_TOKEN_BYTES: Final = 1024  # with a longer one the library panics
_SPECIAL: Final = (TokenType.CONTROL, TokenType.UNKNOWN)


class GrammarError(Ds4Error):
    """A grammar cannot be compiled, or does not fit the output that it is given."""


class _Tokens:
    """A vocabulary under the names by which llguidance asks for it."""

    is_tokenizer_wrapper: Final = True
    bos_token_id: Final = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], end_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end_id
        self.greedy: Callable[[str], list[int]] = lambda _: []
        self.spell: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """The ids that spell `text`: as the tokenizer does, which is what the model was trained on."""
        ids = self.spell(text) if self.spell is not None else []
        spelt = b"".join(self.tokens[token_id] for token_id in ids)
        return ids if spelt == text.encode() else self.greedy(text)


class GrammarVocabulary:
    """The tokens over which grammars are compiled. Immutable."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        special_ids: Collection[int],
        end_ids: Collection[int],
        vocab_size: int,
        spell: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`tokens`: the bytes of each id; ids from there to `vocab_size` are never drawn. `spell`: how the
        tokenizer writes a text that is forced; None: in the longest pieces.

        Raises GrammarError without an end token, and with a token of absurd length.
        """
        if not end_ids:
            raise GrammarError("the model has no end token, and a grammar ends with one")
        if (longest := max(map(len, tokens), default=0)) > _MAX_TOKEN_BYTES:
            raise GrammarError(
                f"the vocabulary has a token of {longest} bytes; the limit is {_MAX_TOKEN_BYTES}"
            )
        assert len(tokens) <= vocab_size
        self.end_ids: Final = frozenset(end_ids)
        padded = [*tokens, *([b""] * (vocab_size - len(tokens)))]
        wrapped = _Tokens(padded, sorted(special_ids), min(end_ids))
        self._tokenizer = LLTokenizer(wrapped, eos_token=sorted(end_ids))  # type: ignore[arg-type]
        wrapped.greedy, wrapped.spell = self._tokenizer.greedy_tokenize, spell
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)

    @classmethod
    def of_model(cls, model: ModelFile) -> "GrammarVocabulary":
        """Raises GrammarError, ModelFileError where the model's vocabulary cannot be used."""
        vocabulary = read_vocabulary(model)
        merger = build_merger(model, vocabulary, add_space_prefix=False)  # what is forced continues a text
        return cls(
            byte_table(vocabulary),
            special_ids=[token_id for token_id, kind in enumerate(vocabulary.types) if kind in _SPECIAL],
            end_ids=vocabulary.end_ids,
            vocab_size=model.vocab_size,
            spell=lambda text: merger.encode(text, add_special_tokens=False).ids,
        )

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher whose first mask is computed. Raises GrammarError.

        Lets go of the interpreter lock while it works.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(reason_of(matcher))
        return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Why the matcher is in its error state, without the parts that are for the library's developers."""
    text = matcher.get_error().partition("<non-verbose/>")[0].strip()
    lines = [line for line in text.splitlines() if " | " not in line and line.strip(" ^")]
    return " ".join(" ".join(lines).split())[:_MAX_REASON_CHARS] or "nothing matches it"
