"""The whole step as one function that every thread runs: it walks the operation records.

Owns nothing. Runs in the worker process: this source while the machine code is made, its result on
every thread of the engine. A barrier follows each record that says so; within a record threads share
out rows, outputs or (rows, heads) without talking, and how they do never changes a result.
"""

from collections.abc import Callable, Sequence
from typing import Final

from workers.devices.cpu.control import (
    MAIL_CONDITION,
    MAIL_LOCK,
    MAIL_SLEEPING,
    MAIL_STEP,
    MAIL_STOP,
    MAILBOX_BYTES,
    RECORD_WORDS,
    Code,
    Control,
)
from workers.devices.cpu.draw import make_draw
from workers.devices.cpu.elementwise import Elementwise
from workers.devices.cpu.emit import Library, jit
from workers.devices.cpu.formats import WeightKind
from workers.devices.cpu.matmul import make_matmul
from workers.devices.cpu.memory import Memory
from workers.devices.cpu.operations import (
    Jitted,
    Kernels,
    make_attention_operation,
    make_embed_operation,
    make_gate_up_operation,
    make_matmul_operation,
    make_norm_operation,
    make_quantise_operation,
    make_rope_operation,
    make_summarise_operation,
)
from workers.devices.cpu.spec import StepSpec
from workers.devices.cpu.tiles import configure_kernel, release_kernel

_HELPER_SPINS: Final = 6000  # about 100 us of pauses between two steps before a helper sleeps


def _by_kind(functions: Sequence[tuple[int, Jitted]]) -> Jitted:
    """A function `(kind, arguments)` that calls the one for `kind`; the last needs no test."""
    kind, function = functions[0]
    number = int(kind)
    if len(functions) == 1:

        @jit
        def only(_kind: int, arguments: tuple[int, ...]) -> None:
            function(*arguments)

        return only
    others = _by_kind(functions[1:])

    @jit
    def choose(wanted: int, arguments: tuple[int, ...]) -> None:
        if wanted == number:
            function(*arguments)
        else:
            others(wanted, arguments)

    return choose


def make_entry(library: Library, spec: StepSpec) -> Callable[[int, int], None]:
    """`entry(control, thread)`: thread 0 runs one step, others serve as helpers until told to stop."""
    memory = Memory(library)
    rows = Elementwise(library, memory, spec.head_size)
    kinds = [WeightKind(kind) for kind in spec.kinds]
    kernels = Kernels(
        spec=spec,
        memory=memory,
        rows=rows,
        matmul=_by_kind([(kind, make_matmul(library, kind)) for kind in kinds]),
        embed=_by_kind([(kind, rows.make_embed(kind)) for kind in kinds if kind in spec.table_kinds]),
        draw=make_draw(library, memory, rows),
    )
    run_step = _make_step(library, kernels)
    load, atomic_load, atomic_store = memory.load_i64, memory.atomic_load, memory.atomic_store
    lock, unlock, wait, signal, relax = (
        memory.lock, memory.unlock, memory.wait, memory.signal, memory.relax,
    )  # fmt: skip
    threads_at, mailboxes_at = 8 * Control.NUM_THREADS, 8 * Control.MAILBOXES
    mailbox_bytes, helper_spins = MAILBOX_BYTES, _HELPER_SPINS
    at_step, at_sleeping, at_lock = MAIL_STEP, MAIL_SLEEPING, MAIL_LOCK
    at_condition, at_stop = MAIL_CONDITION, MAIL_STOP

    @jit
    def lead(control: int) -> None:
        """Hand the step to the helpers, take part, and return when all are done (the last barrier)."""
        num_threads = load(control + threads_at)
        mailboxes = load(control + mailboxes_at)
        for thread in range(1, num_threads):
            mail = mailboxes + thread * mailbox_bytes
            # Pairs with the helper's loads: sequentially consistent, so either the helper sees the step
            # before it sleeps or its sleeping flag is seen here.
            atomic_store(mail + at_step, atomic_load(mail + at_step) + 1)
            if atomic_load(mail + at_sleeping) != 0:
                lock(mail + at_lock)
                signal(mail + at_condition)
                unlock(mail + at_lock)
        run_step(control, 0, num_threads)

    @jit
    def help_lead(control: int, thread: int) -> None:
        mail = load(control + mailboxes_at) + thread * mailbox_bytes
        done = 0
        while True:
            spins = 0
            while atomic_load(mail + at_step) == done and atomic_load(mail + at_stop) == 0:
                relax()
                spins += 1
                if spins > helper_spins:
                    lock(mail + at_lock)
                    atomic_store(mail + at_sleeping, 1)
                    while atomic_load(mail + at_step) == done and atomic_load(mail + at_stop) == 0:
                        wait(mail + at_condition, mail + at_lock)
                    atomic_store(mail + at_sleeping, 0)
                    unlock(mail + at_lock)
            if atomic_load(mail + at_step) == done:
                return
            done += 1
            run_step(control, thread, load(control + threads_at))

    def entry(control: int, thread: int) -> None:
        if thread == 0:
            lead(control)
        else:
            help_lead(control, thread)

    return entry


