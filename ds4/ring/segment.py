"""The mapped segment: made by rename, attached only after checks, views of its parts.

Owns: one mapping. Runs in: worker (makes it), front ends and `ds4-server ring` (attach). Source: ours.

A segment is replaced, never repaired: a new worker builds a new file and renames it into place. Who
still maps the old one can write into it without harm.
"""

import errno
import mmap
import os
import secrets
import stat
import struct
import sys
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.errors import ConfigError, RingError, RingVersionError
from ds4.ring import layout
from ds4.ring.directory import SEGMENT_NAME, UNFINISHED_PREFIX
from ds4.ring.fence import Fence
from ds4.ring.layout import RingShape
from ds4.ring.states import SlotState, SlotStatus, WorkerState

Words = NDArray[np.uint64]
_HEADER: Final = struct.Struct(f"<{layout.HEADER_WORDS}Q")


class Segment:
    """A mapping and its views. Owned by the process that made it; the views keep it alive.

    words: scalar 64-bit access to everything (memoryview: one load or store each).
    front_ends, worker_blocks: [num_front_ends, LINE_WORDS] uint64.
    commands: [num_front_ends, command_capacity, 2] uint64.
    credits: [num_slots] uint64; writer: owning front end; tokens the worker may have sent so far.
    status: [num_slots, 4] uint64; writer: worker.
    events: [num_front_ends * event_capacity, 4] uint64; writer: worker.
    """

    def __init__(self, descriptor: int, shape: RingShape, *, writable: bool = True) -> None:
        self.shape = shape
        self.offsets = offsets = shape.offsets()
        self.inode = os.fstat(descriptor).st_ino
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.map = mmap.mmap(descriptor, offsets.end, access=access)
        self.words = memoryview(self.map).cast("Q")
        everything = np.frombuffer(self.map, dtype=np.uint64)

        def part(offset: int, *dimensions: int) -> Words:
            start = offset // 8
            count = int(np.prod(dimensions))
            return everything[start : start + count].reshape(dimensions)

        front_ends = shape.num_front_ends
        self.front_ends = part(offsets.front_ends, front_ends, layout.LINE_WORDS)
        self.worker_blocks = part(offsets.worker_blocks, front_ends, layout.LINE_WORDS)
        self.commands = part(offsets.commands, front_ends, shape.command_capacity, layout.COMMAND_WORDS)
        self.credits = part(offsets.credits, shape.num_slots)
        self.status = part(offsets.status, shape.num_slots, layout.STATUS_WORDS)
        self.events = part(offsets.events, front_ends * shape.event_capacity, layout.EVENT_WORDS)

    @property
    def epoch(self) -> int:
        """Which incarnation of the worker made this segment."""
        return self.words[layout.HEADER_EPOCH]

    @property
    def worker_pid(self) -> int:
        """The worker's process id, where it lives."""
        return self.words[layout.HEADER_PID]

    @property
    def model_info(self) -> bytes:
        """The worker's description of its model; constant."""
        length = min(self.words[layout.HEADER_INFO_LENGTH], layout.MAX_INFO_BYTES)
        return self.map[layout.INFO_OFFSET : layout.INFO_OFFSET + length]

    @property
    def state(self) -> WorkerState:
        """What the worker says it is."""
        try:
            return WorkerState(self.words[layout.LIVE_STATE])
        except ValueError:
            return WorkerState.RETIRED

    def front_end_words(self, index: int) -> "memoryview[int]":
        """Scalar access to the block that front end `index` writes."""
        start = self.offsets.front_ends // 8 + index * layout.LINE_WORDS
        return self.words[start : start + layout.LINE_WORDS]

    def worker_words(self, index: int) -> "memoryview[int]":
        """Scalar access to the block that the worker writes for front end `index`."""
        start = self.offsets.worker_blocks // 8 + index * layout.LINE_WORDS
        return self.words[start : start + layout.LINE_WORDS]

    def write_text(self, slot: int, text: str) -> int:
        """Store a slot's error text, cut to TEXT_BYTES at a character; returns its bytes. Worker only.

        Published by the FINAL event that carries the length; the slot's owner reads it before it
        frees the slot, so nothing can overwrite it early.
        """
        raw = text.encode("utf-8", "replace")[: layout.TEXT_BYTES].decode("utf-8", "ignore").encode()
        start = self.offsets.texts + slot * layout.TEXT_BYTES
        self.map[start : start + len(raw)] = raw
        return len(raw)

    def read_text(self, slot: int, num_bytes: int) -> str:
        """Inverse of `write_text`. The slot's owner only, after its FINAL."""
        start = self.offsets.texts + slot * layout.TEXT_BYTES
        return self.map[start : start + min(num_bytes, layout.TEXT_BYTES)].decode("utf-8", "replace")

    def num_pending(self, fence: Fence) -> int:
        """Requests submitted and not admitted, over all attached front ends, for any reader.

        Admitted counts and echoes are read first, then submitted counts: never below zero, exact
        when quiet. Pairs with the stores of FRONT_SUBMITTED and WORKER_ADMITTED.
        """
        blocks = self.worker_blocks.copy()
        fence.call()
        submitted = self.front_ends[:, layout.FRONT_SUBMITTED]
        waiting = (submitted - blocks[:, layout.WORKER_ADMITTED]).view(np.int64)
        attached = blocks[:, layout.WORKER_ECHO] != 0
        return int(np.clip(waiting, 0, self.shape.slots_per_front_end)[attached].sum())

    def slot_statuses(self) -> list[SlotStatus]:
        """Every slot as the worker last reported it."""
        per_front_end = self.shape.slots_per_front_end
        known = set(SlotState)
        return [
            SlotStatus(
                slot,
                slot // per_front_end,
                SlotState(state) if state in known else SlotState.FREE,
                prompt,
                cached,
                generated,
            )
            for slot, (state, prompt, cached, generated) in enumerate(self.status.tolist())
        ]


