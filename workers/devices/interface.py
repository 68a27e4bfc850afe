"""The device seam: what a step is, and what every executor promises.

A device loads a `Program`, owns weights, KV storage and sampling state, and runs steps in the order
they were submitted. One thread (the worker's) calls it. Rules:

- `submit` queues a step and returns; `collect` waits for the oldest queued step. At most
  `pipeline_depth + 1` steps are queued; a device with depth 0 computes inside `submit`.
- A step allocates nothing that grows with the model or the batch: buffers are made by the
  constructor for `Limits`.
- A row's result does not depend on the other rows of its step, on how its prompt was cut into
  chunks, or on the number of threads.
- A failing row (NaN logits) is reported in `StepResult.ok` and harms nobody else. A device fault
  raises `DeviceFaultError` from `submit` or `collect`; the device is then unusable.

Seats: a sequence that is being computed holds one seat, 0 <= seat < max_seats, from its first row to
its end or preemption. Per-seat state (sampling parameters, last sampled token, penalty counts) lives
in the device under that index. `SeatParams` and `StepResult` are defined in
`workers/sampling/interface.py`, below the devices that use them.

Constraints (structured output): the mask of a seat's next token needs the token before it, so it is made
on the host while the device computes. Every device holds one `workers.sampling.masks.SeatMasks`:
`seat` hands it the new constraint (or none), `accept(seats, tokens)` starts the next masks in the
background as soon as the host knows a step's tokens, and `wait()` returns all masks, packed uint32
[max_seats, vocab / 32], when a step with constrained rows is about to sample. A device of depth 0 does
all of it inside `submit`, and passes on the ids that `accept` says are forced (`StepResult.forced`). To
one of depth 1, whose next step is queued by then, no constraint names any. It holds the sampling of a
step with constrained rows back until `collect` has read the step before: then it accepts those tokens,
waits for the masks, uploads the rows of its constrained seats and queues the sampling; the forward pass
of that step ran meanwhile. A step without constrained rows is sampled as ever. Constrained rows whose
constraint `has_failed` are not `ok`; the engine tells the client why.
"""

from typing import Final, Protocol

import msgspec
import numpy as np

from ds4.errors import Ds4Error
from workers.sampling.interface import SeatParams, StepResult

__all__ = [
    "PAGE_TOKENS",
    "PREVIOUS_SAMPLE",
    "Device",
    "DeviceFaultError",
    "Limits",
    "SeatParams",
    "StepBatch",
    "StepResult",
]

PAGE_TOKENS: Final = 16  # positions in one KV page, the same on every device
PREVIOUS_SAMPLE: Final = -1  # as a token id: the token this seat sampled in its latest step


class DeviceFaultError(Ds4Error):
    """The device failed; nothing it was computing is valid and it must be rebuilt."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a device sizes its buffers for."""

    max_rows: int  # token budget of a step, at least max_seats
    max_seats: int
    max_context_tokens: int  # of one sequence
    num_pages: int  # KV pages of PAGE_TOKENS positions, all layers

    @property
    def max_pages_per_sequence(self) -> int:
        """Columns of a page table."""
        return -(-self.max_context_tokens // PAGE_TOKENS)


class StepBatch:
    """One step's input: fixed arrays that the runner fills and the device only reads.

    The runner owns `pipeline_depth + 2` of them and reuses each only after its step was collected.
    Rows are ordered by sequence; a sequence's rows are contiguous with ascending positions, and a
    decode row is a sequence with one row. All arrays are int32, C-contiguous.
    """

    def __init__(self, limits: Limits) -> None:
        rows, seats = limits.max_rows, limits.max_seats
        self.num_rows = 0
        self.token_ids = np.zeros(rows, np.int32)  # [num_rows]; PREVIOUS_SAMPLE allowed
        self.positions = np.zeros(rows, np.int32)  # [num_rows]; 0-based in the sequence
        self.num_sequences = 0
        self.sequence_seats = np.zeros(seats, np.int32)  # [num_sequences]
        self.sequence_starts = np.zeros(seats + 1, np.int32)  # [num_sequences + 1] row offsets
        # [num_sequences, max_pages_per_sequence]; entries past the sequence's last page are undefined, the
        # others stay what they were while the sequence holds its seat
        self.page_tables = np.zeros((seats, limits.max_pages_per_sequence), np.int32)
        self.num_samples = 0
        self.sample_rows = np.zeros(
            seats, np.int32
        )  # [num_samples] ascending: rows whose next token is drawn
        # [num_samples] the seat whose parameters each is drawn with, none twice. Where a prompt is scored,
        # rows of one sequence are sampled on seats that no sequence has.
        self.sample_seats = np.zeros(seats, np.int32)


class Device(Protocol):
    """An executor of programs. Constructed loaded, by `workers.devices.registry`."""

    name: str
    pipeline_depth: int

    def seat(self, seat: int, params: SeatParams) -> None:
        """Give `seat` to a new sequence before its first row is submitted."""
        ...

    def submit(self, batch: StepBatch) -> None:
        """Queue one step. Raises DeviceFaultError."""
        ...

    def collect(self) -> StepResult:
        """Results of the oldest queued step, in submission order. Raises DeviceFaultError."""
        ...

    def close(self) -> None:
        """Stop threads and free memory. Idempotent."""
        ...