def _make_step(library: Library, kernels: Kernels) -> Jitted:
    memory = kernels.memory
    load, barrier = memory.load_i64, memory.barrier
    embed, norm, matmul = (
        make_embed_operation(kernels), make_norm_operation(kernels), make_matmul_operation(kernels),
    )  # fmt: skip
    rope, quantise, gate_up = (
        make_rope_operation(kernels), make_quantise_operation(kernels), make_gate_up_operation(kernels),
    )  # fmt: skip
    attention, attention_of_samples = make_attention_operation(library, kernels)
    summarise = make_summarise_operation(kernels)
    operations_at, num_operations_at = 8 * Control.OPERATIONS, 8 * Control.NUM_OPERATIONS
    barrier_at, record_bytes = 8 * Control.BARRIER, 8 * RECORD_WORDS
    code_embed, code_norm, code_matmul = int(Code.EMBED), int(Code.NORM), int(Code.MATMUL)
    code_rope, code_attention = int(Code.ROPE), int(Code.ATTENTION)
    code_quantise, code_summarise = int(Code.QUANTISE), int(Code.SUMMARISE)
    rows_at, samples_at = 8 * Control.NUM_ROWS, 8 * Control.NUM_SAMPLES
    has_tiles = library.target.has_tiles
    configure, release = (
        (configure_kernel(library), release_kernel(library)) if has_tiles else (_nothing, _nothing)
    )

    @jit
    def find_last_layer(control: int, first: int, end: int) -> int:
        """The record from which on only sampled rows matter: the one after the last keys are kept.

        `end` where all rows are sampled, or where heads are not quantised on their own.
        """
        if load(control + samples_at) == load(control + rows_at):
            return end
        record = end
        while record > first and load(record - record_bytes) != code_rope:
            record -= record_bytes
        is_attention = record > first and record < end and load(record) == code_attention
        return record if is_attention and load(record + 32) != 0 else end

    @jit
    def run_step(control: int, thread: int, num_threads: int) -> None:
        record = load(control + operations_at)
        end = record + load(control + num_operations_at) * record_bytes
        last_layer = find_last_layer(control, record, end)
        configure()
        while record < end:
            code = load(record)
            narrow = record >= last_layer
            if code == code_matmul:
                matmul(control, record, thread, num_threads, narrow)
            elif code == code_norm:
                norm(control, record, thread, num_threads, narrow)
            elif code == code_rope:
                rope(control, record, thread, num_threads)
            elif code == code_attention:
                if narrow:
                    attention_of_samples(control, record, thread, num_threads)
                else:
                    attention(control, record, thread, num_threads)
            elif code == code_quantise:
                quantise(control, record, thread, num_threads)
            elif code == code_embed:
                embed(control, record, thread, num_threads)
            elif code == code_summarise:
                summarise(control, record, thread, num_threads)
            else:
                gate_up(control, record, thread, num_threads, narrow)
            if load(record + 8) != 0:
                barrier(control + barrier_at, num_threads)
            record += record_bytes
        release()

    return run_step


@jit
def _nothing() -> None:
    """Stands in for what a target does not need."""
