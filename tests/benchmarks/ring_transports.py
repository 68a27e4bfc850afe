"""The same serving loop over three transports: the ring, ZeroMQ with msgspec, multiprocessing.Queue.

One worker process with a fake model, F front-end processes with S streams each on uvloop. Worker loop,
active set (NumPy arrays), token check and streams are the same code for all; only what carries requests
and tokens differs. All send one message (or ring write) per front end and step, and all have flow
control: a front end may be at most a few messages behind.
"""

import asyncio
import multiprocessing
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import uvloop
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from ds4.generation import FinishReason, GenerationEnd, TokenEvent
from ds4.ring.front_end import FrontEndRing
from ds4.ring.layout import RingShape
from ds4.ring.states import WorkerState
from ds4.ring.worker_end import WorkerRing
from tests.stress.ring_kill import expected_token, expected_tokens

TOKENS_PER_REQUEST: Final = 400
MAX_MESSAGES_BEHIND: Final = 8
_PROMPT: Final = b"p" * 400  # 100 tokens, as the ring's prompt below
_WARM_UP_S: Final = 1.5
_START_DEADLINE_S: Final = 60.0

Slots = NDArray[np.int64]
Request = tuple[int, int, int]  # slot, request id, limit
Message = tuple[list[int], list[int], list[float], list[int]]  # ids, tokens, log-probabilities, endings


class Case(msgspec.Struct, frozen=True):
    """One measurement."""

    transport: str
    front_ends: int
    streams: int
    step_ms: float
    seconds: float


class Result(msgspec.Struct, frozen=True):
    """Its figures; `overhead_us` is the worker's time per full step outside the model."""

    case: Case
    tokens_per_s: float
    overhead_us: float
    steps_per_s: float
    wakes_per_step: float  # of one front end
    front_end_cpu: float  # cores, all front ends
    wrong: int


