"""Words in memory, atomics and waiting, for jitted code that works on addresses.

Owns nothing. Runs in the worker process while the engine's machine code is made.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from workers.devices.cpu.emit import (
    ADDRESS,
    DOUBLE,
    F32,
    F64,
    FLOAT,
    I8,
    I32,
    I64,
    Emitter,
    Library,
    Value,
    jit,
)

SPINS_BEFORE_YIELD = 1000  # 15 to 70 us of pauses: a barrier is normally over in less than one


class Memory:
    """Loads, stores, atomics and the barrier, emitted for one target. Immutable."""

    def __init__(self, library: Library) -> None:
        @library.inline(ADDRESS, returns=ADDRESS)
        def load_i64(e: Emitter, address: Value) -> Value:
            return e.load(address, I64, 8)

        @library.inline(ADDRESS, returns=ADDRESS)
        def load_i32(e: Emitter, address: Value) -> Value:
            return e.builder.sext(e.load(address, I32, 4), I64)

        @library.inline(ADDRESS, returns=ADDRESS)
        def load_u8(e: Emitter, address: Value) -> Value:
            return e.builder.zext(e.load(address, I8), I64)

        @library.inline(ADDRESS, returns=FLOAT)
        def load_f32(e: Emitter, address: Value) -> Value:
            return e.load(address, F32, 4)

        @library.inline(ADDRESS, FLOAT)
        def store_f32(e: Emitter, address: Value, value: Value) -> None:
            e.store(value, address, 4)

        @library.inline(ADDRESS, returns=DOUBLE)
        def load_f64(e: Emitter, address: Value) -> Value:
            return e.load(address, F64, 8)

        @library.inline(ADDRESS, DOUBLE)
        def store_f64(e: Emitter, address: Value, value: Value) -> None:
            e.store(value, address, 8)

        @library.inline(ADDRESS, ADDRESS)
        def store_i64(e: Emitter, address: Value, value: Value) -> None:
            e.store(value, address, 8)

        @library.inline(ADDRESS, returns=ADDRESS)
        def atomic_load(e: Emitter, address: Value) -> Value:
            return e.builder.load_atomic(e.builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)

        @library.inline(ADDRESS, ADDRESS)
        def atomic_store(e: Emitter, address: Value, value: Value) -> None:
            e.builder.store_atomic(value, e.builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)

        @library.inline(ADDRESS, ADDRESS, returns=ADDRESS)
        def atomic_add(e: Emitter, address: Value, value: Value) -> Value:
            """The value before."""
            pointer = e.builder.inttoptr(address, I64.as_pointer())
            return e.builder.atomic_rmw("add", pointer, value, "seq_cst")

        @library.kernel()
        def relax(e: Emitter) -> None:
            """Tell the core that this is a spin loop."""
            if library.target.triple.startswith("x86_64"):
                e.call("llvm.x86.sse2.pause", ir.VoidType())
            elif library.target.triple.startswith(("aarch64", "arm64")):
                e.call("llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))

        @library.inline()
        def yield_core(e: Emitter) -> None:
            e.call("sched_yield", I32)

        self.load_i64, self.load_i32, self.load_u8 = load_i64, load_i32, load_u8
        self.load_f32, self.store_f32 = load_f32, store_f32
        self.load_f64, self.store_f64, self.store_i64 = load_f64, store_f64, store_i64
        self.atomic_load, self.atomic_store, self.atomic_add = atomic_load, atomic_store, atomic_add
        self.relax, self.yield_core = relax, yield_core
        self.lock = _process_call(library, "pthread_mutex_lock", 1)
        self.unlock = _process_call(library, "pthread_mutex_unlock", 1)
        self.wait = _process_call(library, "pthread_cond_wait", 2)
        self.signal = _process_call(library, "pthread_cond_signal", 1)
        self.barrier = _make_barrier(self)


def _process_call(library: Library, name: str, num_pointers: int) -> Callable[..., Any]:
    """A C library function of pointers that returns an int, which is dropped."""

    @library.inline(*([ADDRESS] * num_pointers))
    def call(e: Emitter, *addresses: Value) -> None:
        pointer = I8.as_pointer()
        e.call(name, I32, *(e.builder.inttoptr(address, pointer) for address in addresses))

    return call


def _make_barrier(memory: Memory) -> Callable[..., Any]:
    atomic_load, atomic_store, atomic_add = memory.atomic_load, memory.atomic_store, memory.atomic_add
    relax, yield_core = memory.relax, memory.yield_core
    patience = SPINS_BEFORE_YIELD

    @jit
    def barrier(words: int, num_threads: int) -> None:
        """Wait until all threads are here. `words`: arrivals, then 64 bytes on the round.

        The last to arrive stores the round, which the load of the others acquires: everything
        written before the barrier by anyone is visible after it to everyone.
        """
        if num_threads == 1:
            return
        this_round = atomic_load(words + 64)
        if atomic_add(words, 1) == num_threads - 1:
            atomic_store(words, 0)
            atomic_store(words + 64, this_round + 1)
            return
        spins = 0
        while atomic_load(words + 64) == this_round:
            relax()
            spins += 1
            if spins > patience:
                yield_core()

    return barrier
