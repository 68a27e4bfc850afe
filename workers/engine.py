"""The engine: admit, schedule, run, publish, release. Nothing else loops.

Owns every sequence from its submission to its ending. Runs in the worker, on its only thread. Holds
only what every model and device needs. While anything can be computed it never waits for anything
but the device; with nothing to do it sleeps on the ring's bell.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.config import Settings
from ds4.errors import ErrorCode
from ds4.generation import FinishReason, GenerationEnd, ModelInfo
from ds4.logs import log_batch
from ds4.metrics import Metrics
from ds4.ring.control import ControlPage
from ds4.ring.states import SlotState, WorkerState
from ds4.ring.worker_end import Polled, WorkerRing
from workers.admission import Admission, CoalescingWindow, RefusedError
from workers.backlog import Backlog
from workers.compiling import CompilingQueue, failure_of
from workers.devices.interface import PAGE_TOKENS, Device, DeviceFaultError, Limits, StepResult
from workers.kvcache.prefix import PrefixCache
from workers.runner import Outcome, Runner
from workers.sampling.grammar import Grammars
from workers.scheduler.batch import Batch, Plan
from workers.scheduler.scheduler import Scheduler
from workers.sequence import Sequence, Status
from workers.tuning import Tuning

log = logging.getLogger(__name__)

_SLEEP_S: Final = 0.1  # bounds how late a signal or a dead front end is noticed
_PATIENCE_S: Final = 1.0  # how long a paused sequence keeps its seat while others wait
_STATUS_S: Final = 0.05  # how often /slots and the gauges are brought up to date

_SHUTTING_DOWN: Final = "the server is shutting down"


_Published = tuple[
    NDArray[np.int64],
    NDArray[np.int32],
    NDArray[np.float32] | None,
    dict[int, list[tuple[int, float]]] | None,
    dict[int, GenerationEnd] | None,
]


class _StepTokens:
    """What one step brought, row by row, as the ring takes it."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.finals: dict[int, GenerationEnd] = {}  # by slot: ends without a token
        self._token_ids: list[int] = []
        self._logprobs: dict[int, float] = {}  # by row, of those that asked
        self._top: dict[int, list[tuple[int, float]]] = {}
        self._ends: dict[int, GenerationEnd] = {}

    def add(
        self, sequence: Sequence, result: StepResult, index: int, token_id: int, end: GenerationEnd | None
    ) -> None:
        """One more row: sample `index` of the step, and the ending that rides on it."""
        row = len(self.slots)
        self.slots.append(sequence.slot)
        self._token_ids.append(token_id)
        if end is not None:
            self._ends[row] = end
        wanted = sequence.request.sampling.num_logprobs
        if wanted >= 0:
            self._logprobs[row] = float(result.logprobs[index])
        if wanted > 0:
            ids, values = result.top_ids[index, :wanted], result.top_logprobs[index, :wanted]
            self._top[row] = list(zip(ids.tolist(), values.tolist(), strict=True))

    def arrays(self) -> _Published:
        """The arguments of `WorkerRing.publish`."""
        logprobs = None
        if self._logprobs:
            logprobs = np.zeros(len(self.slots), np.float32)
            logprobs[list(self._logprobs)] = list(self._logprobs.values())
        return (
            np.array(self.slots, np.int64),
            np.array(self._token_ids, np.int32),
            logprobs,
            self._top or None,
            self._ends or None,
        )


