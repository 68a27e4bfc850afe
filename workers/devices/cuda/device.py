"""The CUDA device: steps as launches of our kernels, decode steps as graphs, one step ahead.

Owns: everything on the device, and the steps in flight. Runs in: the worker's thread; the GPU works while
the engine plans. Source: `launches` for the model, `sampling` for the draw, `graphs` for when a step is
replayed. It knows one backend, which is the GPU or, in tests, the emulator.

A step is: copies of its input, the forward pass (of decode rows a graph), the draw, a copy of the results, an event.
All are queued at once, but for steps with constrained rows: their draw needs masks that need the tokens of the step before, so
it is queued when those were read; the forward pass runs meanwhile.
"""

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from workers.devices.cuda import buffers, inputs, sampling, shapes, weights
from workers.devices.cuda.backend import Backend, Event
from workers.devices.cuda.dense import DENSE_ROWS
from workers.devices.cuda.graphs import Graphs, make_buckets
from workers.devices.cuda.inputs import Block, StepInputs
from workers.devices.cuda.launches import Launches
from workers.devices.cuda.sampling import DeviceSampler
from workers.devices.interface import DeviceFaultError, Limits, SeatParams, StepBatch, StepResult
from workers.kernels import catalogue
from workers.model.program import Program

log = logging.getLogger(__name__)

# Numbers of rows that between them use every kernel there is for some number of rows.
_KINDS_OF_ROWS: Final = (1, 2, 3, 5, 9, 17, 33)


class _Flight(msgspec.Struct):
    """A step that was submitted and not collected."""

    stage: int  # of pinned memory for the results
    seats: NDArray[np.int32]  # [samples]
    generations: NDArray[np.int64]  # [samples] which sequence on that seat
    block: Block
    constrained: list[int]  # seats
    reports: bool  # log-probabilities were asked for: a row's seat may be another's when it is read
    submitted_s: float
    event: Event | None = None  # None: its draw is held back
    failed: frozenset[int] = frozenset()  # seats whose constraint knows no next token


def memory_needs(program: Program, limits: Limits, *, batch_invariant: bool = False) -> tuple[int, int]:
    """Device memory in bytes: of the weights, and of all buffers for `limits`, KV pages aside."""
    step = (
        buffers.buffer_bytes(program, limits, batch_invariant=batch_invariant)
        + sampling.sampler_bytes(limits, program.dimensions.vocab_size)
        + inputs.input_bytes(limits)
    )
    return weights.weight_bytes(program), step


