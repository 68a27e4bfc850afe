"""ds4/suspects.py: the one request that kills the worker is found, and only it fails."""

import asyncio
import os
import time
from pathlib import Path

import numpy as np
import pytest

from ds4 import suspects
from ds4.config import Settings
from ds4.engine_client import EngineClient, Generation
from ds4.errors import ErrorCode, WorkerError
from ds4.generation import GenerationRequest
from ds4.ring.control import ControlPage
from ds4.suspects import FORGIVE_AFTER_S, FORGIVE_TOKENS, PROOF_TOKENS, Quarantine, Record, Turn, Turns
from tests.support.front_rig import run, until
from tests.support.scripted_worker import ScriptedWorker

_HASH = "a" * 64
_SAID = list(range(10, 40))
_POISON = 200


async def _read_all(generation: Generation) -> list[int]:
    ids: list[int] = []
    while True:
        tokens, end = await generation.read()
        ids += [token.token_id for token in tokens]
        if end is not None:
            return ids


def test_a_request_that_kills_the_worker_fails_alone_and_is_not_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        clients = [
            EngineClient(Settings(slots_per_front_end=8), tmp_path, tokenizer_hash=_HASH) for _ in range(2)
        ]
        for client in clients:
            await client.start()
        workers: list[ScriptedWorker] = []

        def start_worker() -> None:
            worker = ScriptedWorker(tmp_path, _HASH, lambda request, prompt: _SAID)
            worker.killers = frozenset({_POISON})
            workers.append(worker.start())

        async def supervise() -> None:
            while True:
                if not workers[-1].is_alive:
                    start_worker()
                await asyncio.sleep(0.01)

        start_worker()
        workers[-1].hold_after(3)
        for client in clients:
            await client.ring.wait_attached()
        request = GenerationRequest(max_tokens=100)
        innocents = [
            asyncio.ensure_future(_read_all(client.generate(request, [1, 2, number])))
            for client in clients
            for number in range(6)
        ]
        supervisor = asyncio.ensure_future(supervise())
        try:
            with pytest.raises(WorkerError, match="crashed each time") as caught:
                await _read_all(clients[0].generate(request, [1, _POISON, 3]))
            assert caught.value.code == ErrorCode.QUARANTINED
            assert await asyncio.gather(*innocents) == [_SAID] * len(innocents)
            # Two crashes to become a suspect, two alone; the last of them may still be dying.
            await until(lambda: sum(not worker.is_alive for worker in workers) == 4)
            for client in clients:  # also the one that never had it
                await until(lambda client=client: client.ready)  # type: ignore[misc]
                with pytest.raises(WorkerError, match="not tried again"):
                    client.generate(request, [1, _POISON, 3])
            assert await _read_all(clients[1].generate(request, [1, 2, 3])) == _SAID
            assert sum(not worker.is_alive for worker in workers) == 4
            assert clients[0].metrics.value("ds4_requests_quarantined_total") == 1
        finally:
            supervisor.cancel()
            for client in clients:
                await client.close()
            for worker in workers:
                worker.stop()

    run(scenario)


def _holding(directory: Path, num_tokens: int = 1) -> ScriptedWorker:
    """A worker that says what all say here, and no more than so many tokens of it until it is released."""
    worker = ScriptedWorker(directory, _HASH, lambda request, prompt: _SAID)
    worker.hold_after(num_tokens)
    return worker.start()


async def _has_requests(worker: ScriptedWorker, count: int) -> None:
    await until(lambda: len(worker.requests) == count)


