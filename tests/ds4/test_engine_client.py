"""ds4/engine_client.py: generations over the real ring, and what happens when the worker is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ds4.config import Settings
from ds4.engine_client import EngineClient, Generation
from ds4.errors import ErrorCode, RingFullError, RingUnavailableError, WorkerError
from ds4.generation import FinishReason, GenerationEnd, GenerationRequest
from ds4.ring.stream import RingStream
from tests.support.front_rig import run, until
from tests.support.scripted_worker import ScriptedWorker, failing

_HASH = "a" * 64
_SAID = list(range(10, 20))


class _Rig:
    def __init__(self, directory: Path, client: EngineClient) -> None:
        self.directory = directory
        self.client = client
        self.workers: list[ScriptedWorker] = []
        self.said_next: list[int] = []  # by whoever gets a resumed request, if anything

    async def worker(self, tokenizer_hash: str = _HASH, most_tokens: int = 1 << 40) -> ScriptedWorker:
        def script(request: GenerationRequest, prompt: list[int]) -> list[int]:
            return self.said_next if request.num_resumed_tokens and self.said_next else _SAID

        worker = ScriptedWorker(self.directory, tokenizer_hash, script, most_tokens=most_tokens).start()
        self.workers.append(worker)
        await until(lambda: self.client.ready or tokenizer_hash != _HASH)
        return worker

    def generate(self, max_tokens: int = 100) -> Generation:
        return self.client.generate(GenerationRequest(max_tokens=max_tokens), [1, 2, 3])


@asynccontextmanager
async def _rig(tmp_path: Path, **settings: int) -> AsyncIterator[_Rig]:
    client = EngineClient(Settings(slots_per_front_end=8, **settings), tmp_path, tokenizer_hash=_HASH)  # type: ignore[arg-type]
    await client.start()
    rig = _Rig(tmp_path, client)
    try:
        yield rig
    finally:
        await client.close()
        for worker in rig.workers:
            worker.stop()


def _run(tmp_path: Path, scenario: Callable[[_Rig], Awaitable[None]], **settings: int) -> None:
    async def whole() -> None:
        async with _rig(tmp_path, **settings) as rig:
            await scenario(rig)

    run(whole)


async def _read_all(generation: Generation) -> tuple[list[int], GenerationEnd]:
    ids: list[int] = []
    while True:
        tokens, end = await generation.read()
        ids += [token.token_id for token in tokens]
        if end is not None:
            return ids, end


async def _read_some(generation: Generation, at_least: int) -> None:
    while generation.num_generated < at_least:  # a read may bring one token or many
        await generation.read()


def test_tokens_arrive_in_order_with_one_ending(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        await rig.worker()
        ids, end = await _read_all(rig.generate())
        assert ids == _SAID
        assert end.reason == FinishReason.STOP
        assert end.num_cached_tokens == 3
        ids, end = await _read_all(rig.generate(max_tokens=4))
        assert (ids, end.reason) == (_SAID[:4], FinishReason.LENGTH)
        assert rig.client.num_running == 0
        await rig.client.wait_idle()

    _run(tmp_path, scenario)


def test_cancelling_ends_with_what_the_worker_says(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(2)
        generation = rig.generate()
        await until(lambda: bool(worker.requests) and worker.requests[0].num_sent == 2)
        generation.cancel()
        generation.cancel()
        _, end = await _read_all(generation)
        assert end.reason == FinishReason.CANCELLED
        assert end.num_cached_tokens == 3
        assert rig.client.num_running == 0

    _run(tmp_path, scenario)


def test_nobody_has_to_read_on_after_a_cancel(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(0)
        rig.generate().cancel()
        await rig.client.wait_idle()
        await until(lambda: rig.client.ring.num_free_slots == 8)

    _run(tmp_path, scenario)


def test_a_new_worker_hears_of_no_request_that_went_away_before_it_came(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        first = await rig.worker()
        rig.client.preparing(+1)
        first.stop()
        await until(lambda: not rig.client.ring.attached)
        rig.client.preparing(-1)
        second = await rig.worker()
        generation = rig.generate()
        await _read_all(generation)
        assert second.num_preparing == 0

    _run(tmp_path, scenario)


def test_a_reader_that_is_cancelled_gives_its_slot_back(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(2)
        generation = rig.generate()
        await until(lambda: bool(worker.requests) and worker.requests[0].num_sent == 2)
        reading = asyncio.ensure_future(_read_all(generation))
        await until(lambda: generation.num_generated == 2)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert rig.client.num_running == 0
        await until(lambda: rig.client.ring.num_free_slots == 8)

    _run(tmp_path, scenario)


def test_a_reader_that_is_cancelled_as_it_is_resumed_gives_its_slot_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(rig: _Rig) -> None:
        first = await rig.worker()
        first.hold_after(2)
        generation = rig.generate()
        await until(lambda: bool(first.requests) and first.requests[0].num_sent == 2)
        reading = asyncio.ensure_future(_read_all(generation))
        submit = rig.client.submit

        def submit_and_cancel(*arguments: Any) -> RingStream:
            stream = submit(*arguments)
            reading.cancel()
            return stream

        monkeypatch.setattr(rig.client, "submit", submit_and_cancel)
        first.stop()
        second = await rig.worker(most_tokens=0)
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        await until(lambda: second.num_cancelled == 1)
        await until(lambda: rig.client.ring.num_free_slots == 8)

    _run(tmp_path, scenario)


def test_a_lost_worker_is_replaced_without_a_gap_as_often_as_allowed(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(2)
        generation = rig.generate()
        reading = asyncio.ensure_future(_read_all(generation))
        for num_sent in (2, 5):
            await until(lambda n=num_sent, w=worker: bool(w.requests) and w.requests[0].num_sent == n)  # type: ignore[misc]
            worker.stop()
            worker = await rig.worker(most_tokens=5 if num_sent == 2 else 100)
        ids, end = await reading
        assert ids == _SAID
        assert end.reason == FinishReason.STOP
        assert [w.requests[0].request.num_resumed_tokens for w in rig.workers] == [0, 2, 5]
        assert rig.client.metrics.value("ds4_resumed_streams_total") == 2

    _run(tmp_path, scenario, resume_attempts=2)


def test_a_worker_that_hands_over_costs_nothing_of_the_budget(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.leaves_failed = False
        worker.hold_after(2)
        generation = rig.generate()
        await until(lambda: bool(worker.requests) and worker.requests[0].num_sent == 2)
        worker.stop()
        await rig.worker()
        ids, end = await _read_all(generation)
        assert ids == _SAID
        assert end.reason == FinishReason.STOP

    _run(tmp_path, scenario, resume_attempts=0)


def test_the_budget_of_resumptions_is_kept(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(1)
        generation = rig.generate()
        await until(lambda: bool(worker.requests))
        worker.stop()
        with pytest.raises(WorkerError) as caught:
            await _read_all(generation)
        assert caught.value.code == ErrorCode.DEVICE
        assert rig.client.num_running == 0

    _run(tmp_path, scenario, resume_attempts=0)


def test_a_worker_with_another_model_ends_what_ran_on_the_old_one(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(1)
        generation = rig.generate()
        await until(lambda: bool(worker.requests))
        worker.stop()
        await rig.worker("b" * 64)
        with pytest.raises(RingUnavailableError, match="another model"):
            await _read_all(generation)
        assert not rig.client.ready
        with pytest.raises(RingUnavailableError, match="another model"):
            rig.generate()

    _run(tmp_path, scenario)


def test_a_device_fault_that_the_worker_reports_is_resumed_too(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(2)
        generation = rig.generate()
        await until(lambda: bool(worker.requests) and worker.requests[0].num_sent == 2)
        worker.failure = failing(ErrorCode.DEVICE, "fault")
        worker.release()
        await until(lambda: worker.num_open == 0)
        worker.failure = None
        ids, end = await _read_all(generation)
        assert ids == _SAID
        assert worker.requests[1].request.num_resumed_tokens == 3
        assert end.reason == FinishReason.STOP

    _run(tmp_path, scenario)


def test_an_error_of_the_request_itself_is_raised_with_its_code(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.failure = failing(ErrorCode.NUMERIC, "not a number")
        with pytest.raises(WorkerError, match="not a number") as caught:
            await _read_all(rig.generate())
        assert caught.value.code == ErrorCode.NUMERIC
        assert len(worker.requests) == 1

    _run(tmp_path, scenario)


def test_a_refusal_by_the_next_worker_is_not_the_clients_fault(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(2)
        generation = rig.generate()
        await until(lambda: bool(worker.requests) and worker.requests[0].num_sent == 2)
        worker.stop()
        smaller = await rig.worker(most_tokens=0)
        smaller.failure = failing(ErrorCode.INVALID_REQUEST, "leaves no room for output")
        smaller.release()
        with pytest.raises(WorkerError, match=r"the next one does not take .* no room for output") as caught:
            await _read_all(generation)
        assert caught.value.code == ErrorCode.DEVICE

    _run(tmp_path, scenario)


def test_an_abort_reaches_running_and_resuming_generations(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(1)
        error = WorkerError("the end", code=ErrorCode.SHUTTING_DOWN)
        running = asyncio.ensure_future(_read_all(rig.generate()))
        await until(lambda: bool(worker.requests))
        assert rig.client.abort_all(error) == 1
        with pytest.raises(WorkerError, match="the end"):
            await running
        waiting = asyncio.ensure_future(_read_all(rig.generate()))
        await until(lambda: len(worker.requests) == 2)
        worker.stop()
        await until(lambda: rig.client.num_resuming == 1)
        rig.client.abort_all(error)
        with pytest.raises(WorkerError, match="the end"):
            await waiting

    _run(tmp_path, scenario)


def test_slots_run_out_and_come_back(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker()
        worker.hold_after(0)
        generations = [rig.generate() for _ in range(8)]
        with pytest.raises(RingFullError):
            rig.generate()
        await until(lambda: rig.client.ring.num_pending() == 0)
        told = [rig.client.turn_away() for _ in range(600)]
        assert told[0] == 1
        assert told == sorted(told), "who comes later is told to wait longer"
        assert 1 < told[-1] <= 60
        worker.release()
        await asyncio.gather(*map(_read_all, generations))
        await _read_all(rig.generate())

    _run(tmp_path, scenario)


def test_without_a_worker_and_while_draining_nothing_is_taken(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        with pytest.raises(RingUnavailableError, match="no worker"):
            rig.generate()
        await rig.worker()
        rig.client.draining = True
        with pytest.raises(RingUnavailableError, match="shutting down"):
            rig.generate()

    _run(tmp_path, scenario)


def test_the_model_info_is_the_workers(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        seen = [rig.client.model_info]
        await rig.worker()
        seen.append(rig.client.model_info)
        assert [info and info.max_context_tokens for info in seen] == [None, 512]

    _run(tmp_path, scenario)


def test_output_can_be_taken_back_and_gone_on_with(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        for most_tokens in (6, 1 << 40):  # still running, or already ended
            rig.said_next = [10, 11, 12, 90, 91, 30, 31]
            worker = await rig.worker(most_tokens=most_tokens)
            generation = rig.generate(max_tokens=50)
            read: list[int] = []
            end = None
            while len(read) < 6 or (most_tokens > 6 and end is None):
                tokens, end = await generation.read()
                read += [token.token_id for token in tokens]
            worker.release()
            assert await generation.continue_with(3, [90, 91]) is None
            rest, end = await _read_all(generation)
            assert rest == [30, 31]
            assert end.reason == FinishReason.STOP
            assert generation.num_generated == 7
            again = worker.requests[-1].request
            assert (again.num_resumed_tokens, again.max_tokens) == (5, 50)
            await until(lambda: worker.num_open == 0)  # noqa: B023 - awaited here
            assert rig.client.num_running == 0
            assert rig.client.metrics.value("ds4_resumed_streams_total") == 0
            worker.stop()
            await until(lambda: not rig.client.ready)

    _run(tmp_path, scenario)


def test_taking_back_survives_the_loss_of_the_worker(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        rig.said_next = [10, 11, 90, 30]
        first = await rig.worker(most_tokens=4)
        generation = rig.generate()
        await _read_some(generation, 2)
        first.freeze()
        going_on = asyncio.ensure_future(generation.continue_with(2, [90]))
        await asyncio.sleep(0)
        first.stop()
        await rig.worker()
        assert await going_on is None
        assert (await _read_all(generation))[0] == [30]

    _run(tmp_path, scenario)


def test_a_cancel_while_output_is_taken_back_is_the_end(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        rig.said_next = [10, 11, 90, 30]
        worker = await rig.worker(most_tokens=4)
        generation = rig.generate()
        await _read_some(generation, 2)
        worker.freeze()
        going_on = asyncio.ensure_future(generation.continue_with(2, [90]))
        await asyncio.sleep(0)
        generation.cancel()
        worker.thaw()
        end = await going_on
        assert end is not None
        assert end.reason == FinishReason.CANCELLED
        await until(lambda: worker.num_open == 0)
        assert len(worker.requests) == 1

    _run(tmp_path, scenario)


def test_an_abort_while_output_is_taken_back_is_raised(tmp_path: Path) -> None:
    async def scenario(rig: _Rig) -> None:
        worker = await rig.worker(most_tokens=4)
        generation = rig.generate()
        await _read_some(generation, 2)
        worker.freeze()
        going_on = asyncio.ensure_future(generation.continue_with(2, [90]))
        await asyncio.sleep(0)
        generation.abort(WorkerError("time is up", code=ErrorCode.SHUTTING_DOWN))
        with pytest.raises(WorkerError, match="time is up"):
            await going_on
        worker.thaw()
        assert rig.client.num_running == 0

    _run(tmp_path, scenario)