class CudaDevice:
    """Runs llama-family programs on a GPU. One owner, the worker's thread."""

    name = "cuda"
    pipeline_depth = 1

    def __init__(
        self,
        program: Program,
        limits: Limits,
        backend: Backend,
        *,
        batch_invariant: bool = False,
        dense_rows: int = DENSE_ROWS,
        keeps_copies: bool = False,
    ) -> None:
        """`dense_rows`: from how many on a prompt chunk goes through cuBLAS, where it may; `keeps_copies`: with copies
        of the weights that are made now, rather than each time.

        Raises ConfigError for a shape without kernels, MemoryError where memory runs out.
        """
        sizes = program.dimensions
        shapes.check_shape(sizes)
        self._backend = backend
        self._limits = limits
        self._inputs = StepInputs(
            backend,
            limits,
            chunk_rows=catalogue.chunk_rows(sizes.num_heads, sizes.num_kv_heads),
            has_decode_attention=shapes.has_decode_attention(sizes),
        )
        has_dense = not batch_invariant and limits.max_rows >= dense_rows and backend.can_multiply
        self._dense_rows = dense_rows if has_dense else limits.max_rows + 1
        self._sampler = DeviceSampler(backend, limits, sizes.vocab_size)
        self._launches = Launches(
            program,
            limits,
            backend,
            last_tokens=self._sampler.last_tokens,
            page_tables=self._inputs.page_tables,
            table_pitch=self._inputs.pitch,
            batch_invariant=batch_invariant,
            has_dense=has_dense,
            keeps_copies=keeps_copies,
        )
        self._graphs = Graphs(backend)
        self._buckets = make_buckets(limits.max_seats)
        self._generations = np.zeros(limits.max_seats, np.int64)  # sequences that each seat had
        self._flights: deque[_Flight] = deque()
        self._next_stage = 0
        self._collected_s = 0.0
        self._result = StepResult(limits.max_seats)
        self._fault: DeviceFaultError | None = None
        self._is_closed = False
        examples = [
            self._inputs.example(min(rows, limits.max_rows), min(rows, limits.max_seats))
            for rows in _KINDS_OF_ROWS
        ]
        if has_dense:
            examples.append(msgspec.structs.replace(examples[0], is_dense=True))
        backend.prepare([*self._launches.kernels(examples), *DeviceSampler.kernels()])
        backend.synchronise()  # the uploads are done: their faults belong to the load

    # -- the Device protocol -----------------------------------------------------------------------

    def seat(self, seat: int, params: SeatParams) -> None:
        """Give `seat` to a new sequence before its first row is submitted."""
        with self._faults("seating a sequence"):
            self._generations[seat] += 1
            self._inputs.forget(seat)
            self._sampler.seat(seat, params)

    def submit(self, batch: StepBatch) -> None:
        """Queue one step."""
        assert len(self._flights) <= self.pipeline_depth, "more steps than the device takes"
        with self._faults(f"a step of {batch.num_rows} rows"):
            self._submit(batch)

    def collect(self) -> StepResult:
        """Results of the oldest queued step."""
        assert self._flights, "nothing was submitted"
        with self._faults("a step"):
            return self._collect()

    def close(self) -> None:
        """Give the memory back."""
        if self._is_closed:
            return
        self._is_closed = True
        self._graphs.clear()
        self._flights.clear()
        self._backend.close()

    @property
    def num_graphs(self) -> int:
        """How many sizes of step are replayed by now."""
        return self._graphs.num_graphs

    def warm_up(self) -> None:
        """Run a decode step of nobody's rows of every size and capture it, so that no stream waits for that.

        Raises DeviceFaultError, MemoryError.
        """
        started_s = time.monotonic()
        nobody = StepBatch(self._limits)
        log.info("capturing decode steps", extra={"sizes": ",".join(map(str, self._buckets))})
        for rows in self._buckets:
            block, _ = self._inputs.stage(nobody, rows, rows)
            self._sampler.upload_seats()
            self._run_decode(block)
            self._sampler.launch(block, self._launches.logits, adjusts=True)
            self._backend.synchronise()  # the staging memory is free for the next size
        log.info(
            "decode steps are warm",
            extra={"graphs": self.num_graphs, "after_s": round(time.monotonic() - started_s, 2)},
        )

    def logits(self) -> NDArray[np.float32]:
        """Logits [num_samples, vocab_size] of the step that was collected last, before another: for tests."""
        assert not self._flights
        vocab = self._sampler.vocab_size
        host: NDArray[np.float32] = self._backend.pinned((self._result.num_samples, vocab), np.float32)
        self._backend.download(self._launches.logits, host)
        self._backend.synchronise()
        return host

    # -- faults ------------------------------------------------------------------------------------

    @contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        """The first fault is the last: a GPU that failed once is not asked again."""
        if self._fault is not None:
            raise self._fault
        try:
            yield
        except MemoryError as error:
            self._fault = DeviceFaultError(f"out of memory in {what}: {error}")
            raise self._fault from error
        except DeviceFaultError as error:
            self._fault = error
            raise

    # -- a step ------------------------------------------------------------------------------------

    def _submit(self, batch: StepBatch) -> None:
        samples = batch.num_samples
        seats = batch.sample_seats[:samples].copy()
        is_decode = batch.num_rows == batch.num_sequences == samples
        rows = self._buckets[bisect_left(self._buckets, samples)] if is_decode and samples else batch.num_rows
        block, updates = self._inputs.stage(batch, rows, rows if is_decode else samples)
        if batch.num_rows >= self._dense_rows and not is_decode:
            block = msgspec.structs.replace(block, is_dense=True)
        self._sampler.upload_seats()
        if updates is not None:
            self._launches.update_pages(updates.count, updates.entries)
        flight = _Flight(
            stage=self._next_stage,
            seats=seats,
            generations=self._generations[seats],
            block=block,
            constrained=self._sampler.constrained(seats),
            reports=self._sampler.reports(seats),
            submitted_s=time.perf_counter(),
        )
        self._next_stage = (self._next_stage + 1) % inputs.NUM_STAGES
        if is_decode and samples:
            self._run_decode(block)
        else:
            self._launches.run(block)
        if not flight.constrained:
            if samples:
                self._sampler.launch(block, self._launches.logits, adjusts=self._sampler.adjusts(seats))
            self._finish(flight)
        elif not self._flights:
            self._draw_constrained(flight)
        self._flights.append(flight)

    def _run_decode(self, block: Block) -> None:
        """Queue the forward pass of decode rows: the same launches for every step of this size."""
        self._graphs.run(block.num_rows, lambda: self._launches.run(block))

    def _finish(self, flight: _Flight) -> None:
        """Queue the way back of the results."""
        if len(flight.seats):
            self._sampler.download(flight.stage, len(flight.seats))
        flight.event = self._backend.record()

    def _draw_constrained(self, flight: _Flight) -> None:
        """Queue the draw of a step whose predecessor was read, once its masks are made."""
        self._sampler.upload_masks(flight.constrained)
        masks = self._sampler.host_masks
        flight.failed = frozenset(seat for seat in flight.constrained if masks.has_failed(seat))
        self._sampler.launch(flight.block, self._launches.logits, adjusts=True)
        self._finish(flight)

    def _collect(self) -> StepResult:
        flight, result = self._flights[0], self._result
        assert flight.event is not None
        self._backend.synchronise(flight.event)
        self._flights.popleft()
        self._sampler.read(flight.stage, len(flight.seats), result, reports=flight.reports)
        now = time.perf_counter()
        result.elapsed_s = now - max(flight.submitted_s, self._collected_s)
        self._collected_s = now
        if flight.constrained:
            self._accept(flight)
        if self._flights and self._flights[0].event is None:
            self._draw_constrained(self._flights[0])
        return result

    def _accept(self, flight: _Flight) -> None:
        """Let the constraints of the step's rows read their tokens, unless the seat is another's by now."""
        drawn = []
        of_seat = set(flight.constrained)
        for row, seat in enumerate(flight.seats.tolist()):
            if seat not in of_seat:
                continue
            if seat in flight.failed:
                self._result.ok[row] = False
            if self._result.ok[row] and self._generations[seat] == flight.generations[row]:
                drawn.append((seat, int(self._result.token_ids[row])))
        self._sampler.host_masks.accept(drawn)
