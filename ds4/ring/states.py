"""The states of a worker and of a slot, as they are shown to the other side.

Owns: the numbers. Runs in: worker and front ends. Source: ours.

What a slot *is* follows from cursors (free, claimed, submitted, active, done) and is stored nowhere;
`SlotState` is only what the worker reports for `/slots` and people.
"""

from enum import IntEnum

import msgspec


class WorkerState(IntEnum):
    """Writer: worker (header). Readers: front ends, which submit only while READY."""

    LOADING = 0
    READY = 1
    DRAINING = 2  # running requests finish, new ones are refused
    RETIRED = 3  # gone cleanly; attach to the next segment
    FAILED = 4  # gone after a fault; attach to the next segment


class SlotState(IntEnum):
    """What the worker does for a slot (display only)."""

    FREE = 0
    WAITING = 1
    PREFILL = 2
    DECODE = 3
    PAUSED = 4  # its reader is slow: no credit, or no room in its front end's ring


class SlotStatus(msgspec.Struct, frozen=True, gc=False):
    """One row of `/slots`; the four numbers may stem from neighbouring steps."""

    slot: int
    front_end: int
    state: SlotState
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
