"""Every offset, word and record of the shared segment; nothing else knows one.

Owns: the protocol version, the shape of a ring and where its parts lie. Runs in: worker and front ends.
Source: ours; the one-writer rule and the layout are described in ARCHITECTURE.md.

    header page | front-end blocks | worker blocks | command rings | credits | status | texts |
    descriptors | event rings

Every 64-bit word has exactly one writer. Slots are partitioned: slot s belongs to front end
s // slots_per_front_end. Cursors count up for ever and are never reset while a segment lives.
Words and blocks that different processes write lie on lines of their own (128 bytes: two x86 lines
because of the adjacent-line prefetch, one line on large Arm cores).
"""

import struct
import zlib
from typing import Final

import msgspec

MAGIC: Final = 0x3130_474E_4952_3444  # "D4RING01", little-endian; stored last
VERSION: Final = 5
PAGE_BYTES: Final = 4096
LINE_BYTES: Final = 128
LINE_WORDS: Final = LINE_BYTES // 8

# Header, constant after publication. Writer: worker. Readers: all.
HEADER_MAGIC: Final = 0
HEADER_VERSION: Final = 1
HEADER_SIZE: Final = 2
HEADER_FRONT_ENDS: Final = 3
HEADER_SLOTS: Final = 4  # per front end
HEADER_DESCRIPTOR_BYTES: Final = 5
HEADER_EVENTS_PER_SLOT: Final = 6
HEADER_CHECKSUM: Final = 7
HEADER_EPOCH: Final = 8  # random: which incarnation of the worker made this segment
HEADER_INFO_LENGTH: Final = 9
HEADER_PID: Final = 10  # of the worker, as its supervisor knows it
HEADER_WORDS: Final = 11
INFO_OFFSET: Final = 1024
MAX_INFO_BYTES: Final = PAGE_BYTES - INFO_OFFSET

# Header, live words, each group on a line of its own. Writer: worker. Readers: front ends.
LIVE_SLEEP: Final = (
    2 * LINE_WORDS
)  # odd: the worker sleeps; pairs with the front end's command tail, head, credit
LIVE_BLOCKED: Final = 2 * LINE_WORDS + 1  # rows that wait for credit or ring room while it sleeps
LIVE_HEARTBEAT: Final = 3 * LINE_WORDS  # monotonic ns of the last sweep
LIVE_STATE: Final = 4 * LINE_WORDS  # states.WorkerState
LIVE_STEPS: Final = 5 * LINE_WORDS  # publish calls so far
LIVE_RUNNING: Final = 6 * LINE_WORDS  # sequences that hold a seat
LIVE_PULSE: Final = 7 * LINE_WORDS  # counts up while the process runs, also during a long step; 0: never

# Front-end block, one line each. Writer: that front end. Reader: worker (and /slots of the others).
FRONT_NONCE: Final = 0  # random, odd; 0: left cleanly. Pairs with WORKER_ECHO
FRONT_COMMAND_TAIL: Final = 1  # commands written; released after the command and descriptor
FRONT_EVENT_HEAD: Final = 2  # events copied out; released after the copy
FRONT_SLEEP: Final = 3  # odd: the front end sleeps; pairs with WORKER_EVENT_TAIL
FRONT_HEARTBEAT: Final = 4  # monotonic ns; only its changing matters
FRONT_SUBMITTED: Final = 5  # requests submitted, ever
FRONT_PREPARING: Final = 6  # requests being read, rendered or tokenized right now
FRONT_ALONE: Final = 7  # 1: of all suspects of crashes, only one of this front end runs here

# Worker block per front end, one line each. Writer: worker. Reader: that front end (and /slots of the others).
WORKER_ECHO: Final = 0  # the nonce whose front end may use its part; 0: nobody, or cut off
WORKER_COMMAND_HEAD: Final = 1  # commands taken; released after command and descriptor are copied
WORKER_EVENT_TAIL: Final = 2  # events written; released after the records
WORKER_ADMITTED: Final = 3  # requests that left the waiting state, ever

# Command: two words, (operation << 32 | slot), request id. Writer: the front end.
COMMAND_WORDS: Final = 2
SUBMIT: Final = 1
CANCEL: Final = 2
# Outstanding at most: a CANCEL that crossed its request's FINAL, then SUBMIT and CANCEL of the next one.
COMMANDS_PER_SLOT: Final = 4

# Descriptor of a slot. Writer: the owning front end, only while the slot is claimed and not submitted.
DESCRIPTOR_REQUEST_ID: Final = 0
DESCRIPTOR_PARAMS_BYTES: Final = 1
DESCRIPTOR_PROMPT_TOKENS: Final = 2
DESCRIPTOR_KIND: Final = 3
DESCRIPTOR_CHECKSUM: Final = 4
DESCRIPTOR_HEAD_BYTES: Final = 64
KIND_INLINE: Final = 0
KIND_FILE: Final = 1
MAX_PARAMS_BYTES: Final = 8 * 1024 * 1024
MAX_PROMPT_TOKENS: Final = 16 * 1024 * 1024

