"""Grammars: what text an output may become, as masks over the vocabulary.

Owns: `Grammars`, one per worker: compiled grammars and the threads that compute masks. Runs in: the
worker; compiling runs on a thread of its own, because a large grammar takes longer than a step.
Source: llguidance's Python interface.

Forced text is not pushed into the model as tokens of our choosing (llguidance's `no_forcing`, which the
front end sets): the model picks among all ways to spell it, as it would have without a grammar.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from ds4.grammar_library import GrammarError, GrammarVocabulary, reason_of
from workers.sampling.interface import NO_TOKEN, MaskWork

_MAX_THREADS: Final = 8
_MAX_COMPILED: Final = 64
_MAX_COMPILED_CHARS: Final = 4 << 20


class GrammarConstraint:
    """One sequence's place in its grammar. Owned by the sequence; changed by `Grammars` alone."""

    __slots__ = ("failure", "matcher", "source")

    def __init__(self, source: "Grammars", matcher: LLMatcher) -> None:
        self.source = source
        self.matcher = matcher
        self.failure = ""


class Grammars:
    """Compiles grammars and computes masks. One per worker; `compute` is called by one thread at a time."""

    def __init__(self, vocabulary: GrammarVocabulary, *, num_threads: int = 0) -> None:
        self.end_ids: Final = vocabulary.end_ids
        self._vocabulary = vocabulary
        self._executor = LLExecutor(num_threads or max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2)))
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ds4-grammar")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # by grammar; compiler's thread only
        self._num_chars = 0

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
            raise GrammarError(f"the grammar does not allow the output so far: {reason_of(matcher)}")
        return GrammarConstraint(self, matcher)

    def compute(self, work: Sequence[MaskWork], masks: NDArray[np.uint32]) -> None:
        """Read the drawn tokens, then fill the masks, both on all threads; see `MaskSource.compute`."""
        live = [(each, constraint) for each in work if not (constraint := _of(each)).failure]
        drawn = [(one.matcher, each.token_id) for each, one in live if each.token_id != NO_TOKEN]
        if drawn:
            self._executor.consume_token_par(drawn)
        wanted = [(one.matcher, each.seat) for each, one in live]
        if wanted:
            self._executor.unsafe_compute_mask_ptr(wanted, masks.ctypes.data, masks.strides[0], len(masks))
        for _, one in live:
            if one.matcher.is_error():
                one.failure = reason_of(one.matcher)

    def _prototype(self, grammar: str) -> LLMatcher:
        found = self._compiled.get(grammar)
        if found is not None:
            self._compiled.move_to_end(grammar)
            return found
        try:
            matcher = self._vocabulary.compile(grammar)
        except GrammarError as error:
            raise GrammarError(f"the grammar cannot be used: {error}") from None
        self._compiled[grammar] = matcher
        self._num_chars += len(grammar)
        while len(self._compiled) > _MAX_COMPILED or self._num_chars > _MAX_COMPILED_CHARS:
            oldest, _ = self._compiled.popitem(last=False)
            self._num_chars -= len(oldest)
        return matcher


def _of(work: MaskWork) -> GrammarConstraint:
    assert isinstance(work.constraint, GrammarConstraint)
    return work.constraint