def logprobs_of(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """A number to carry with each token [n]."""
    return -(tokens & 0xFF).astype(np.float32)


class WorkerTransport(Protocol):
    """What the worker loop needs."""

    def receive(self) -> list[Request]: ...
    def writable(self, slots: Slots) -> NDArray[np.bool_]: ...
    def send(
        self,
        slots: Slots,
        ids: NDArray[np.uint64],
        indices: NDArray[np.uint64],
        tokens: NDArray[np.int32],
        ended: list[int],
    ) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Stream(Protocol):
    """What a consumer needs."""

    request_id: int

    async def next(self) -> tuple[list[TokenEvent], bool]: ...


class Client(Protocol):
    """What a front end needs."""

    @property
    def num_wakes(self) -> int: ...
    async def start(self) -> None: ...
    def submit(self) -> Stream: ...


def serve(make: Callable[[], WorkerTransport], case: Case, stop: Event, results: "Queue[Any]") -> None:
    """The worker's loop."""
    transport = make()
    size = case.front_ends * case.streams
    ids, sent, limits = (np.zeros(size, np.uint64) for _ in range(3))
    active = np.zeros(size, np.bool_)
    overheads: list[float] = []
    steps, began = 0, time.perf_counter()
    model_ended = 0.0
    while not stop.is_set():
        for slot, request_id, limit in transport.receive():
            ids[slot], sent[slot], limits[slot], active[slot] = request_id, 0, limit, True
        slots = np.flatnonzero(active)
        rows = slots[transport.writable(slots)] if len(slots) else slots
        if not len(rows):
            transport.wait()
            model_ended = 0.0
            continue
        if model_ended and len(rows) == size:
            overheads.append(time.perf_counter() - model_ended)
        if case.step_ms:
            time.sleep(case.step_ms / 1e3)
        tokens = expected_tokens(ids[rows], sent[rows])
        model_ended = time.perf_counter()
        ended = np.flatnonzero(sent[rows] + np.uint64(1) >= limits[rows]).tolist()
        transport.send(rows, ids[rows], sent[rows], tokens, ended)
        sent[rows] += np.uint64(1)
        active[rows[ended]] = False
        steps += 1
    results.put(
        ("worker", steps / (time.perf_counter() - began), statistics.median(overheads or [0.0]) * 1e6)
    )
    transport.close()


async def consume(client: Client, case: Case, results: "Queue[Any]") -> None:
    """One front end: streams that check every token."""
    await client.start()
    total = wrong = 0

    async def one() -> None:
        nonlocal total, wrong
        while True:
            stream = client.submit()
            received, ended = 0, False
            while not ended:
                tokens, ended = await stream.next()
                for event in tokens:
                    wrong += event.token_id != expected_token(stream.request_id, received)
                    received += 1
                total += len(tokens)
            wrong += received != TOKENS_PER_REQUEST

    tasks = [asyncio.ensure_future(one()) for _ in range(case.streams)]
    await asyncio.sleep(_WARM_UP_S)
    before, wakes, cpu, began = total, client.num_wakes, time.process_time(), time.perf_counter()
    await asyncio.sleep(case.seconds)
    took = time.perf_counter() - began
    cpu_s = time.process_time() - cpu
    results.put(("front", (total - before) / took, (client.num_wakes - wakes) / took, cpu_s / took, wrong))
    await asyncio.gather(*tasks, return_exceptions=True)  # until `measure` kills this process
    await asyncio.Event().wait()


def run_front_end(client: Client, case: Case, results: "Queue[Any]") -> None:
    """Process entry: never returns by itself."""
    work: Coroutine[Any, Any, None] = consume(client, case, results)
    uvloop.run(work)


# -- the ring


class RingWorker:
    def __init__(self, directory: str, case: Case) -> None:
        shape = RingShape(num_front_ends=case.front_ends, slots_per_front_end=case.streams)
        self._ring = WorkerRing(Path(directory), shape, b"")
        self._ring.set_state(WorkerState.READY)

    def receive(self) -> list[Request]:
        submissions = self._ring.poll().submissions
        if submissions:
            self._ring.admit([one.slot for one in submissions])
        return [(one.slot, one.request_id, int.from_bytes(one.params, "little")) for one in submissions]

    def writable(self, slots: Slots) -> NDArray[np.bool_]:
        return self._ring.writable(slots)

    def send(
        self,
        slots: Slots,
        ids: NDArray[np.uint64],
        indices: NDArray[np.uint64],
        tokens: NDArray[np.int32],
        ended: list[int],
    ) -> None:
        ends = {row: GenerationEnd(FinishReason.LENGTH) for row in ended}
        self._ring.publish(slots, tokens, logprobs_of(tokens), ends=ends or None)

    def wait(self) -> None:
        self._ring.sleep(0.05)

    def close(self) -> None:
        self._ring.close()


class RingStreamAdapter:
    def __init__(self, ring: FrontEndRing) -> None:
        params = TOKENS_PER_REQUEST.to_bytes(8, "little")
        self._stream = ring.submit(params, np.zeros(100, np.uint32))
        self.request_id = self._stream.request_id

    async def next(self) -> tuple[list[TokenEvent], bool]:
        events, end = await self._stream.read()
        return events, end is not None


class RingClient:
    def __init__(self, directory: str) -> None:
        self._directory = directory

    async def start(self) -> None:
        self._ring = FrontEndRing(Path(self._directory))
        await self._ring.start()
        await self._ring.wait_attached()

    @property
    def num_wakes(self) -> int:
        return self._ring.num_wakes

    def submit(self) -> Stream:
        return RingStreamAdapter(self._ring)


# -- what the peers share


class PeerStream:
    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self._tokens: list[TokenEvent] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> tuple[list[TokenEvent], bool]:
        while not self._tokens and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens, self._tokens = self._tokens, []
        return tokens, self._ended

    def push(self, token: TokenEvent, *, ended: bool) -> None:
        self._tokens.append(token)
        self._ended = ended
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None


class PeerClient:
    """Streams by request id; `index` is this front end's number."""

    def __init__(self, index: int, streams: int) -> None:
        self.num_wakes = 0
        self.index = index
        self._free = list(range(index * streams, (index + 1) * streams))
        self._streams: dict[int, tuple[int, PeerStream]] = {}
        self._count = 0

    def open(self) -> tuple[Request, PeerStream]:
        slot = self._free.pop()
        self._count += 1
        request_id = (self.index + 1) << 52 | self._count
        stream = PeerStream(request_id)
        self._streams[request_id] = slot, stream
        return (slot, request_id, TOKENS_PER_REQUEST), stream

    def dispatch(self, ids: list[int], tokens: list[int], logprobs: list[float], ended: list[int]) -> None:
        self.num_wakes += 1
        for request_id, token, last in zip(ids, map(TokenEvent, tokens, logprobs), ended, strict=True):
            slot, stream = self._streams[request_id]
            if last:
                del self._streams[request_id]
                self._free.append(slot)
            stream.push(token, ended=bool(last))


class PeerWorker:
    """Splits a step by front end; one message each."""

    def __init__(self, case: Case) -> None:
        self._streams = case.streams
        self._behind = np.zeros(case.front_ends, np.int64)

    def writable(self, slots: Slots) -> NDArray[np.bool_]:
        return self._behind[slots // self._streams] < MAX_MESSAGES_BEHIND

    def send(
        self,
        slots: Slots,
        ids: NDArray[np.uint64],
        indices: NDArray[np.uint64],
        tokens: NDArray[np.int32],
        ended: list[int],
    ) -> None:
        last = np.zeros(len(slots), np.int64)
        last[ended] = 1
        owners = slots // self._streams
        logprobs = logprobs_of(tokens)
        for front_end in np.unique(owners).tolist():
            mine = owners == front_end
            self._behind[front_end] += 1
            mine_logprobs = logprobs[mine].tolist()
            self.put(
                front_end, (ids[mine].tolist(), tokens[mine].tolist(), mine_logprobs, last[mine].tolist())
            )

    def put(self, front_end: int, message: Message) -> None:
        raise NotImplementedError


# -- ZeroMQ


class ZmqWorker(PeerWorker):
    def __init__(self, directory: str, case: Case) -> None:
        super().__init__(case)
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(f"ipc://{directory}/zmq")
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder().decode

    def receive(self) -> list[Request]:
        requests: list[Request] = []
        while True:
            try:
                identity, raw = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return requests
            message = self._decode(raw)
            if message == 0:
                self._behind[identity[0] - 1] -= 1
            else:
                requests.append((message[0], message[1], message[2]))

    def put(self, front_end: int, message: Message) -> None:
        self._socket.send_multipart([bytes([front_end + 1]), self._encode(message)])

    def wait(self) -> None:
        self._socket.poll(50)

    def close(self) -> None:
        self._socket.close(0)


class ZmqClient(PeerClient):
    def __init__(self, directory: str, index: int, streams: int) -> None:
        super().__init__(index, streams)
        self._directory = directory

    async def start(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._socket = zmq.asyncio.Context().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, bytes([self.index + 1]))
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(f"ipc://{self._directory}/zmq")
        self._pump_task = asyncio.ensure_future(self._pump())

    async def _pump(self) -> None:
        while True:
            self.dispatch(*self._decode(await self._socket.recv()))
            await self._socket.send(self._encode(0))

    def submit(self) -> Stream:
        request, stream = self.open()
        self._socket.send(self._encode((*request, _PROMPT)))
        return stream


# -- multiprocessing.Queue


class QueueWorker(PeerWorker):
    def __init__(self, case: Case, requests: "Queue[Any]", events: "list[Queue[Any]]") -> None:
        super().__init__(case)
        self._requests = requests
        self._events = events

    def receive(self) -> list[Request]:
        requests: list[Request] = []
        while True:
            try:
                message = self._requests.get_nowait()
            except queue.Empty:
                return requests
            if isinstance(message, int):
                self._behind[message] -= 1
            else:
                requests.append((message[0], message[1], message[2]))

    def put(self, front_end: int, message: Message) -> None:
        self._events[front_end].put(message)

    def wait(self) -> None:
        time.sleep(0.0002)  # a queue cannot be waited for without taking from it

    def close(self) -> None:
        for events in self._events:
            events.cancel_join_thread()


class QueueClient(PeerClient):
    def __init__(self, index: int, streams: int, requests: "Queue[Any]", events: "Queue[Any]") -> None:
        super().__init__(index, streams)
        self._requests = requests
        self._events = events

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        while True:
            message = self._events.get()
            self._loop.call_soon_threadsafe(self.dispatch, *message)
            self._requests.put(self.index)

    def submit(self) -> Stream:
        request, stream = self.open()
        self._requests.put((*request, _PROMPT))
        return stream


# -- running a case


def _worker_process(case: Case, directory: str, stop: Event, results: "Queue[Any]", queues: Any) -> None:
    makers: dict[str, Callable[[], WorkerTransport]] = {
        "ring": lambda: RingWorker(directory, case),
        "zmq + msgspec": lambda: ZmqWorker(directory, case),
        "mp.Queue": lambda: QueueWorker(case, queues[0], queues[1]),
    }
    serve(makers[case.transport], case, stop, results)


def _front_end_process(case: Case, directory: str, index: int, results: "Queue[Any]", queues: Any) -> None:
    makers: dict[str, Callable[[], Client]] = {
        "ring": lambda: RingClient(directory),
        "zmq + msgspec": lambda: ZmqClient(directory, index, case.streams),
        "mp.Queue": lambda: QueueClient(index, case.streams, queues[0], queues[1][index]),
    }
    run_front_end(makers[case.transport](), case, results)


def measure(case: Case) -> Result:
    """Run one case in fresh processes."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    stop = context.Event()
    queues = (context.Queue(), [context.Queue() for _ in range(case.front_ends)])
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=base) as directory:
        worker = context.Process(target=_worker_process, args=(case, directory, stop, results, queues))
        fronts = [
            context.Process(target=_front_end_process, args=(case, directory, index, results, queues))
            for index in range(case.front_ends)
        ]
        for process in (worker, *fronts):
            process.start()
        try:
            reports = [results.get(timeout=_START_DEADLINE_S + case.seconds) for _ in fronts]
            stop.set()
            _, steps_per_s, overhead_us = results.get(timeout=_START_DEADLINE_S)
        finally:
            for process in (*fronts, worker):
                process.kill()
                process.join()
    wakes = statistics.mean(report[2] for report in reports)
    tokens_per_s = sum(report[1] for report in reports)
    # The worker's own rate includes its start; tokens over rows is the rate inside the window.
    steps = tokens_per_s / (case.front_ends * case.streams)
    return Result(
        case,
        tokens_per_s,
        overhead_us,
        steps_per_s,
        wakes / steps if steps else 0.0,
        sum(report[3] for report in reports),
        sum(report[4] for report in reports),
    )