def test_a_worker_that_somebody_kills_makes_nobody_a_suspect(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(
            Settings(slots_per_front_end=8, resume_attempts=3), tmp_path, tokenizer_hash=_HASH
        )
        await client.start()
        page = ControlPage(tmp_path)
        worker = _holding(tmp_path)
        await client.ring.wait_attached()
        reading = [
            asyncio.ensure_future(_read_all(client.generate(GenerationRequest(max_tokens=100), [1, number])))
            for number in range(3)
        ]
        try:
            for num_held in (1, 1, 100):  # all at once again each time: nobody waits for a turn
                await _has_requests(worker, 3)
                worker.stop()
                page.note_killed(os.getpid())  # these workers live in this process
                worker = _holding(tmp_path, num_held)
            assert await asyncio.gather(*reading) == [_SAID] * 3
            assert client.metrics.value("ds4_requests_quarantined_total") == 0
            assert client.metrics.value("ds4_resumed_streams_total") == 9
        finally:
            await client.close()
            page.close()
            worker.stop()

    run(scenario)


def test_whoever_had_its_turn_when_somebody_killed_the_worker_is_not_quarantined(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(
            Settings(slots_per_front_end=8, resume_attempts=2), tmp_path, tokenizer_hash=_HASH
        )
        await client.start()
        page = ControlPage(tmp_path)
        worker = _holding(tmp_path)
        await client.ring.wait_attached()
        request = GenerationRequest(max_tokens=100)
        reading = asyncio.ensure_future(_read_all(client.generate(request, [1, 2])))
        try:
            for killed in (0, 0, os.getpid()):
                await _has_requests(worker, 1)
                worker.stop()
                page.note_killed(killed)
                worker = _holding(tmp_path)
            with pytest.raises(WorkerError, match="resumed too often") as caught:
                await reading
            assert caught.value.code == ErrorCode.DEVICE
            worker.release()
            await client.ring.wait_attached()
            assert await _read_all(client.generate(request, [1, 2])) == _SAID, "it may be tried again"
        finally:
            await client.close()
            page.close()
            worker.stop()

    run(scenario)


def test_who_is_new_at_a_crash_in_anothers_turn_is_not_cleared_by_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(Settings(slots_per_front_end=8), tmp_path, tokenizer_hash=_HASH)
        await client.start()
        worker = _holding(tmp_path)
        await client.ring.wait_attached()
        suspect = client.generate(GenerationRequest(max_tokens=100), [1, 2])
        reading = [asyncio.ensure_future(_read_all(suspect))]
        try:
            for _ in range(2):
                await _has_requests(worker, 1)
                worker.stop()
                worker = _holding(tmp_path)
            await _has_requests(worker, 1)  # its turn
            new = client.generate(GenerationRequest(max_tokens=100), [1, 3])
            reading.append(asyncio.ensure_future(_read_all(new)))
            await until(lambda: new.num_generated == 1)
            worker.stop()
            worker = _holding(tmp_path)
            worker.release()
            assert await asyncio.gather(*reading) == [_SAID] * 2
            assert [one._record.num_crashes for one in (suspect, new)] == [3, 1]
        finally:
            await client.close()
            worker.stop()

    run(scenario)


def test_a_record_forgives_what_was_followed_by_long_running() -> None:
    record = Record()
    record.crashed(5, 100.0)
    assert record.num_crashes < suspects.SUSPECT_AFTER
    record.crashed(6, 100.0 + FORGIVE_AFTER_S)
    assert record.is_suspect, "time alone proves nothing"
    record.crashed(6 + FORGIVE_TOKENS, 100.0 + 2 * FORGIVE_AFTER_S)
    assert record.num_crashes == 1


def test_a_record_that_is_acquitted_of_a_crash_is_no_suspect_for_it() -> None:
    record = Record()
    for _ in range(5):
        record.crashed(5, 100.0)
        record.acquit()
    assert record.num_crashes == 5
    record.crashed(5, 100.0)
    assert not record.is_suspect
    record.crashed(5, 100.0)
    assert record.is_suspect


def test_a_few_new_tokens_prove_a_suspect() -> None:
    record = Record()
    record.crashed(5, 1.0)
    assert not record.is_proved(5 + PROOF_TOKENS - 1)
    assert record.is_proved(5 + PROOF_TOKENS)


def test_turns_are_one_at_a_time_and_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "TURN_S", 0.05)
    held: list[bool] = []

    def take() -> bool:
        if held:
            return False
        held.append(True)
        return True

    async def run_out(turn: asyncio.Future[Turn]) -> None:
        (await turn).resume()  # and its owner does not end it

    async def scenario() -> None:
        turns, others = Turns(take, held.clear), Turns(take, held.clear)
        first = await turns.begin()
        second, third = asyncio.ensure_future(turns.begin()), asyncio.ensure_future(others.begin())
        await asyncio.sleep(0)
        assert not second.done()
        assert not third.done()
        first.end()
        first.end()
        await asyncio.gather(run_out(second), run_out(third))
        abandoned = asyncio.ensure_future(turns.begin())
        await asyncio.sleep(0)
        abandoned.cancel()
        last = await turns.begin()
        last.end()
        assert last.is_over

    run(scenario)


def test_a_turn_goes_on_while_no_worker_has_the_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "TURN_S", 0.05)

    async def scenario() -> None:
        turn = await Turns(lambda: True, lambda: None).begin()
        await asyncio.sleep(0.1)
        assert not turn.is_over, "a worker that loads for longer than a turn"
        turn.resume()
        turn.pause()
        await asyncio.sleep(0.1)
        assert not turn.is_over
        turn.resume()
        await until(lambda: turn.is_over)
        turn.resume()

    run(scenario)


def test_nobody_waits_for_a_turn_for_ever() -> None:
    async def scenario() -> None:
        turns = Turns(lambda: False, lambda: None)
        for is_attached, reason in ((False, "none came back"), (True, "again and again")):
            with pytest.raises(TimeoutError, match=reason):
                await turns.wait(lambda found=is_attached: found, 0.01)  # type: ignore[misc]
        free = Turns(lambda: True, lambda: None)
        (await free.wait(lambda: True, 60.0)).end()
        (await free.wait(lambda: True, 60.0)).end()

    run(scenario)


def test_what_is_quarantined_is_forgotten_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quarantine = Quarantine(tmp_path)
    prompt = np.array([1, 2, 3], np.uint32)
    assert not quarantine.holds(prompt, "")
    quarantine.add(prompt, "")
    assert quarantine.holds(prompt, "")
    assert not quarantine.holds(prompt, "root ::= x")
    assert not quarantine.holds(prompt[:2], "")
    (entry,) = (tmp_path / "quarantine").iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600
    assert abs(entry.stat().st_mtime - time.monotonic()) < 60.0, "the wall clock may jump"
    forgotten_s = time.monotonic() - suspects.REMEMBER_S
    os.utime(entry, (forgotten_s, forgotten_s))
    assert not quarantine.holds(prompt, "")
    monkeypatch.setattr(suspects, "MAX_REMEMBERED", 3)
    for number in range(6):
        quarantine.add(np.array([number], np.uint32), "")
    assert len(list((tmp_path / "quarantine").iterdir())) == 3
    assert quarantine.holds(np.array([5], np.uint32), "")
