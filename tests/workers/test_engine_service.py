"""The engine as a service: coalescing, the batch line, metrics, drain, device faults, idleness."""

import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4.config import Settings
from ds4.errors import ErrorCode, RingUnavailableError
from ds4.generation import FinishReason
from ds4.logs import setup_logging
from ds4.ring.states import WorkerState
from tests.support.engine_rig import VOCAB_SIZE, EngineRig, run
from tests.support.fake_device import generate
from workers.devices.interface import DeviceFaultError

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
BATCH_LINE = re.compile(r"ds4-server: decode batch count=(\d+) elapsed=(\d+\.\d) ms status=(.+)")


@pytest.fixture
def standard_error(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the process logs."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging(Settings(log_level="error"), "worker")
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def rig_with(directory: Path, depth: int = 0, **settings: object) -> EngineRig:
    values: dict[str, object] = {"batched_sessions": 4, "max_batch_tokens": 64, "decode_coalesce_us": 0}
    return EngineRig(directory, pipeline_depth=depth, settings=Settings(**{**values, **settings}))  # type: ignore[arg-type]


@DEPTHS
def test_every_decode_batch_has_its_line(tmp_path: Path, depth: int, standard_error: io.StringIO) -> None:
    async def test() -> None:
        async with rig_with(tmp_path, depth, batch_log=True).serving() as rig:
            await rig.finish(rig.submit([1], 6), rig.submit([2], 6), rig.submit([3], 3))

    run(test())
    lines = standard_error.getvalue().splitlines()
    assert lines == [
        *["ds4-server: decode batch count=3 elapsed=12.3 ms status=ok"] * 2,
        *["ds4-server: decode batch count=2 elapsed=12.3 ms status=ok"] * 3,
    ]


def test_the_batch_line_counts_decode_rows_only(tmp_path: Path, standard_error: io.StringIO) -> None:
    async def test() -> None:
        async with rig_with(tmp_path, batch_log=True).serving() as rig:
            first = rig.submit([1], 3)
            await rig.turn()
            await rig.finish(first, rig.submit([2] * 40, 1))

    run(test())
    lines = standard_error.getvalue().splitlines()
    assert lines == ["ds4-server: decode batch count=1 elapsed=12.3 ms status=ok"] * 2


def test_there_is_no_batch_line_unless_asked(tmp_path: Path, standard_error: io.StringIO) -> None:
    async def test() -> None:
        async with rig_with(tmp_path).serving() as rig:
            await rig.finish(rig.submit([1], 6))

    run(test())
    assert "decode batch" not in standard_error.getvalue()


@DEPTHS
def test_a_device_fault_is_raised_and_shown_in_the_batch_line(
    tmp_path: Path, depth: int, standard_error: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with rig_with(tmp_path, depth, batch_log=True).serving() as rig:
            client = rig.submit([1], 50)
            await rig.until(lambda: len(client.tokens) >= 3)
            rig.device.fault_at_step = 0
            with pytest.raises(DeviceFaultError):
                await rig.turn(3)
            assert client.end is None, "the front end resumes it elsewhere: it must not have an ending"
            assert rig.metrics.value("ds4_step_errors_total") == 1
            rig.ring.close()
            monkeypatch.setattr(rig.ring, "close", lambda: None)
            with pytest.raises(RingUnavailableError):
                await client.task
            assert client.tokens == generate([1], len(client.tokens), VOCAB_SIZE)

    run(test())
    lines = [line for line in standard_error.getvalue().splitlines() if "decode batch" in line]
    match = BATCH_LINE.fullmatch(lines[-1])
    assert match is not None
    assert match[3] == "error the fake device was told to fail"


class Clock:
    """The window's, in place of the machine's: it stands until a test moves it."""

    def __init__(self, rig: EngineRig) -> None:
        self.now = 100.0
        rig.engine._window._clock = lambda: self.now


def test_requests_that_are_being_prepared_start_together(tmp_path: Path) -> None:
    async def test() -> None:
        async with rig_with(tmp_path, decode_coalesce_us=100_000).serving() as rig:
            Clock(rig)
            rig.front_ends[0].set_preparing(2)
            first = rig.submit([1], 3)
            await rig.turn(2)
            assert rig.device.num_steps == 0
            rig.front_ends[0].set_preparing(1)
            second = rig.submit([2], 3)
            await rig.turn(2)
            assert rig.device.num_steps == 0
            rig.front_ends[0].set_preparing(0)
            await rig.finish(first, second)
            assert [num_sequences for _, num_sequences in rig.device.batches] == [2, 2, 2]

    run(test())


def test_every_start_from_idle_has_its_own_window(tmp_path: Path) -> None:
    async def test() -> None:
        async with rig_with(tmp_path, decode_coalesce_us=100_000).serving() as rig:
            clock = Clock(rig)
            rig.front_ends[0].set_preparing(1)  # and never arrives
            for number in range(2):
                steps = rig.device.num_steps
                client = rig.submit([number], 3)
                await rig.turn(2)
                assert rig.device.num_steps == steps
                clock.now += 0.1
                await rig.finish(client)

    run(test())


def test_a_running_engine_does_not_wait_for_those_on_the_way(tmp_path: Path) -> None:
    async def test() -> None:
        async with rig_with(tmp_path, decode_coalesce_us=100_000).serving() as rig:
            Clock(rig)
            first = rig.submit([1], 30)
            await rig.turn(2)
            rig.front_ends[0].set_preparing(5)
            steps = rig.device.num_steps
            await rig.turn(4)
            assert rig.device.num_steps == steps + 4
            await rig.finish(first)

    run(test())


def test_draining_finishes_who_is_here_and_refuses_who_comes(tmp_path: Path) -> None:
    async def test() -> None:
        async with rig_with(tmp_path, batched_sessions=1).serving() as rig:
            running, waiting = rig.submit([1], 10), rig.submit([2], 10)
            await rig.turn(2)
            last = rig.submit([3], 4)  # in the ring before the drain: it still counts
            rig.engine.request_drain()
            assert rig.engine._drained() is False
            assert rig.front_ends[0].worker_state is WorkerState.DRAINING
            with pytest.raises(RingUnavailableError):
                rig.submit([4], 4)
            rig.engine.run()
            await rig.finish(running, waiting, last)
            assert running.tokens == generate([1], 10, VOCAB_SIZE)
            assert waiting.tokens == generate([2], 10, VOCAB_SIZE)
            assert last.tokens == generate([3], 4, VOCAB_SIZE)

    run(test())


@DEPTHS
def test_what_is_left_at_the_drain_deadline_ends_with_an_error(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with rig_with(tmp_path, depth, batched_sessions=1, drain_timeout_s=0).serving() as rig:
            running, waiting = rig.submit([1], 100), rig.submit([2], 100)
            await rig.until(lambda: len(running.tokens) >= 3)
            rig.engine.request_drain()
            rig.engine.run()
            await rig.finish(running, waiting)
            assert running.tokens == generate([1], len(running.tokens), VOCAB_SIZE)
            for client in (running, waiting):
                assert client.end is not None
                assert client.end.reason is FinishReason.ERROR
                assert client.end.error_code == ErrorCode.SHUTTING_DOWN

    run(test())


def test_a_request_that_slips_in_while_draining_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with rig_with(tmp_path).serving() as rig:
            running = rig.submit([1], 10)
            await rig.turn()
            rig.engine.request_drain()
            rig.engine._drained()
            rig.ring.set_state(WorkerState.READY)  # a front end that has not noticed yet
            late = rig.submit([2], 10)
            await rig.finish(running, late)
            assert late.end is not None
            assert late.end.error_code == ErrorCode.SHUTTING_DOWN
            assert running.tokens == generate([1], 10, VOCAB_SIZE)

    run(test())


def test_the_numbers_of_a_request_are_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with rig_with(tmp_path).serving() as rig:
            prompt = list(range(40))
            await rig.finish(rig.submit(prompt, 5))
            await rig.finish(rig.submit(prompt, 5))
            metrics = rig.metrics
            assert metrics.value("ds4_prefix_cache_queries_total") == 80
            assert metrics.value("ds4_prefix_cache_hits_total") == 32
            assert metrics.value("ds4_prefill_tokens_total") == 40 + 8
            assert metrics.samples("ds4_batch_size") == (8, 8.0)
            assert metrics.samples("ds4_request_queue_time_seconds")[0] == 2
            assert metrics.samples("ds4_request_prefill_time_seconds")[0] == 2
            assert metrics.samples("ds4_request_decode_time_seconds")[0] == 2
            rig.engine._rest()
            assert metrics.value("ds4_kv_pages") == 64
            assert metrics.value("ds4_kv_pages_used") == 0
            assert metrics.value("ds4_kv_pages_cached") == 2
            assert metrics.value("ds4_num_requests_running") == 0

    run(test())


def test_an_idle_engine_has_nothing_to_compute_and_its_books_balance(tmp_path: Path) -> None:
    async def test() -> None:
        async with rig_with(tmp_path).serving() as rig:
            assert rig.engine.step() is False
            await rig.finish(rig.submit([1] * 50, 5))
            assert rig.engine.step() is False
            rig.scheduler.cache.take([], 1)  # a page is lost
            with pytest.raises(AssertionError):
                rig.engine._rest()

    run(test())
