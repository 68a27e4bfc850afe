"""The asyncio bridge to the worker: submit, read tokens, cancel, go on after a worker restart.

Owns: this front end's `FrontEndRing`, and what each running generation needs to be repeated.
Runs in: front ends, on their event loop. Source: the ring's protocol (ds4/ring) and the rule that a
sequence is a function of (prompt, parameters, seed, position), which makes a resumed stream continue
with the same tokens.
"""

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.config import Settings
from ds4.crowd import Crowd
from ds4.errors import (
    ConfigError,
    ErrorCode,
    RingError,
    RingFullError,
    RingUnavailableError,
    WorkerError,
    WorkerLostError,
)
from ds4.generation import (
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    ModelInfo,
    TokenEvent,
    decode_model_info,
    encode_request,
    failure_of,
)
from ds4.metrics import Metrics
from ds4.ring.control import ControlPage
from ds4.ring.front_end import FrontEndRing, RingStream
from ds4.ring.states import WorkerState
from ds4.suspects import NONE_CAME, Quarantine, Record, Turn, Turns

_log = logging.getLogger(__name__)

_RETRY_S: Final = 0.05  # between attempts to hand a resumed request to a worker that is there but full
_COUNT_EVERY_S: Final = 0.1
WORKER_GAP_S: Final = 5.0  # between two workers, so long that most are not noticed by who comes then
_WORKER_LOST: Final = frozenset({ErrorCode.DEVICE, ErrorCode.SHUTTING_DOWN})  # the next worker may succeed
_QUARANTINED: Final = "the worker crashed each time it worked on this request, which is not tried again"


