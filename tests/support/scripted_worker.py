"""A worker that says what it is told to, over the real ring.

Owns: the worker's end of one shared directory, in a thread of its own. Runs in: tests of the front
end. Nothing of the ring is replaced: what these tests see is what a front end sees of a real worker.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ds4.errors import ErrorCode
from ds4.generation import (
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    ModelInfo,
    decode_request,
    encode_model_info,
)
from ds4.ring.layout import RingShape
from ds4.ring.states import WorkerState
from ds4.ring.worker_end import WorkerRing

Script = Callable[[GenerationRequest, list[int]], Sequence[int]]
_SLEEP_S: Final = 0.005
_NO_LIMIT: Final = 1 << 40


class Running:
    """One request at the worker. Written by the worker's thread."""

    def __init__(self, slot: int, request: GenerationRequest, prompt: list[int], output: list[int]) -> None:
        self.slot = slot
        self.request = request
        self.prompt = prompt
        self.output = output
        self.num_sent = request.num_resumed_tokens


class ScriptedWorker:
    """Answers each request with `script(request, prompt without resumed tokens)`, then STOP.

    `hold_after` lets only so many tokens out until `release`; the log-probability of token number i is
    -i / 8, its alternatives are itself and its successor.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer_hash: str,
        script: Script,
        *,
        vocab_size: int = 281,
        max_context_tokens: int = 512,
        slots_per_front_end: int = 8,
        state: WorkerState = WorkerState.READY,
        num_cached_tokens: int = 3,
        most_tokens: int = _NO_LIMIT,
    ) -> None:
        self.script = script
        self.requests: list[Running] = []  # every one ever taken
        self.num_cancelled = 0
        self.num_preparing = 0  # as front ends said at the latest turn
        self.failure: GenerationEnd | None = None  # given to every request after its next token
        self.tokens_per_step = 1
        self.killers: frozenset[int] = frozenset()  # prompts that hold one of these end the worker
        self.leaves_failed = True  # as a worker that died; False: one that hands over
        self._num_cached = num_cached_tokens
        self._open: dict[int, Running] = {}
        self._most_tokens = most_tokens
        self._stop = threading.Event()
        self._moving = threading.Event()
        self._moving.set()
        self._ready = threading.Event()
        self._info = ModelInfo(
            architecture="llama",
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            tokenizer_hash=tokenizer_hash,
            device="script",
            batched_sessions=slots_per_front_end,
            num_pages=64,
            page_tokens=16,
        )
        self._directory = directory
        self._shape = RingShape(num_front_ends=4, slots_per_front_end=slots_per_front_end)
        self._state = state
        self._thread = threading.Thread(target=self._run, name="scripted-worker")

    def start(self) -> "ScriptedWorker":
        """Come up."""
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def stop(self) -> None:
        """Leave; whatever runs is lost, as with a worker that died. Idempotent."""
        self._stop.set()
        self._moving.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def hold_after(self, num_tokens: int) -> None:
        """Send each request this many tokens and no more, until `release`."""
        self._most_tokens = num_tokens

    def release(self) -> None:
        """Let tokens flow again."""
        self._most_tokens = _NO_LIMIT

    def freeze(self) -> None:
        """Stop answering, alive, until `thaw`."""
        self._moving.clear()

    def thaw(self) -> None:
        """Go on."""
        self._moving.set()

    @property
    def is_alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Requests without an ending."""
        return len(self._open)

    def _run(self) -> None:
        ring = WorkerRing(self._directory, self._shape, encode_model_info(self._info))
        ring.set_state(self._state)
        self._ready.set()
        try:
            while not self._stop.is_set():
                self._moving.wait()
                self._turn(ring)
        finally:
            ring.close(failed=self.leaves_failed)

    def _turn(self, ring: WorkerRing) -> None:
        polled = ring.poll()
        self.num_preparing = ring.num_preparing
        for slot in polled.dropped:
            self._open.pop(slot, None)
        for submission in polled.submissions:
            request = decode_request(submission.params)
            ids = submission.prompt.tolist()
            prompt = ids[: len(ids) - request.num_resumed_tokens]
            running = Running(submission.slot, request, prompt, list(self.script(request, prompt)))
            assert ids[len(prompt) :] == running.output[: request.num_resumed_tokens]
            self.requests.append(running)
            self._open[submission.slot] = running
            if self.killers.intersection(prompt):
                self._stop.set()
                return
        ring.admit([submission.slot for submission in polled.submissions])
        for slot in polled.cancelled:
            if self._open.pop(slot, None) is not None:
                self.num_cancelled += 1
                ring.finish({slot: self._end(FinishReason.CANCELLED)})
        num_moved = sum(self._step(ring) for _ in range(self.tokens_per_step))
        if not num_moved:
            ring.sleep(_SLEEP_S)

    def _end(self, reason: FinishReason) -> GenerationEnd:
        return GenerationEnd(reason, num_cached_tokens=self._num_cached)

    def _step(self, ring: WorkerRing) -> bool:
        most = self._most_tokens
        slots = np.array(
            sorted(slot for slot, running in self._open.items() if running.num_sent < most), np.int64
        )
        slots = slots[ring.writable(slots)] if len(slots) else slots
        finished: dict[int, GenerationEnd] = {}
        rows: list[Running] = []
        for slot in slots.tolist():
            running = self._open[slot]
            if running.num_sent >= len(running.output):
                finished[slot] = self._end(FinishReason.STOP)
            else:
                rows.append(running)
        ends: dict[int, GenerationEnd] = {}
        for row, running in enumerate(rows):
            running.num_sent += 1
            if self.failure is not None:
                ends[row] = self.failure
            elif running.num_sent >= running.request.max_tokens:
                ends[row] = self._end(FinishReason.LENGTH)
        if rows:
            ids = [running.output[running.num_sent - 1] for running in rows]
            ring.publish(
                np.array([running.slot for running in rows], np.int64),
                np.array(ids, np.int32),
                np.array([-(running.num_sent - 1) / 8 for running in rows], np.float32),
                {
                    row: [(ids[row], -0.5), (ids[row] + 1, -1.5)][: running.request.sampling.num_logprobs]
                    for row, running in enumerate(rows)
                    if running.request.sampling.num_logprobs > 0
                },
                ends,
            )
        ring.finish(finished)
        for slot in (*finished, *(rows[row].slot for row in ends)):
            self._open.pop(slot, None)
        return bool(rows or finished)


def failing(code: ErrorCode, text: str) -> GenerationEnd:
    """An ending of the worker's fault."""
    return GenerationEnd(FinishReason.ERROR, int(code), text)
