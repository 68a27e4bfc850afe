"""A sequence: the worker's view of one session, as counters and a status.

Owns what is known about one request's tokens. Runs in the worker, pure Python. No phase flags: prefill
and decode follow from the counters, so they cannot disagree with them.

Counters, all in tokens or positions of the sequence:

    0 ≤ num_cached ≤ num_computed ≤ num_scheduled ≤ num_total ≤ max_total

    num_cached     positions whose keys and values came from the prefix cache at the latest seating
    num_computed   positions whose step was collected
    num_scheduled  positions handed to a step
    num_total      positions that have or will have a token: the known ids, and one for each step in
                   flight that samples this sequence
"""

from array import array
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from enum import IntEnum
from typing import Final, Protocol

from ds4.generation import FinishReason, GenerationEnd, GenerationRequest

NO_SEAT: Final = -1


class Status(IntEnum):
    """Where a sequence is."""

    WAITING = 1  # has no seat: new, or preempted
    RUNNING = 2  # has a seat and pages
    FINISHED = 3  # its end is decided; seat and pages leave with its last step in flight


_MOVES: Final = {
    Status.WAITING: (Status.RUNNING, Status.FINISHED),
    Status.RUNNING: (Status.WAITING, Status.FINISHED),
    Status.FINISHED: (),
}


# A token that is known before it can be sent, its log-probability, and the best alternatives.
Unsent = tuple[int, float, list[tuple[int, float]]]


class Constraint(Protocol):
    """The grammar that the output has to match; what is inside is the device's business."""

    @property
    def failure(self) -> str:
        """Why the sequence cannot go on; empty while it can."""
        ...


