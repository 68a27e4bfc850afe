"""Grammars: what text an output may become, as masks over the vocabulary.

Owns: `Grammars`, one per worker: compiled grammars and the threads that compute masks. Runs in: the
worker; compiling runs on a thread of its own, because a large grammar takes longer than a step.
Source: llguidance's Python interface.

Text that a grammar forces is spelt as the tokenizer would (ds4/grammar_library.py): of each of its tokens
the mask allows that one alone. So they need not be drawn, and whoever does draw them gets the same.
"""

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from ds4.grammar_library import GrammarError, GrammarVocabulary, reason_of
from workers.sampling.interface import Constraint

_MAX_THREADS: Final = 8
_MAX_COMPILED: Final = 64
_MAX_COMPILED_CHARS: Final = 4 << 20


class GrammarConstraint:
    """One sequence's place in its grammar. Owned by the sequence; changed by `Grammars` alone."""

    __slots__ = ("failure", "held_ids", "matcher", "source")

    def __init__(self, source: "Grammars", matcher: LLMatcher, held_ids: Collection[int] | None) -> None:
        self.source = source
        self.matcher = matcher
        self.held_ids = held_ids  # which have to be drawn even where they are forced; None: all
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
        self,
        grammar: str,
        output: Sequence[int],
        done: Callable[[], None],
        held_ids: Collection[int] | None = None,
    ) -> "Future[GrammarConstraint]":
        """Begin to compile; the result has read `output`. `done` is called from the compiling thread.

        The future raises GrammarError.
        """
        future = self._compiler.submit(self.constraint, grammar, output, held_ids)
        future.add_done_callback(lambda _: done())
        return future

    def constraint(
        self, grammar: str, output: Sequence[int] = (), held_ids: Collection[int] | None = None
    ) -> GrammarConstraint:
        """Compile now. `held_ids`: those that are never taken without a draw; None: nothing is.

        Raises GrammarError.
        """
        matcher = self._prototype(grammar).deep_copy()
        if len(output) and not matcher.consume_tokens(list(output)):
            raise GrammarError(f"the grammar does not allow the output so far: {reason_of(matcher)}")
        return GrammarConstraint(self, matcher, held_ids)

    def accept(self, drawn: Sequence[tuple[Constraint, int]]) -> list[Sequence[int]]:
        """Read the drawn tokens on all threads, then what each forces; see `MaskSource.accept`."""
        live = _living(drawn)
        if live:
            self._executor.consume_token_par([(one.matcher, token_id) for one, token_id in live])
        forced = [_take_forced(_grammar(constraint)) for constraint, _ in drawn]
        _note_failures(live)
        return forced

    def compute(self, wanted: Sequence[tuple[Constraint, int]], masks: NDArray[np.uint32]) -> None:
        """Fill the masks on all threads; see `MaskSource.compute`."""
        live = _living(wanted)
        if live:
            places = [(one.matcher, seat) for one, seat in live]
            self._executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, masks.strides[0], len(masks))
        _note_failures(live)

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


def _grammar(constraint: Constraint) -> GrammarConstraint:
    assert isinstance(constraint, GrammarConstraint)
    return constraint


def _living(pairs: Sequence[tuple[Constraint, int]]) -> list[tuple[GrammarConstraint, int]]:
    return [(_grammar(constraint), number) for constraint, number in pairs if not constraint.failure]


def _note_failures(pairs: Sequence[tuple[GrammarConstraint, int]]) -> None:
    for one, _ in pairs:
        if one.matcher.is_error():
            one.failure = reason_of(one.matcher)


def _take_forced(constraint: GrammarConstraint) -> Sequence[int]:
    """Read what comes next whatever is drawn, up to an id that has to be drawn; its ids."""
    matcher, held_ids = constraint.matcher, constraint.held_ids
    if held_ids is None or matcher.is_error():
        return ()
    forced = list(itertools.takewhile(lambda id: id not in held_ids, matcher.compute_ff_tokens()))
    return forced if forced and matcher.consume_tokens(forced) else ()
