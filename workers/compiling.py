"""Sequences whose grammar is being compiled: after their submission, before they wait for a seat.

Owns those sequences. Runs in the worker; compiling runs on a thread of `workers.sampling.grammar`, so
that nobody's step waits for a stranger's grammar.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future

from ds4.errors import ErrorCode
from ds4.generation import MAX_GRAMMAR_BYTES, NO_LOGPROBS
from ds4.grammar_library import GrammarError
from workers.admission import RefusedError
from workers.sampling.grammar import GrammarConstraint, Grammars
from workers.sequence import Sequence


class CompilingQueue:
    """Owned by the engine. `wake` is called from another thread when a grammar is ready.

    `fast_forwards`: tokens that a grammar forces may be taken without a draw. Not with a device that runs a
    step ahead: it has queued the next draw before it is known what is forced.
    """

    def __init__(
        self, grammars: Grammars | None, wake: Callable[[], None], *, fast_forwards: bool = False
    ) -> None:
        self._grammars = grammars
        self._fast_forwards = fast_forwards
        self._wake = wake
        self._futures: dict[int, tuple[Sequence, Future[GrammarConstraint]]] = {}  # by slot

    def __len__(self) -> int:
        return len(self._futures)

    def begin(self, sequence: Sequence) -> None:
        """Start to compile the grammar of a new sequence. Raises RefusedError."""
        grammar = sequence.request.grammar
        if self._grammars is None:
            raise RefusedError("this worker cannot read the model's vocabulary, so it knows no grammars")
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise RefusedError(f"the grammar is larger than {MAX_GRAMMAR_BYTES} bytes")
        if not self._grammars.end_ids & sequence.end_ids:
            raise RefusedError("a request with a grammar needs an end token of the model as a stop token")
        output = sequence.tokens[sequence.num_origin :].tolist()
        # Without a draw there is no log-probability. Endings are the engine's: those are always drawn.
        may_skip = self._fast_forwards and sequence.request.sampling.num_logprobs == NO_LOGPROBS
        held_ids = self._grammars.end_ids | sequence.end_ids if may_skip else None
        future = self._grammars.start(grammar, output, self._wake, held_ids)
        self._futures[sequence.slot] = sequence, future

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended meanwhile; False where it is not here."""
        found = self._futures.pop(sequence.slot, None)
        if found is not None:
            found[1].cancel()
        return found is not None

    def ready(self) -> Iterator[tuple[Sequence, str]]:
        """Those that have their constraint now, or the reason why they never will. They leave."""
        done = [slot for slot, (_, future) in self._futures.items() if future.done()]
        for slot in done:
            sequence, future = self._futures.pop(slot)
            try:
                sequence.constraint = future.result()
            except GrammarError as error:
                yield sequence, str(error)
            else:
                yield sequence, ""


def failure_of(sequence: Sequence) -> tuple[ErrorCode, str]:
    """Why a row of this sequence has no token: its grammar, or the model."""
    if sequence.constraint is not None and sequence.constraint.failure:
        return ErrorCode.GRAMMAR, f"the grammar cannot go on: {sequence.constraint.failure}"
    return ErrorCode.NUMERIC, "the model produced values that are not numbers"