class Engine:
    """The worker's one loop. Owned by `workers.main`; single thread."""

    def __init__(
        self,
        *,
        ring: WorkerRing,
        runner: Runner,
        scheduler: Scheduler,
        admission: Admission,
        window: CoalescingWindow,
        metrics: Metrics,
        tuning: Tuning,
        grammars: Grammars | None = None,
        drain_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ring = ring
        self._runner = runner
        self._scheduler = scheduler
        self._admission = admission
        self._window = window
        self._metrics = metrics
        self._compiling = CompilingQueue(grammars, ring.wake, fast_forwards=runner.pipeline_depth == 0)
        self._tuning = tuning
        self._drain_timeout_s = drain_timeout_s
        self._clock = clock
        self._by_slot: dict[int, Sequence] = {}  # from submission until the ending is decided
        self._paused_slots: set[int] = set()
        self._backlog = Backlog(ring)
        self._drain_requested = False
        self.handed_over = False  # left in the middle: a successor goes on with what ran
        self._drain_deadline_s: float | None = None
        self._status_due_s = 0.0
        self._was_busy = True

    def request_drain(self) -> None:
        """Finish what is here, refuse what comes, then return from `run`. Safe in a signal handler."""
        self._drain_requested = True

    def request_hand_over(self) -> None:
        """Return from `run` after the current step, ending nothing. Safe in a signal handler."""
        self.handed_over = True

    def run(self) -> None:
        """Until a requested drain is done, or a hand-over. Raises DeviceFaultError; nothing was ended then."""
        while not self.handed_over:
            if self._drain_requested and self._drained():
                return
            if not self.step():
                self._rest()

    def step(self) -> bool:
        """One turn; False when there was nothing to compute and the engine may sleep."""
        self._take(self._ring.poll())
        self._tuning.apply()
        if self._compiling:
            self._take_compiled()
        if not self._scheduler.running and not self._runner.num_in_flight and self._scheduler.waiting:
            wait_s = self._window.wait_s(
                num_waiting=len(self._scheduler.waiting), num_preparing=self._ring.num_preparing
            )
            if wait_s > 0.0:
                self._ring.sleep(wait_s)
                return True
        return self._compute()

    # --- from the ring

    def _take(self, polled: Polled) -> None:
        if polled.dropped:
            self._forget(polled.dropped)
        for submission in polled.submissions:
            try:
                if self._drain_deadline_s is not None:
                    raise RefusedError(_SHUTTING_DOWN, ErrorCode.SHUTTING_DOWN)
                sequence = self._admission.sequence(submission)
                if sequence.request.grammar:
                    self._compiling.begin(sequence)
            except RefusedError as error:
                log.info(
                    "request refused: %s",
                    error,
                    extra={"request_id": submission.request_id, "code": error.code.name},
                )
                refusal = GenerationEnd(FinishReason.ERROR, int(error.code), str(error))
                self._ring.finish({submission.slot: refusal})
                continue
            assert sequence.slot not in self._by_slot, "the ring gave out a slot that runs"
            self._by_slot[sequence.slot] = sequence
            if not sequence.request.grammar:
                self._scheduler.enqueue(sequence)
            if sequence.is_complete:  # resumed after its last token, or nothing may be generated
                self._end(sequence, sequence.finish(FinishReason.LENGTH))
        for slot in polled.cancelled:
            cancelled = self._by_slot.get(slot)
            if cancelled is not None:
                self._end(cancelled, cancelled.finish(FinishReason.CANCELLED))

    def _take_compiled(self) -> None:
        for sequence, failure in self._compiling.ready():
            self._scheduler.enqueue(sequence)
            if failure:
                self._end(sequence, sequence.finish(FinishReason.ERROR, ErrorCode.GRAMMAR, failure))

    def _forget(self, slots: list[int]) -> None:
        """The front end of these slots is gone: free everything, tell nobody."""
        for slot in slots:
            sequence = self._by_slot.pop(slot, None)
            if sequence is not None:
                sequence.finish(FinishReason.CANCELLED)
                self._leave(sequence)

    def _end(self, sequence: Sequence, end: GenerationEnd) -> None:
        """End a sequence at once, without a token."""
        del self._by_slot[sequence.slot]
        self._leave(sequence)
        self._ring.finish({sequence.slot: end})

    def _leave(self, sequence: Sequence) -> None:
        if not self._compiling.discard(sequence):
            self._scheduler.leave(sequence)

    # --- the step

    def _compute(self) -> bool:
        for sequence, end in self._backlog.send(self._by_slot):
            self._ended(sequence, end)
        self._look_at_paused()
        plan = self._scheduler.plan(self._paused_slots, may_preempt=self._runner.num_in_flight == 0)
        self._note(plan)
        if plan.batch is not None:
            self._window.close()
            self._was_busy = True
            self._submit(plan.batch)
        elif not self._runner.num_in_flight:
            return bool(plan.preempted or plan.too_large or plan.is_looking)
        if plan.batch is None or self._runner.must_collect:
            self._collect()
        if self._clock() >= self._status_due_s:
            self._show_status()
        return True

    def _look_at_paused(self) -> None:
        """Which slots may not get a token now: no credit, or no room in their front end's ring.

        The ring keeps room for the step in flight, so whatever is planned now can be published.
        """
        before = self._paused_slots
        slots = np.array(self._scheduler.candidate_slots(), np.int64)
        writable = self._ring.writable(slots) if len(slots) else np.ones(0, np.bool_)
        self._paused_slots = set() if writable.all() else set(slots[~writable].tolist())
        self._paused_slots |= self._backlog.owing
        if before or self._paused_slots:
            self._set_aside_slow()

    def _set_aside_slow(self) -> None:
        """Whose reader stays slow gives seat and pages to others that wait, and is recomputed later."""
        now = self._clock()
        for sequence in list(self._scheduler.running.values()):
            if sequence.slot not in self._paused_slots:
                sequence.paused_s = 0.0
            elif not sequence.paused_s:
                sequence.paused_s = now
            elif (
                now - sequence.paused_s >= _PATIENCE_S
                and self._scheduler.waiting
                and not sequence.num_in_flight
            ):
                sequence.paused_s = 0.0
                self._scheduler.set_aside(sequence)
                log.debug("set aside: its reader is slow", extra={"request_id": sequence.request_id})

    def _note(self, plan: Plan) -> None:
        """Tell ring, metrics and log what the plan did besides its batch."""
        for sequence in plan.too_large:
            end = sequence.finish(
                FinishReason.ERROR, ErrorCode.TOO_LARGE, "the KV cache is too small for this request"
            )
            self._end(sequence, end)
        if plan.preempted:
            self._metrics.add("ds4_num_preemptions_total", len(plan.preempted))
            for sequence in plan.preempted:
                log.debug(
                    "preempted: KV pages ran out",
                    extra={"request_id": sequence.request_id, "num_tokens": len(sequence.tokens)},
                )
        if plan.batch is None or not plan.batch.seated:
            return
        now = self._clock()
        fresh = [sequence for sequence in plan.batch.seated if not sequence.first_row_s]
        self._ring.admit([sequence.slot for sequence in fresh])
        for sequence in fresh:
            sequence.first_row_s = now
            self._metrics.observe("ds4_request_queue_time_seconds", now - sequence.submitted_s)
            self._metrics.add("ds4_prefix_cache_queries_total", sequence.num_prompt)
            self._metrics.add("ds4_prefix_cache_hits_total", sequence.num_cached)

    def _submit(self, batch: Batch) -> None:
        try:
            self._runner.submit(batch)
        except DeviceFaultError as error:
            self._note_fault(batch, error)
            raise

    def _collect(self) -> None:
        oldest = self._runner.oldest
        assert oldest is not None
        try:
            outcome = self._runner.collect()
        except DeviceFaultError as error:
            self._note_fault(oldest, error)
            raise
        tokens = self._results(outcome)
        if tokens.slots:
            self._ring.publish(*tokens.arrays())
        if tokens.finals:
            self._ring.finish(tokens.finals)
        self._scheduler.collected(outcome.batch, outcome.elapsed_s)
        self._note_step(outcome)

    def _results(self, outcome: Outcome) -> _StepTokens:
        """Append each sampled token to its sequence; decide endings; the rows to publish."""
        result, step = outcome.result, _StepTokens()
        token_ids = result.token_ids[: result.num_samples].tolist()
        passed = result.ok[: result.num_samples].tolist()
        index = -1
        end: GenerationEnd | None
        for span in outcome.batch.spans:
            sequence, samples = span.sequence, span.samples
            sequence.collect(span.num_rows, samples)
            if span.scoring_seats:
                index += span.num_rows
                if sequence.status is Status.RUNNING and not self._backlog.take_scores(
                    span, result, index - span.num_rows + 1
                ):
                    end = sequence.finish(FinishReason.ERROR, *failure_of(sequence))
                    step.finals[sequence.slot] = end
                    self._ended(sequence, end, is_sound=False)
                continue
            if not samples:
                continue
            index += 1
            if sequence.status is not Status.RUNNING:
                continue  # ended while this step was queued: its row is discarded
            is_sound = True  # its keys and values are what they should be
            if not passed[index]:
                code, text = failure_of(sequence)
                is_sound = code is not ErrorCode.NUMERIC
                end = sequence.finish(FinishReason.ERROR, code, text)
            else:
                end = sequence.accept(token_ids[index])
            if not sequence.first_token_s:
                sequence.first_token_s = self._clock()
            if end is None or end.reason is FinishReason.LENGTH:
                step.add(sequence, result, index, token_ids[index], end)
            else:
                step.finals[sequence.slot] = end
            if end is not None:
                self._ended(sequence, end, is_sound=is_sound)
            elif index in result.forced:
                self._backlog.take_forced(sequence, result.forced[index])
        return step

    def _ended(self, sequence: Sequence, end: GenerationEnd, *, is_sound: bool = True) -> None:
        """A sequence ended with a step."""
        del self._by_slot[sequence.slot]
        self._scheduler.leave(sequence, is_sound=is_sound)
        self._note_end(sequence, end)

    # --- the end

    def _drained(self) -> bool:
        """Begin or continue the drain; True when nobody is left."""
        now = self._clock()
        if self._drain_deadline_s is None:
            self._take(self._ring.poll())  # what was submitted before counts as waiting
            self._ring.set_state(WorkerState.DRAINING)
            self._drain_deadline_s = now + self._drain_timeout_s
            log.info("draining", extra={"num_requests": len(self._by_slot)})
        if now >= self._drain_deadline_s:
            log.warning("drain deadline passed", extra={"num_requests": len(self._by_slot)})
            for sequence in list(self._by_slot.values()):
                self._end(
                    sequence,
                    sequence.finish(FinishReason.ERROR, ErrorCode.SHUTTING_DOWN, _SHUTTING_DOWN),
                )
        if self._by_slot:
            return False
        while self._runner.num_in_flight:
            self._collect()
        return True

    def _rest(self) -> None:
        """Nothing can be computed: check the books once, then sleep until something happens."""
        if self._was_busy:
            self._was_busy = False
            if self._scheduler.is_idle:
                self._scheduler.check()
            self._show_status()
        self._ring.sleep(_SLEEP_S)

    # --- what others see

    def _show_status(self) -> None:
        self._status_due_s = self._clock() + _STATUS_S
        sequences = list(self._by_slot.values())
        if sequences:
            self._ring.set_status(
                np.array([sequence.slot for sequence in sequences], np.int64),
                np.array([sequence.num_prompt for sequence in sequences], np.int64),
                np.array([sequence.reused_tokens for sequence in sequences], np.int64),
                np.array([sequence.num_generated for sequence in sequences], np.int64),
                np.array([self._state(sequence) for sequence in sequences], np.int64),
            )
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        cache, metrics = self._scheduler.cache, self._metrics
        self._ring.set_num_running(running)
        metrics.set("ds4_num_requests_running", running)
        metrics.set("ds4_num_requests_waiting", waiting)
        metrics.set("ds4_kv_pages", cache.num_pages)
        metrics.set("ds4_kv_pages_used", cache.num_held)
        metrics.set("ds4_kv_pages_cached", cache.num_parked)
        metrics.set("ds4_kv_cache_usage_perc", cache.num_held / cache.num_pages)

    def _state(self, sequence: Sequence) -> SlotState:
        if sequence.status is Status.WAITING:
            return SlotState.WAITING
        if sequence.slot in self._paused_slots:
            return SlotState.PAUSED
        return SlotState.DECODE if sequence.num_generated else SlotState.PREFILL

    def _note_step(self, outcome: Outcome) -> None:
        batch, metrics = outcome.batch, self._metrics
        metrics.observe("ds4_step_time_seconds", outcome.elapsed_s)
        metrics.observe("ds4_iteration_tokens_total", batch.num_rows)
        if batch.num_rows > batch.num_decode:
            metrics.add("ds4_prefill_tokens_total", batch.num_rows - batch.num_decode)
        if batch.num_decode:
            metrics.observe("ds4_batch_size", batch.num_decode)
            if self._tuning.batch_log:
                log_batch(batch.num_decode, outcome.elapsed_s)

    def _note_fault(self, batch: Batch, error: DeviceFaultError) -> None:
        self._metrics.add("ds4_step_errors_total")
        log.error("the device failed: %s", error)
        if batch.num_decode and self._tuning.batch_log:
            log_batch(batch.num_decode, 0.0, failure=" ".join(str(error).split()))

    def _note_end(self, sequence: Sequence, end: GenerationEnd) -> None:
        now = self._clock()
        prefilled_s = sequence.first_token_s or now  # none: its prompt was only scored
        self._metrics.observe("ds4_request_prefill_time_seconds", prefilled_s - sequence.first_row_s)
        self._metrics.observe("ds4_request_decode_time_seconds", now - prefilled_s)
        if end.error_code == ErrorCode.GRAMMAR:  # its text quotes the client
            log.info("the request's grammar cannot go on", extra={"request_id": sequence.request_id})
        elif end.reason is FinishReason.ERROR:
            log.error("request failed: %s", end.error_text, extra={"request_id": sequence.request_id})


def build_engine(
    settings: Settings,
    *,
    ring: WorkerRing,
    metrics: Metrics,
    device: Device,
    limits: Limits,
    info: ModelInfo,
    grammars: Grammars | None = None,
    control: ControlPage | None = None,
) -> Engine:
    """The engine and its parts, wired for these settings."""
    max_seats = min(limits.max_seats, max(1, settings.batched_sessions))
    scheduler = Scheduler(
        PrefixCache(limits.num_pages, PAGE_TOKENS),
        max_seats=max_seats,
        max_rows=min(limits.max_rows, max(settings.max_batch_tokens, max_seats)),
        in_turn=settings.batched_sessions > 0,  # batching off: one session at a time, first in, first out
    )
    window = CoalescingWindow(
        window_us=settings.decode_coalesce_us, max_seats=max_seats, clock=time.monotonic
    )
    return Engine(
        ring=ring,
        runner=Runner(device, limits),
        scheduler=scheduler,
        admission=Admission(
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            max_prompt_tokens=limits.num_pages * PAGE_TOKENS,
            clock=time.monotonic,
        ),
        window=window,
        metrics=metrics,
        grammars=grammars,
        tuning=Tuning(control, settings, scheduler, window),
        drain_timeout_s=settings.drain_timeout_s,
    )