def create_segment(directory: Path, shape: RingShape, model_info: bytes, fence: Fence) -> Segment:
    """Build a segment and publish it by rename. Only for the holder of the worker's lease.

    Raises ConfigError when the shared directory is too small, RingError when the model info is.
    """
    if sys.byteorder != "little":
        raise RingError("the ring needs a little-endian machine")
    if len(model_info) > layout.MAX_INFO_BYTES:
        raise RingError(f"model info has {len(model_info)} bytes, the ring holds {layout.MAX_INFO_BYTES}")
    size = shape.offsets().end
    unfinished = directory / f"{UNFINISHED_PREFIX}{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(unfinished, flags, 0o600)
    try:
        # Reserve all of it now: touching a hole of a full tmpfs later would be SIGBUS.
        os.posix_fallocate(descriptor, 0, size)
        segment = Segment(descriptor, shape)
        words = segment.words
        words[layout.HEADER_VERSION] = layout.VERSION
        words[layout.HEADER_SIZE] = size
        words[layout.HEADER_FRONT_ENDS] = shape.num_front_ends
        words[layout.HEADER_SLOTS] = shape.slots_per_front_end
        words[layout.HEADER_DESCRIPTOR_BYTES] = shape.descriptor_bytes
        words[layout.HEADER_EVENTS_PER_SLOT] = shape.events_per_slot
        words[layout.HEADER_CHECKSUM] = shape.checksum()
        words[layout.HEADER_EPOCH] = secrets.randbits(63) | 1
        words[layout.HEADER_INFO_LENGTH] = len(model_info)
        words[layout.HEADER_PID] = os.getpid()
        segment.map[layout.INFO_OFFSET : layout.INFO_OFFSET + len(model_info)] = model_info
        fence.call()  # all of it before the magic; pairs with the magic test in attach_segment
        words[layout.HEADER_MAGIC] = layout.MAGIC
        unfinished.rename(directory / SEGMENT_NAME)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"the shared directory {directory} has no room for the ring ({size / 2**20:.0f} MiB); "
                "enlarge its tmpfs or lower --max-front-ends or --slots-per-front-end",
                setting="shared_dir",
            ) from None
        raise
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return segment


def attach_segment(directory: Path, *, writable: bool = True) -> Segment:
    """Map the published segment after checking it; initialises nothing.

    Raises FileNotFoundError when there is none, RingVersionError for another version, RingError for
    anything that is not a whole segment of ours.
    """
    path = directory / SEGMENT_NAME
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RingError(f"{path} is a symbolic link; remove it") from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RingError(f"{path} is not a file; remove it and restart the worker")
        if found.st_uid not in (os.geteuid(), 0):
            raise RingError(f"{path} belongs to user {found.st_uid}; run worker and front ends as one user")
        head = os.pread(descriptor, _HEADER.size, 0)
        if len(head) < _HEADER.size:
            raise RingError(f"{path} is too short for a ring; restart the worker")
        fields = _HEADER.unpack(head)
        if fields[layout.HEADER_MAGIC] != layout.MAGIC:
            raise RingError(f"{path} is not a ring; restart the worker")
        version = fields[layout.HEADER_VERSION]
        if version != layout.VERSION:
            raise RingVersionError(
                f"{path} has ring version {version}, this program speaks {layout.VERSION}; "
                "run worker and front ends of one release"
            )
        try:
            shape = RingShape(
                num_front_ends=fields[layout.HEADER_FRONT_ENDS],
                slots_per_front_end=fields[layout.HEADER_SLOTS],
                descriptor_bytes=fields[layout.HEADER_DESCRIPTOR_BYTES],
                events_per_slot=fields[layout.HEADER_EVENTS_PER_SLOT],
            )
        except ValueError as error:
            raise RingError(f"{path} is damaged ({error}); restart the worker") from None
        size = shape.offsets().end
        if (
            fields[layout.HEADER_CHECKSUM] != shape.checksum()
            or fields[layout.HEADER_SIZE] != size
            or found.st_size != size
        ):
            raise RingError(f"{path} is damaged (checksum or size); restart the worker")
        return Segment(descriptor, shape, writable=writable)
    finally:
        os.close(descriptor)
