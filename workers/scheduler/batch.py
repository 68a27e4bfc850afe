"""The frozen plan of one step: the only thing the scheduler tells the runner.

Owned by nobody. Runs in the worker, pure Python.
"""

import msgspec

from workers.sequence import Sequence


class Span(msgspec.Struct, frozen=True, gc=False):
    """Consecutive rows of one sequence: positions `start` to `start + num_rows`, exclusive."""

    sequence: Sequence
    start: int
    num_rows: int
    samples: bool  # the last row's logits give the next token
    scoring_seats: tuple[int, ...] = ()  # one for each row, where every row's logits give a score


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one step computes: decode rows first, then prompt chunks."""

    spans: tuple[Span, ...]
    num_rows: int
    num_decode: int  # how many leading spans are decode rows
    seated: tuple[Sequence, ...] = ()  # got their seat with this step


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler decided. Without `batch` nothing can be computed now, or not before
    what is in flight was collected.
    """

    batch: Batch | None = None
    preempted: tuple[Sequence, ...] = ()
    too_large: tuple[Sequence, ...] = ()  # need more pages than exist, even alone; the caller ends them
    is_looking: bool = False  # a long prompt was looked up in part: plan again, even without a batch