# Event record: four words, see events.py. Writer: worker.
EVENT_WORDS: Final = 4
EVENT_TOKEN: Final = 1
EVENT_FINAL: Final = 2
PAIRS_PER_RECORD: Final = EVENT_WORDS
MAX_TOP_PAIRS: Final = 20
MAX_RECORDS_PER_TOKEN: Final = 1 + -(-MAX_TOP_PAIRS // PAIRS_PER_RECORD)

# Status of a slot: four words. Writer: worker. Readers: anybody, for display only.
STATUS_WORDS: Final = 4
STATUS_STATE: Final = 0
STATUS_PROMPT: Final = 1
STATUS_CACHED: Final = 2
STATUS_GENERATED: Final = 3

# Error text of a slot's ending. Writer: worker, before the FINAL; reader: the owner, before it frees the slot.
TEXT_BYTES: Final = 1024

MAX_FRONT_ENDS: Final = 1024
MAX_SLOTS_PER_FRONT_END: Final = 4096
MIN_EVENTS: Final = 1024

# Request id: front end + 1, part of its nonce, a counter.
ID_FRONT_SHIFT: Final = 52
ID_NONCE_SHIFT: Final = 32
ID_NONCE_MASK: Final = 0xFFFFF
ID_COUNT_MASK: Final = 0xFFFFFFFF


def power_of_two(at_least: int) -> int:
    """The smallest power of two that is not below `at_least`."""
    return 1 << max(0, at_least - 1).bit_length()


class Offsets(msgspec.Struct, frozen=True):
    """Byte offset of each part, each on a page boundary; `end` is the size of the segment."""

    front_ends: int
    worker_blocks: int
    commands: int
    credits: int
    status: int
    texts: int
    descriptors: int
    events: int
    end: int


class RingShape(msgspec.Struct, frozen=True, kw_only=True):
    """How large a ring is. `events_per_slot` sizes the event rings in records."""

    num_front_ends: int = 16
    slots_per_front_end: int = 64
    descriptor_bytes: int = 4096
    events_per_slot: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.num_front_ends <= MAX_FRONT_ENDS:
            raise ValueError(f"a ring has 1 to {MAX_FRONT_ENDS} front ends, not {self.num_front_ends}")
        if not 1 <= self.slots_per_front_end <= MAX_SLOTS_PER_FRONT_END:
            raise ValueError(
                f"a front end has 1 to {MAX_SLOTS_PER_FRONT_END} slots, not {self.slots_per_front_end}"
            )
        if not 512 <= self.descriptor_bytes <= 1 << 20 or self.descriptor_bytes % 64:
            raise ValueError("descriptor_bytes must be a multiple of 64 from 512 to 1 MiB")
        # Room for two steps of the longest tokens and one ending per slot, or nothing could ever be written.
        if not 2 * MAX_RECORDS_PER_TOKEN + 2 <= self.events_per_slot <= 1024:
            raise ValueError(f"events_per_slot must be {2 * MAX_RECORDS_PER_TOKEN + 2} to 1024")

    @property
    def num_slots(self) -> int:
        """Slots of all front ends."""
        return self.num_front_ends * self.slots_per_front_end

    @property
    def command_capacity(self) -> int:
        """Entries in one command ring: more than can ever be outstanding."""
        return power_of_two(COMMANDS_PER_SLOT * self.slots_per_front_end)

    @property
    def event_capacity(self) -> int:
        """Records in one event ring."""
        return max(MIN_EVENTS, power_of_two(self.events_per_slot * self.slots_per_front_end))

    def offsets(self) -> Offsets:
        """Where each part lies."""
        sizes = (
            self.num_front_ends * LINE_BYTES,
            self.num_front_ends * LINE_BYTES,
            self.num_front_ends * self.command_capacity * COMMAND_WORDS * 8,
            self.num_slots * 8,
            self.num_slots * STATUS_WORDS * 8,
            self.num_slots * TEXT_BYTES,
            self.num_slots * self.descriptor_bytes,
            self.num_front_ends * self.event_capacity * EVENT_WORDS * 8,
        )
        at, found = PAGE_BYTES, []
        for size in sizes:
            found.append(at)
            at += -(-size // PAGE_BYTES) * PAGE_BYTES
        front_ends, worker_blocks, commands, credits, status, texts, descriptors, events = found
        return Offsets(front_ends, worker_blocks, commands, credits, status, texts, descriptors, events, at)

    def checksum(self) -> int:
        """CRC over everything both sides must agree on."""
        agreed = (
            VERSION,
            self.num_front_ends,
            self.slots_per_front_end,
            self.descriptor_bytes,
            self.events_per_slot,
            self.command_capacity,
            self.event_capacity,
            LINE_BYTES,
            TEXT_BYTES,
            *(getattr(self.offsets(), name) for name in Offsets.__struct_fields__),
        )
        return zlib.crc32(struct.pack(f"<{len(agreed)}Q", *agreed))
