"""A live ring, printed for a human: `ds4-server ring`.

Owns: nothing; maps the segment read-only and changes no byte. Runs in: its own process. Source: ours.
"""

import time
from pathlib import Path

import numpy as np

from ds4.errors import RingError
from ds4.ring import layout
from ds4.ring.fence import process_fence
from ds4.ring.liveness import FIRST_FRONT_END_BYTE, WORKER_BYTE, Leases
from ds4.ring.segment import Segment, attach_segment
from ds4.ring.states import SlotState


def dump(directory: Path) -> str:
    """The ring in `directory` as text. Raises RingError when there is none or it is damaged."""
    try:
        segment = attach_segment(directory, writable=False)
        leases = Leases(directory, create=False)
    except OSError as error:
        raise RingError(f"no ring in {directory} ({error.strerror}); is the worker running?") from None
    try:
        return "\n".join(
            [*_head(directory, segment, leases), *_front_ends(segment, leases), *_slots(segment)]
        )
    finally:
        leases.abandon()


def _head(directory: Path, segment: Segment, leases: Leases) -> list[str]:
    shape, words = segment.shape, segment.words
    alive = leases.is_held_by_other(WORKER_BYTE)
    age_s = (time.monotonic_ns() - words[layout.LIVE_HEARTBEAT]) / 1e9
    return [
        f"ring       {directory} version {layout.VERSION}, {segment.offsets.end / 2**20:.1f} MiB, epoch {segment.epoch:016x}",
        f"shape      {shape.num_front_ends} front ends x {shape.slots_per_front_end} slots",
        f"worker     {segment.state.name if alive else 'DEAD (last state ' + segment.state.name + ')'}, "
        f"heartbeat {age_s:.1f} s ago, {'asleep' if words[layout.LIVE_SLEEP] & 1 else 'awake'}, "
        f"{words[layout.LIVE_STEPS]} steps, {words[layout.LIVE_RUNNING]} running",
        f"pending    {segment.num_pending(process_fence())}",
    ]


def _front_ends(segment: Segment, leases: Leases) -> list[str]:
    lines = ["front end  state      submitted  admitted  commands  unread events  preparing"]
    for index in range(segment.shape.num_front_ends):
        mine, workers = segment.front_end_words(index), segment.worker_words(index)
        held = leases.is_held_by_other(FIRST_FRONT_END_BYTE + index)
        echo, nonce = workers[layout.WORKER_ECHO], mine[layout.FRONT_NONCE]
        if not held and not echo:
            continue
        state = "dead" if not held else "attached" if echo and echo == nonce else "waiting"
        lines.append(
            f"{index:9d}  {state:9s}  {mine[layout.FRONT_SUBMITTED]:9d}  {workers[layout.WORKER_ADMITTED]:8d}  "
            f"{mine[layout.FRONT_COMMAND_TAIL] - workers[layout.WORKER_COMMAND_HEAD]:8d}  "
            f"{workers[layout.WORKER_EVENT_TAIL] - mine[layout.FRONT_EVENT_HEAD]:13d}  "
            f"{mine[layout.FRONT_PREPARING]:9d}"
        )
    if len(lines) == 1:
        lines.append("        none")
    return lines


def _slots(segment: Segment) -> list[str]:
    busy = np.flatnonzero(segment.status[:, layout.STATUS_STATE])
    lines = [f"slots      {len(busy)} of {segment.shape.num_slots} in use"]
    if len(busy):
        lines.append("     slot  front end  state    prompt  cached  generated  credit")
    statuses = segment.slot_statuses()
    for slot in busy.tolist():
        status = statuses[slot]
        if status.state == SlotState.FREE:
            continue
        lines.append(
            f"{slot:9d}  {status.front_end:9d}  {status.state.name:7s}  {status.num_prompt_tokens:6d}  "
            f"{status.num_cached_tokens:6d}  {status.num_generated_tokens:9d}  {int(segment.credits[slot]):6d}"
        )
    return lines
