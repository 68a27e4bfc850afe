"""Grammars: what text an output may become, as masks over the vocabulary.

Owns: `Grammars`, one per worker: the vocabulary as llguidance wants it, compiled grammars, the threads
that compute masks. Runs in: the worker; compiling runs on a thread of its own, because a large grammar
takes longer than a step. The only module of the worker that imports llguidance. Source: llguidance's
Python interface.

Forced text is not pushed into the model as tokens of our choosing (llguidance's `no_forcing`, which the
front end sets): the model picks among all ways to spell it, as it would have without a grammar.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from ds4.errors import Ds4Error
from ds4.model_file import ModelFile
from ds4.vocabulary import TokenType, byte_table, read_vocabulary
from workers.sampling.interface import NO_TOKEN, MaskWork

_MAX_THREADS: Final = 8
_MAX_COMPILED: Final = 64
_MAX_COMPILED_CHARS: Final = 4 << 20
# A state takes one to two kilobytes, and every sequence may come to have that many.
_MAX_LEXER_STATES: Final = 20_000
_MAX_REASON_CHARS: Final = 300


class GrammarError(Ds4Error):
    """A grammar cannot be compiled, or does not fit the output that it is given."""


class GrammarConstraint:
    """One sequence's place in its grammar. Owned by the sequence; changed by `Grammars` alone."""

    __slots__ = ("failure", "matcher", "source")

    def __init__(self, source: "Grammars", matcher: LLMatcher) -> None:
        self.source = source
        self.matcher = matcher
        self.failure = ""


class _Vocabulary:
    """The vocabulary under the names by which llguidance asks for it."""

    is_tokenizer_wrapper: Final = True
    bos_token_id: Final = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], end_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end_id
        self.greedy: Callable[[str], list[int]] = lambda _: []

    def __call__(self, text: str) -> list[int]:
        """Some way to spell `text`. Only a grammar that forces tokens in spite of us asks."""
        return self.greedy(text)


class Grammars:
    """Compiles grammars and computes masks. One per worker; `compute` is called by one thread at a time."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        special_ids: Collection[int],
        end_ids: Collection[int],
        vocab_size: int,
        num_threads: int = 0,
    ) -> None:
        """`tokens`: the bytes of each id; ids from there to `vocab_size` are never drawn."""
        assert end_ids
        assert len(tokens) <= vocab_size
        self.end_ids: Final = frozenset(end_ids)
        wrapped = _Vocabulary(
            [*tokens, *([b""] * (vocab_size - len(tokens)))], sorted(special_ids), min(end_ids)
        )
        self._tokenizer = LLTokenizer(wrapped, eos_token=sorted(end_ids))  # type: ignore[arg-type]
        wrapped.greedy = self._tokenizer.greedy_tokenize
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        threads = num_threads or max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._executor = LLExecutor(threads)
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ds4-grammar")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # by grammar; compiler's thread only
        self._num_chars = 0

    @classmethod
    def of_model(cls, model: ModelFile, vocab_size: int) -> "Grammars":
        """For the vocabulary of `model`. Raises GrammarError, ModelFileError where that does not work."""
        vocabulary = read_vocabulary(model)
        if not vocabulary.end_ids:
            raise GrammarError("the model has no end token, and a grammar ends with one")
        special = (TokenType.CONTROL, TokenType.UNKNOWN)
        return cls(
            byte_table(vocabulary),
            special_ids=[token_id for token_id, kind in enumerate(vocabulary.types) if kind in special],
            end_ids=vocabulary.end_ids,
            vocab_size=vocab_size,
        )

    def start(
        self, grammar: str, output: Sequence[int], done: Callable[[], None]
    ) -> "Future[GrammarConstraint]":
        """Begin to compile; the result has read `output`. `done` is called from the compiling thread.

        The future raises GrammarError.
        """
        future = self._compiler.submit(self.constraint, grammar, output)
        future.add_done_callback(lambda _: done())
        return future

    def constraint(self, grammar: str, output: Sequence[int] = ()) -> GrammarConstraint:
        """Compile now. Raises GrammarError."""
        matcher = self._prototype(grammar).deep_copy()
        if len(output) and not matcher.consume_tokens(list(output)):
            raise GrammarError(f"the grammar does not allow the output so far: {_reason(matcher)}")
        return GrammarConstraint(self, matcher)

    def close(self) -> None:
        """Stop the threads."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def compute(self, work: Sequence[MaskWork], masks: NDArray[np.uint32]) -> None:
        """Read the drawn tokens, then fill the masks, both on all threads; see `MaskSource.compute`."""
        matchers = [_of(each) for each in work]
        drawn = [
            (constraint.matcher, each.token_id)
            for constraint, each in zip(matchers, work, strict=True)
            if each.token_id != NO_TOKEN and not constraint.failure
        ]
        if drawn:
            self._executor.consume_token_par(drawn)
        wanted = [
            (constraint.matcher, each.seat)
            for constraint, each in zip(matchers, work, strict=True)
            if not constraint.failure
        ]
        if wanted:
            self._executor.unsafe_compute_mask_ptr(wanted, masks.ctypes.data, masks.strides[0], len(masks))
        for constraint in matchers:
            if constraint.matcher.is_error() and not constraint.failure:
                constraint.failure = _reason(constraint.matcher)

    def _prototype(self, grammar: str) -> LLMatcher:
        found = self._compiled.get(grammar)
        if found is not None:
            self._compiled.move_to_end(grammar)
            return found
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what the first mask makes is made once
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be used: {_reason(matcher)}")
        self._compiled[grammar] = matcher
        self._num_chars += len(grammar)
        while len(self._compiled) > _MAX_COMPILED or self._num_chars > _MAX_COMPILED_CHARS:
            oldest, _ = self._compiled.popitem(last=False)
            self._num_chars -= len(oldest)
        return matcher


def _of(work: MaskWork) -> GrammarConstraint:
    assert isinstance(work.constraint, GrammarConstraint)
    return work.constraint


def _reason(matcher: LLMatcher) -> str:
    """What llguidance says of it, without the parts that are for its developers."""
    text = " ".join(matcher.get_error().partition("<non-verbose/>")[0].split())
    return text[:_MAX_REASON_CHARS] or "no output matches it"