class EngineClient:
    """One per front-end process. All calls come from its event loop."""

    def __init__(self, settings: Settings, directory: Path, *, tokenizer_hash: str) -> None:
        self.ring = FrontEndRing(directory)
        self.draining = False
        self.max_generations = settings.slots_per_front_end
        self.resume_attempts = settings.resume_attempts  # of one generation
        self._settings = settings
        self._directory = directory
        self._tokenizer_hash = tokenizer_hash
        self._metrics: Metrics | None = None
        self._control: ControlPage | None = None
        self._info_raw: bytes | None = None
        self._info: ModelInfo | None = None
        self._running: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_resuming = 0
        self.num_preparing = 0
        self._crowd = Crowd()
        self._num_waiting = 0  # requests that wait for evaluation, as of the latest count
        self._count_again_s = 0.0
        self.quarantine = Quarantine(directory)
        self._turns = Turns(self.ring.take_turn, self.ring.drop_turn)

    async def start(self) -> None:
        """Take a front-end place. Does not wait for a worker. Raises RingFullError, RingError."""
        await self.ring.start()
        try:
            self._metrics = Metrics.open(self._directory, owner=self.ring.index)
            self._control = ControlPage(self._directory)
        except (RingError, ConfigError):
            await self.ring.close()
            raise

    async def close(self) -> None:
        """Give the place back; whatever still runs is cancelled."""
        for generation in list(self._running):
            generation.cancel()
        await self.ring.close()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    @property
    def metrics(self) -> Metrics:
        """The counters of this process. Only between `start` and `close`."""
        assert self._metrics is not None, "the engine client is not started"
        return self._metrics

    @property
    def model_info(self) -> ModelInfo | None:
        """What the attached worker serves; None without one."""
        raw = self.ring.model_info if self.ring.attached else None
        if raw is None:
            return None
        if raw != self._info_raw:
            self._info_raw, self._info = raw, decode_model_info(raw)
            if self._info.tokenizer_hash != self._tokenizer_hash:
                _log.error("the worker serves another model than this front end: restart one of them")
        return self._info

    @property
    def ready(self) -> bool:
        """True while new requests can be served."""
        return not self.draining and self.refusal is None

    @property
    def num_running(self) -> int:
        """Generations that have not ended yet."""
        return len(self._running)

    async def wait_idle(self) -> None:
        """Until nothing runs."""
        await self._idle.wait()

    def turn_away(self) -> int:
        """Somebody is refused for want of room: in how many seconds to come back."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._count_again_s:  # not for each of hundreds a second
            self._count_again_s = now_s + _COUNT_EVERY_S
            self._num_waiting = self.ring.num_pending() if self.ring.attached else 0
        return self._crowd.turn_away(now_s, self._num_waiting, len(self._running))

    def preparing(self, change: int) -> None:
        """Tell the worker that `change` more (or fewer) requests are on their way to it."""
        self.num_preparing += change
        self.ring.set_preparing(self.num_preparing)

    @property
    def _slot_limit(self) -> int:
        """How many requests may run: the ring's slots, or fewer by the control page."""
        most = self._settings.slots_per_front_end
        return most if self._control is None else self._control.get("slots_per_front_end", most)

    @property
    def refusal(self) -> str | None:
        """Why no worker would take a request now; None when one would."""
        info = self.model_info
        if info is None:
            return "no worker is attached yet"
        if info.tokenizer_hash != self._tokenizer_hash:
            return "the worker serves another model than this front end"
        if self.ring.worker_state is not WorkerState.READY:
            return "the worker is loading or draining"
        return None

    async def wait_worker(self) -> None:
        """Until a worker takes requests, but not for long: a successor comes soon, or it may be a while."""
        until_s = WORKER_GAP_S + (time.monotonic() if self.ring.attached else self.ring.lost_s)
        while not (self.ring.attached and self.ring.worker_state is WorkerState.READY):
            if self.draining or time.monotonic() >= until_s:
                return
            await asyncio.sleep(_RETRY_S)

    def generate(
        self,
        request: GenerationRequest,
        prompt: Sequence[int] | NDArray[np.uint32],
        request_id: str = "",
        cache_salt: bytes = b"",
    ) -> "Generation":
        """Hand a request to the worker; an array as `prompt` is not copied. `request_id` is for the log.

        Raises RingUnavailableError while nothing can be served, RingFullError without a free slot,
        WorkerError for what is known to kill the worker.
        """
        if self.draining:
            raise RingUnavailableError("the server is shutting down")
        if (refusal := self.refusal) is not None:
            raise RingUnavailableError(refusal)
        self.check_room()
        if cache_salt:
            request = msgspec.structs.replace(request, cache_salt=cache_salt)
        ids = np.asarray(prompt, dtype=np.uint32)
        if self.quarantine.holds(ids, request.grammar):
            raise WorkerError(_QUARANTINED, code=ErrorCode.QUARANTINED)
        generation = Generation(self, request, ids, self.submit(request, ids), request_id)
        self._running.add(generation)
        self._idle.clear()
        return generation

    def check_room(self) -> None:
        """Raises RingFullError where no slot is free for a new request."""
        if len(self._running) >= self._slot_limit:
            raise RingFullError("as many requests run as are allowed right now")
        # What waits for a new worker comes before what is new.
        if self.ring.attached and self.ring.num_free_slots <= self.num_resuming:
            raise RingFullError("every slot is taken by a running request")

    def submit(self, request: GenerationRequest, prompt: NDArray[np.uint32]) -> RingStream:
        """Put one request on the ring. For `Generation`."""
        return self.ring.submit(encode_request(request), prompt)

    @contextlib.asynccontextmanager
    async def _resuming(self, limit_s: float | None) -> AsyncIterator[None]:
        """One more that goes on as soon as it can. Raises WorkerError where it takes too long."""
        self.num_resuming += 1
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            raise WorkerError(str(error) or NONE_CAME, code=ErrorCode.DEVICE) from None
        finally:
            self.num_resuming -= 1

    async def resubmit(
        self, request: GenerationRequest, prompt: NDArray[np.uint32], turn: Turn | None
    ) -> RingStream:
        """Put a request on the ring as soon as a worker takes it; a suspect in its `turn`.

        Raises WorkerError after `resume_timeout_s`, RingUnavailableError when another model came.
        """
        async with self._resuming(self._settings.resume_timeout_s):
            while True:
                await self.ring.wait_attached()
                info = self.model_info
                if info is not None and info.tokenizer_hash != self._tokenizer_hash:
                    raise RingUnavailableError("the worker was replaced by one with another model")
                try:
                    if turn is not None:
                        self.ring.use_turn()
                    return self.submit(request, prompt)
                except (RingFullError, RingUnavailableError):
                    await asyncio.sleep(_RETRY_S)

    async def was_killed(self, worker_pid: int) -> bool:
        """Whether somebody killed that worker: known with the next one. Raises WorkerError where none comes."""
        async with self._resuming(self._settings.resume_timeout_s):
            await self.ring.wait_attached()
        return self._control is not None and self._control.killed_worker == worker_pid

    async def begin_turn(self) -> Turn:
        """Wait until a suspect may go on. Raises WorkerError when that takes too long."""
        async with self._resuming(None):
            return await self._turns.wait(lambda: self.ring.attached, self._settings.resume_timeout_s)

    def reopened(self, generation: "Generation") -> None:
        """A generation that had come to its end goes on. For `Generation`."""
        self._running.add(generation)
        self._idle.clear()

    def ended(self, generation: "Generation", duration_s: float | None = None) -> None:
        """A generation came to its end, after `duration_s` where it ran to it. For `Generation`."""
        if generation in self._running:
            self._running.discard(generation)
            if not self._running:
                self._idle.set()
            if duration_s is not None:
                self._crowd.served(duration_s)

    def abort_all(self, error: WorkerError) -> int:
        """End everything that runs with this error; returns how many there were."""
        running = list(self._running)
        for generation in running:
            generation.abort(error)
        return len(running)