class Sequence:
    """One session in the worker. Owned by the engine; the scheduler moves its counters and pages."""

    __slots__ = (
        "arrival",
        "backlog",
        "constraint",
        "end",
        "end_ids",
        "first_row_s",
        "first_token_s",
        "front_end",
        "is_dropped",
        "max_total",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_origin",
        "num_preemptions",
        "num_prompt",
        "num_registered",
        "num_sampling",
        "num_scheduled",
        "num_scored",
        "num_to_score",
        "page_digests",
        "pages",
        "paused_s",
        "request",
        "request_id",
        "reused_tokens",
        "seat",
        "slot",
        "status",
        "submitted_s",
        "tokens",
    )

    def __init__(
        self,
        *,
        request_id: int,
        slot: int,
        front_end: int,
        arrival: int,
        request: GenerationRequest,
        prompt: "array[int]",
        max_context_tokens: int,
        submitted_s: float = 0.0,
    ) -> None:
        self.request_id: Final = request_id
        self.slot: Final = slot
        self.front_end: Final = front_end
        self.arrival: Final = arrival  # counts up; a later one has lower priority
        self.request: Final = request
        self.end_ids: Final = frozenset(request.stop_token_ids)
        self.tokens = prompt  # array('I'): prompt, then every output id read so far
        self.num_prompt: Final = len(prompt)
        self.num_origin: Final = len(prompt) - request.num_resumed_tokens  # the client's own prompt
        self.max_total: Final = (
            self.num_origin + 1  # of which the last is never drawn
            if request.scores_prompt
            else min(self.num_origin + request.max_tokens, max_context_tokens)
        )

        self.status = Status.WAITING
        self.end: GenerationEnd | None = None
        self.constraint: Constraint | None = None  # has read the output so far; set before it waits
        self.is_dropped = False  # its slot is gone: nobody is owed an ending
        self.seat = NO_SEAT
        self.pages: list[int] = []
        self.page_digests: list[bytes] = []  # of the full pages of `tokens`, as far as they were asked for
        self.num_registered = 0  # leading pages that were offered to the prefix cache
        self.num_cached = 0
        self.reused_tokens = 0  # num_cached of the first seating: what the client is told
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_sampling = 0  # steps in flight that sample this sequence
        self.num_in_flight = 0  # steps in flight with rows of it
        # Of a sequence that only has its prompt scored: the row of position p gives token p + 1 its score.
        self.num_to_score: Final = self.num_origin - 1 if request.scores_prompt else 0
        self.num_scored = 0  # leading positions whose scores were handed to a step, or to an earlier worker's
        self.backlog: deque[Unsent] = deque()
        self.num_preemptions = 0
        self.paused_s = 0.0  # since when its reader gives no credit; 0: it does
        self.submitted_s = submitted_s
        self.first_row_s = 0.0
        self.first_token_s = 0.0

    @property
    def num_total(self) -> int:
        """Positions that have or will have a token."""
        return len(self.tokens) + self.num_sampling

    @property
    def num_unscheduled(self) -> int:
        """Rows this sequence could still give to a step: 1 for a decoding one, more in prefill."""
        return len(self.tokens) + self.num_sampling - self.num_scheduled

    @property
    def num_output(self) -> int:
        """Output ids read so far, those of an earlier worker included."""
        return len(self.tokens) - self.num_origin

    @property
    def num_generated(self) -> int:
        """Output ids read from this worker's device."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """True while exactly the newest token is to be computed and output has begun or is in flight."""
        total = len(self.tokens) + self.num_sampling
        return total - self.num_scheduled == 1 and total > self.num_prompt

    @property
    def is_full(self) -> bool:
        """No further token may be sampled: the output limit or the context is reached."""
        return len(self.tokens) + self.num_sampling >= self.max_total

    @property
    def is_complete(self) -> bool:
        """Everything that was asked for is known: no further token, or no further score."""
        if self.request.scores_prompt:
            return self.num_scored == self.num_to_score
        return self.is_full

    def move(self, status: Status) -> None:
        """Change the status along a legal edge."""
        assert status in _MOVES[self.status], f"{self.status.name} to {status.name}"
        self.status = status

    def take_seat(self, seat: int, pages: list[int], num_cached: int) -> None:
        """Become RUNNING with `pages`, whose first `num_cached` positions are already computed."""
        self.move(Status.RUNNING)
        self.seat = seat
        self.pages = pages
        self.num_cached = self.num_computed = self.num_scheduled = num_cached

    def schedule(self, num_rows: int) -> bool:
        """Hand the next `num_rows` positions to a step; True where the step samples the next token."""
        self.num_scheduled += num_rows
        self.num_in_flight += 1
        samples = self.num_scheduled == len(self.tokens) + self.num_sampling
        if samples:
            self.num_sampling += 1
        return samples

    def collect(self, num_rows: int, sampled: bool) -> None:
        """A step with `num_rows` of our rows was collected; its token, if any, is appended by `accept`."""
        self.num_in_flight -= 1
        self.num_computed += num_rows
        if sampled:
            self.num_sampling -= 1

    def accept(self, token_id: int) -> GenerationEnd | None:
        """Take a sampled token; the ending it causes, if any.

        A STOP id is not appended and not delivered; LENGTH rides on the token that caused it.
        """
        if token_id in self.end_ids:
            return self.finish(FinishReason.STOP)
        self.tokens.append(token_id)
        if len(self.tokens) >= self.max_total:
            return self.finish(FinishReason.LENGTH)
        return None

    def extend(self, token_ids: Items[int]) -> Items[int]:
        """Take tokens that follow without a draw, as far as there is room; those that were taken.

        None of them is a stop id. No step in flight may sample this sequence.
        """
        assert self.num_sampling == 0
        taken = token_ids[: self.max_total - len(self.tokens)]
        self.tokens.extend(taken)
        return taken

    def finish(self, reason: FinishReason, error_code: int = 0, text: str = "") -> GenerationEnd:
        """Decide the one ending."""
        self.move(Status.FINISHED)
        queue_ms = round((self.first_row_s - self.submitted_s) * 1000) if self.first_row_s else 0
        self.end = GenerationEnd(reason, int(error_code), text, self.reused_tokens, queue_ms)
        return self.end

    def unseat(self) -> list[int]:
        """Give up seat and pages (preemption or end); the pages, for the cache. Nothing may be in flight."""
        assert self.num_in_flight == 0
        assert self.num_sampling == 0
        pages, self.pages = self.pages, []
        self.seat = NO_SEAT
        self.num_cached = self.num_computed = self.num_scheduled = 0
        self.num_registered = 0
        return pages


def token_array(ids: Iterable[int] | bytes) -> "array[int]":
    """Ids as the array a sequence keeps: u32, one machine word each less than a list would take."""
    out = array("I")
    assert out.itemsize == 4
    if isinstance(ids, bytes):
        out.frombytes(ids)
    else:
        out.extend(ids)
    return out
