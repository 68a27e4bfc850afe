"""The words that Python and the machine code share: the control block and the operation records.

Owns nothing: layout constants. Runs in the worker process. All words are int64; addresses are absolute.
The thread that runs steps writes the control block before it starts a step and no one writes it
during one, except the barrier's words and the helpers' mailboxes, which have cache lines of their own.
"""

from enum import IntEnum
from typing import Final


class Control(IntEnum):
    """Word offsets in the control block."""

    OPERATIONS = 0  # address of the records
    NUM_OPERATIONS = 1
    NUM_THREADS = 2  # that take part in this step
    # A step's numbers, then where its batch lies: `CpuDevice` writes each in one go.
    NUM_ROWS = 3
    NUM_SEQUENCES = 4
    NUM_SAMPLES = 5
    RECORD_STRIDE = 6  # bytes from block to block of activation records of this step's rows
    SAMPLE_RECORD_STRIDE = 7  # the same for the sampled rows
    POSITIONS = 8  # address, [rows] int32
    SEQUENCE_STARTS = 9
    PAGE_TABLES = 10
    PAGE_TABLE_STRIDE = 11  # bytes from one sequence's pages to the next
    SAMPLE_ROWS = 12
    TOKEN_IDS = 13
    HIDDEN = 14  # address, [rows] of HIDDEN_STRIDE bytes, float32
    HIDDEN_STRIDE = 15
    QKV = 16
    QKV_STRIDE = 17
    SCRATCH = 18  # address, SCRATCH_STRIDE bytes for each thread
    SCRATCH_STRIDE = 19
    ZEROS = 20  # address of 64 zeros
    MAILBOXES = 21  # address, MAILBOX_BYTES for each thread
    RUN_BYTES = 22  # from a run of pages to the next, all layers
    HEAD_BYTES = 23  # from one head's pages of a run to the next head's
    VALUES = 24  # from a layer's keys to its values, in bytes
    TILES = 25  # where the memory for tile products lies in a thread's scratch, in bytes
    BARRIER = 32  # 24 words: see memory.py
    COUNT = 56


MAILBOX_BYTES: Final = 320
MAIL_STEP: Final = 0  # steps handed to this helper so far; written by the leader
MAIL_SLEEPING: Final = 64  # the helper is about to wait or waits; written under the lock
MAIL_LOCK: Final = 128  # pthread_mutex_t
MAIL_CONDITION: Final = 192  # pthread_cond_t
MAIL_STOP: Final = 256  # the helper shall end

RECORD_WORDS: Final = 16  # an operation: code, barrier after it, then operands


class Code(IntEnum):
    """What a record does. Operands are listed from word 2 on."""

    EMBED = 0  # table, kind, blocks, scale
    NORM = 1  # weight, blocks, eps, records or 0, floats or 0, float stride, sampled rows only
    MATMUL = 2  # weights, kind, blocks, outputs, records, floats, float stride, out, stride, base, stride, step, sampled
    ROPE = 3  # cache, table, offset of keys in a row, of values
    ATTENTION = 4  # cache, scale, records or 0
    QUANTISE = 5  # source, stride, blocks, records
    GATE_UP = (
        6  # gate, kind, up or 0, kind, blocks, groups, records, floats, float stride, records, floats, stride
    )
    SUMMARISE = 7  # logits, stride, values a row, maxima, stride, draws (summary.DRAW a row)