class Generation:
    """One sequence that is being generated. Read by one task; may be cancelled from another.

    `num_generated` counts the tokens read so far.
    """

    def __init__(
        self,
        client: EngineClient,
        request: GenerationRequest,
        prompt: NDArray[np.uint32],
        stream: RingStream,
        request_id: str = "",
    ) -> None:
        self.request = request
        self._log_fields = {"request_id": request_id}
        self.num_prompt_tokens = len(prompt)
        self._client = client
        self._prompt = prompt
        self._stream = stream
        self._tokens = array("I")
        self._record = Record()
        self._crash: tuple[str, int] | None = None  # not judged yet: why, and the worker's process id
        self._turn: Turn | None = None  # in which it goes on alone among suspects
        self._is_resumed = False
        self._ended = False
        self._cancelled = False
        self._error: WorkerError | None = None
        self._resuming: asyncio.Task[RingStream] | None = None
        self._started_s = asyncio.get_running_loop().time()

    @property
    def num_generated(self) -> int:
        """Tokens that were read."""
        return len(self._tokens)

    async def read(self) -> tuple[list[TokenEvent], GenerationEnd | None]:
        """Everything new, at least one token or the end. Waits; survives the loss of a worker.

        Raises WorkerError when the generation failed, RingUnavailableError when it cannot go on.
        """
        try:
            while True:
                try:
                    tokens, end = await self._stream.read()
                except WorkerLostError as loss:
                    tokens, end = [], None
                    lost, worker_pid = str(loss), loss.worker_pid
                    is_cleared = loss.is_explained and self._record.is_proved(len(self._tokens))
                    crashed = loss.crashed and (self._has_turn or not is_cleared)
                else:
                    self._tokens.extend([token.token_id for token in tokens])
                    if end is None:
                        if self._has_turn and self._record.is_proved(len(self._tokens)):
                            self._leave_turn()
                        return tokens, None
                    lost = end.error_text if self._is_loss(end) else ""
                    crashed, worker_pid = end.error_code == ErrorCode.DEVICE, 0  # it did so itself
                if self._error is not None:
                    raise self._error
                if self._cancelled:
                    end = end or GenerationEnd(FinishReason.CANCELLED)
                elif lost or end is None:
                    if crashed:
                        self._crash = lost, worker_pid
                    await self._resume(lost)
                    if tokens:
                        return tokens, None
                    continue
                elif end.reason == FinishReason.ERROR:
                    raise failure_of(end, is_resumed=self._is_resumed)
                self._finish()
                return tokens, end
        except BaseException:
            self._stream.cancel()  # nobody reads on, so nobody would give it credit to end by itself
            self._finish()
            raise

    def _is_loss(self, end: GenerationEnd) -> bool:
        return (
            end.reason == FinishReason.ERROR and end.error_code in _WORKER_LOST and not self._client.draining
        )

    async def _resume(self, why: str) -> None:
        """Submit prompt and tokens so far again. Raises WorkerError when the budget is used up.

        A worker that left in order costs nothing of it.
        """
        count = len(self._tokens)
        if self._turn is not None:
            self._turn.pause()
        if self._crash is not None:
            self._record.crashed(count, asyncio.get_running_loop().time())
        _log.info("a request lost its worker %d tokens in: %s", count, why, extra=self._log_fields)
        self._is_resumed = True
        if await self._resubmit():
            self._client.metrics.add("ds4_resumed_streams_total")

    async def _judge(self, why: str, worker_pid: int) -> None:
        """What a crash means. Raises WorkerError when the budget is used up; remembers what did it alone."""
        is_last = self._record.num_crashes > self._client.resume_attempts
        is_alone = self._has_turn
        if worker_pid and (is_alone or not is_last) and await self._client.was_killed(worker_pid):
            self._record.acquit()
            is_alone = False
        if not is_last:
            self._leave_turn()  # the others come first: it may have been somebody new
            return
        if not is_alone:
            message = f"the worker was lost ({why}) and the request was resumed too often"
            raise WorkerError(message, code=ErrorCode.DEVICE)
        self._client.quarantine.add(self._prompt, self.request.grammar)
        self._client.metrics.add("ds4_requests_quarantined_total")
        _log.error("quarantined after %d crashes", self._record.num_crashes, extra=self._log_fields)
        raise WorkerError(_QUARANTINED, code=ErrorCode.QUARANTINED)

    @property
    def _has_turn(self) -> bool:
        return self._turn is not None and not self._turn.is_over

    def _leave_turn(self) -> None:
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    async def _submit_again(self, request: GenerationRequest, prompt: NDArray[np.uint32]) -> RingStream:
        """Onto the ring; a suspect only in its turn, which it keeps until it is proved or the worker crashes."""
        crash, self._crash = self._crash, None
        if crash is not None:
            await self._judge(*crash)
        if not self._record.is_suspect:
            return await self._client.resubmit(request, prompt, None)
        turn = (self._turn if self._has_turn else None) or await self._client.begin_turn()
        try:
            stream = await self._client.resubmit(request, prompt, turn)
        except BaseException:
            turn.end()
            raise
        self._turn = turn
        turn.resume()
        return stream

    async def _resubmit(self) -> bool:
        """Submit prompt and tokens so far. False where `cancel` or `abort` came first."""
        request = msgspec.structs.replace(self.request, num_resumed_tokens=len(self._tokens))
        prompt = np.concatenate((self._prompt, np.array(self._tokens, np.uint32)))
        resuming = self._resuming = asyncio.ensure_future(self._submit_again(request, prompt))
        try:
            await asyncio.wait((resuming,))
        finally:
            self._resuming = None
            # Also where the reader was cancelled at this very moment: what is on the ring must be known.
            if not resuming.cancel() and not resuming.cancelled() and resuming.exception() is None:
                self._stream = resuming.result()
        if not resuming.cancelled() and (failure := resuming.exception()) is not None:
            raise failure
        if self._cancelled or self._error is not None:
            self._stream.cancel()
            return False
        return True

    async def continue_with(self, num_kept: int, ids: Sequence[int]) -> GenerationEnd | None:
        """Take back all but the first `num_kept` tokens, put `ids` after them, and generate on from there.

        The ids count as output and are not read again. Returns the ending where somebody cancelled
        meanwhile. Raises as `read` does.
        """
        try:
            if self._ended:
                self._ended = False
                self._client.reopened(self)
            else:
                self._stream.cancel()
                with contextlib.suppress(RingUnavailableError):  # lost: nothing holds it any more
                    while (await self._stream.read())[1] is None:
                        pass
            del self._tokens[num_kept:]
            self._tokens.extend(ids)
            if not self._cancelled and self._error is None:
                await self._resubmit()
                if not self._cancelled and self._error is None:
                    return None
            self._finish()
            if self._error is not None:
                raise self._error
            return GenerationEnd(FinishReason.CANCELLED)
        except BaseException:
            self._stream.cancel()  # nobody reads on, so nobody would give it credit to end by itself
            self._finish()
            raise

    def cancel(self) -> None:
        """Stop generating; the slot is free as soon as the worker noticed. Idempotent."""
        if self._ended or self._cancelled:
            return
        self._cancelled = True
        self._interrupt()
        self._leave_turn()
        self._client.ended(self)  # nobody needs to read on for the slot to come back

    def abort(self, error: WorkerError) -> None:
        """End with `error`, which the reader gets instead of further tokens."""
        if self._ended or self._error is not None:
            return
        self._error = error
        self._interrupt()
        # Not left to the worker: it may hang, and this is how requests end when time has run out.
        self._stream.fail(str(error))

    def _interrupt(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        else:
            self._stream.cancel()

    def _finish(self) -> None:
        self._leave_turn()
        if not self._ended:
            self._ended = True
            self._client.ended(self, asyncio.get_running_loop().time() - self._started_s)
