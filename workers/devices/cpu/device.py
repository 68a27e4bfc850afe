"""The CPU device: runs a program's steps in machine code on every core.

Owns: weights, KV pages, threads, seats. Runs in the worker's thread, which leads each step inside
`submit`; helper threads exist only inside the machine code. Source: design of the thread pool and the
kernels in this package's modules. Importing this module needs llvmlite and numba installed.
"""

import time
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ds4.config import cache_dir
from workers.devices.cpu.control import Control
from workers.devices.cpu.formats import LOGITS_BLOCK, record_stride
from workers.devices.cpu.machine_code import load_machine_code
from workers.devices.cpu.packing import weight_bytes
from workers.devices.cpu.plan import Plan, unsupported
from workers.devices.cpu.pool import ThreadPool, physical_cores
from workers.devices.cpu.target import Target, host_target
from workers.devices.cpu.tuner import ThreadTuner
from workers.devices.interface import PREVIOUS_SAMPLE, Limits, SeatParams, StepBatch, StepResult
from workers.model.program import Program
from workers.sampling.sampler import HostSampler
from workers.sampling.summary import Summary

if find_spec("numba") is None:
    raise ImportError("the cpu device needs the package numba")


class CpuDevice:
    """Runs llama-family programs on 8-bit activations. One owner, the worker's thread; `submit` mutates it."""

    name = "cpu"
    # Its threads are the machine's: a step ahead, led by a thread of its own, only adds wake-ups. Measured
    # over HTTP on two cores, busy ones: 22 tokens/s against 27 with one stream, 129 against 130 with eight.
    # And depth 0 lets grammars take forced tokens without a step.
    pipeline_depth = 0
    kv_value_bytes = 2
    kv_scale_bytes = 4

    def __init__(
        self,
        program: Program,
        limits: Limits,
        threads: int = 0,
        *,
        target: Target | None = None,
        code_directory: Path | None = None,
    ) -> None:
        """`threads` 0: one for each physical core. `target`: this machine's, where not given.

        Raises ConfigError for a shape it cannot run, ImportError when Numba does not work.
        """
        target = target or host_target()
        num_threads = threads or physical_cores()
        self._limits = limits
        self._plan = Plan(program, limits, target, num_threads)
        directory = code_directory or cache_dir() / "cpu"
        self._code = load_machine_code(target, self._plan.spec, directory)
        self._pool = ThreadPool(self._code, num_threads)
        self._tuner = ThreadTuner(num_threads)
        self._plan.fill(self._pool.control)
        self._vocab_size = program.dimensions.vocab_size
        self._sampler = HostSampler(limits.max_seats, self._vocab_size)
        self._last_token = np.zeros(limits.max_seats, np.int32)
        self._token_ids = np.zeros(limits.max_rows, np.int32)
        self._pool.control[Control.TOKEN_IDS] = self._token_ids.ctypes.data
        # Where each batch's arrays lie: they never move, and NumPy takes microseconds to say it.
        self._addresses: WeakKeyDictionary[StepBatch, NDArray[np.int64]] = WeakKeyDictionary()
        self._results = StepResult(limits.max_seats)
        self._num_queued = 0

    @staticmethod
    def weight_bytes(program: Program) -> int:
        """Memory that the weights would take."""
        return weight_bytes(program)

    @staticmethod
    def unsupported(program: Program) -> str | None:
        """What of `program` this device cannot run; None where it runs all of it."""
        return unsupported(program)

    def seat(self, seat: int, params: SeatParams) -> None:
        """Give `seat` to a new sequence before its first row is submitted."""
        self._sampler.seat(seat, params)

    def submit(self, batch: StepBatch) -> None:
        """Compute one step and draw its tokens."""
        assert self._num_queued == 0
        started = time.perf_counter()
        self._resolve_tokens(batch)
        self._describe(batch)
        seats, positions = self._sampled(batch)
        draws = self._plan.draws[: len(seats)]
        self._sampler.describe(seats, positions, draws)
        self._pool.run(self._tuner.choose(batch.num_rows))
        self._tuner.record(batch.num_rows, time.perf_counter() - started)
        if not self._sampler.take(seats, draws, self._results):
            logits = self._plan.logits[: len(seats), : self._vocab_size]
            self._sampler.sample(logits, seats, positions, self._results, self._summary(len(seats)))
        self._last_token[seats] = self._results.token_ids[: len(seats)]
        self._results.elapsed_s = time.perf_counter() - started
        self._num_queued = 1

    def collect(self) -> StepResult:
        """The results of the step that was submitted."""
        assert self._num_queued == 1
        self._num_queued = 0
        return self._results

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._pool.close()

    def logits(self) -> NDArray[np.float32]:
        """Logits [num_samples, vocab_size] of the latest step, valid until the next; for tests."""
        return self._plan.logits[: self._results.num_samples, : self._vocab_size]

    def _summary(self, count: int) -> Summary:
        plan = self._plan
        blocks = plan.logits.reshape(len(plan.logits), -1, LOGITS_BLOCK)
        return Summary(blocks[:count], plan.maxima[:count], plan.draws[:count])

    @staticmethod
    def _sampled(batch: StepBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Seats and positions of the tokens that are to be drawn."""
        rows = batch.sample_rows[: batch.num_samples]
        return batch.sample_seats[: batch.num_samples], batch.positions[rows] + np.int32(1)

    def _resolve_tokens(self, batch: StepBatch) -> None:
        count = batch.num_rows
        tokens = self._token_ids[:count]
        tokens[:] = batch.token_ids[:count]
        unsigned = tokens.view(np.uint32)  # one look tells negative ones, too
        if unsigned.max(initial=0) >= self._vocab_size:
            drawn = np.flatnonzero(tokens == PREVIOUS_SAMPLE)
            starts = batch.sequence_starts[: batch.num_sequences]
            sequences = np.searchsorted(starts, drawn, side="right") - 1
            tokens[drawn] = self._last_token[batch.sequence_seats[sequences]]
            assert unsigned.max() < self._vocab_size

    def _describe(self, batch: StepBatch) -> None:
        control = self._pool.control
        control[Control.NUM_ROWS : Control.POSITIONS] = (
            batch.num_rows,
            batch.num_sequences,
            batch.num_samples,
            record_stride(batch.num_rows),
            record_stride(batch.num_samples),
        )
        addresses = self._addresses.get(batch)
        if addresses is None:
            addresses = self._addresses[batch] = np.array(
                [
                    batch.positions.ctypes.data,
                    batch.sequence_starts.ctypes.data,
                    batch.page_tables.ctypes.data,
                    batch.page_tables.strides[0],
                    batch.sample_rows.ctypes.data,
                ],
                np.int64,
            )
        control[Control.POSITIONS : Control.TOKEN_IDS] = addresses
