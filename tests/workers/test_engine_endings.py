"""How requests end early: cancelled in every state, refused, too large, readers gone, slow or dead."""

from pathlib import Path

import msgspec
import pytest

from ds4.config import Settings
from ds4.errors import ErrorCode
from ds4.generation import FinishReason, GenerationRequest, SamplingParams
from ds4.ring.states import SlotState
from tests.support.engine_rig import VOCAB_SIZE, Client, EngineRig, run
from tests.support.fake_device import generate
from workers import engine

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def reason_of(client: Client) -> FinishReason:
    assert client.end is not None
    return client.end.reason


@DEPTHS
def test_a_cancel_after_any_number_of_turns_frees_everything(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, rows=16, seats=2).serving() as rig:
            for turns in range(25):  # waiting, in prefill, decoding, at its end
                mate = rig.submit([turns, 1], 12)
                victim = rig.submit([turns] * 70, 10)
                waiting = rig.submit([turns, 2], 5)
                await rig.turn(turns)
                victim.stream.cancel()
                await rig.finish(mate, victim, waiting)
                full = generate([turns] * 70, 10, VOCAB_SIZE)
                assert victim.tokens == full[: len(victim.tokens)]
                if reason_of(victim) is FinishReason.LENGTH:
                    assert victim.tokens == full
                else:
                    assert reason_of(victim) is FinishReason.CANCELLED
                assert mate.tokens == generate([turns, 1], 12, VOCAB_SIZE)
                assert waiting.tokens == generate([turns, 2], 5, VOCAB_SIZE)
            assert rig.ring.num_pending == 0

    run(test())


@DEPTHS
def test_a_cancelled_request_in_the_queue_never_runs(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, seats=1).serving() as rig:
            running = rig.submit([1], 10)
            await rig.turn(2)
            queued = rig.submit([2], 10)
            await rig.turn()
            queued.stream.cancel()
            await rig.until(lambda: queued.end is not None)
            assert running.end is None
            assert queued.tokens == []
            await rig.finish(running)
            assert running.tokens == generate([1], 10, VOCAB_SIZE)

    run(test())


@DEPTHS
def test_a_front_end_that_leaves_frees_its_sequences_in_every_state(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        rig = EngineRig(tmp_path, pipeline_depth=depth, seats=2, rows=16, front_ends=2)
        async with rig.serving():
            mine = rig.submit([1], 40, front_end=0)
            for seed in range(4):  # one decodes or prefills, the others wait
                rig.submit([seed] * 50, 40, front_end=1).task.add_done_callback(lambda task: task.exception())
            await rig.turn(6)
            await rig.front_ends[1].close()
            await rig.finish(mine)
            assert mine.tokens == generate([1], 40, VOCAB_SIZE)

    run(test())


@DEPTHS
@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_slow_reader_loses_nothing_and_delays_nobody(tmp_path: Path, depth: int, window: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, window=window).serving() as rig:
            slow = rig.submit([1], 30)
            slow.task.cancel()  # nobody reads: its credit is used up
            fast = rig.submit([2], 60)
            await rig.until(lambda: fast.end is not None)
            assert fast.tokens == generate([2], 60, VOCAB_SIZE)
            assert rig.scheduler.running, "the slow one must still have its seat"
            assert rig.engine.step() is False, "an engine with paused rows only may sleep"
            again = Client(slow.stream)
            await rig.finish(again)
            assert again.tokens == generate([1], 30, VOCAB_SIZE)

    run(test())


def test_a_reader_that_stays_slow_gives_its_seat_to_those_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_PATIENCE_S", 0.0)

    async def test() -> None:
        async with EngineRig(tmp_path, seats=1, window=3).serving() as rig:
            slow = rig.submit([1], 30)
            slow.task.cancel()
            await rig.turn(10)
            fast = rig.submit([2], 30)
            await rig.until(lambda: fast.end is not None)
            assert fast.tokens == generate([2], 30, VOCAB_SIZE)
            again = Client(slow.stream)
            await rig.finish(again)
            assert again.tokens == generate([1], 30, VOCAB_SIZE)

    run(test())


def test_a_paused_slot_is_shown_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_STATUS_S", 0.0)

    async def test() -> None:
        async with EngineRig(tmp_path, window=3).serving() as rig:
            slow, fast = rig.submit([1] * 20, 30), rig.submit([2], 100)
            slow.task.cancel()
            await rig.turn(12)
            shown = {status.slot: status for status in rig.front_ends[0].slots()}
            assert shown[slow.stream.slot].state is SlotState.PAUSED
            assert shown[slow.stream.slot].num_prompt_tokens == 20
            assert shown[fast.stream.slot].state is SlotState.DECODE
            assert shown[fast.stream.slot].num_generated_tokens > 5
            again = Client(slow.stream)
            await rig.finish(fast, again)

    run(test())


BAD = {
    "undecodable": b"\x00nonsense",
    "max_tokens": GenerationRequest(max_tokens=-1),
    "min_tokens": GenerationRequest(max_tokens=1, min_tokens=-1),
    "tenant": GenerationRequest(max_tokens=1, tenant=1 << 32),
    "weight": GenerationRequest(max_tokens=1, weight=0),
    "stop id": GenerationRequest(max_tokens=1, stop_token_ids=(VOCAB_SIZE,)),
    "negative stop id": GenerationRequest(max_tokens=1, stop_token_ids=(-1,)),
    "many stop ids": GenerationRequest(max_tokens=1, stop_token_ids=(1,) * 4097),
    "many biases": GenerationRequest(max_tokens=1, sampling=SamplingParams(logit_bias=((1, 1.0),) * 65_537)),
    "resumed": GenerationRequest(max_tokens=9, num_resumed_tokens=2),
    "negative resumed": GenerationRequest(max_tokens=9, num_resumed_tokens=-1),
    "bias id": GenerationRequest(max_tokens=1, sampling=SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))),
    "bias NaN": GenerationRequest(max_tokens=1, sampling=SamplingParams(logit_bias=((1, float("nan")),))),
    "temperature NaN": GenerationRequest(max_tokens=1, sampling=SamplingParams(temperature=float("nan"))),
    "temperature": GenerationRequest(max_tokens=1, sampling=SamplingParams(temperature=-1.0)),
    "top_k": GenerationRequest(max_tokens=1, sampling=SamplingParams(top_k=-1)),
    "top_p": GenerationRequest(max_tokens=1, sampling=SamplingParams(top_p=1.5)),
    "min_p": GenerationRequest(max_tokens=1, sampling=SamplingParams(min_p=-0.5)),
    "typical_p": GenerationRequest(max_tokens=1, sampling=SamplingParams(typical_p=1.5)),
    "penalty": GenerationRequest(max_tokens=1, sampling=SamplingParams(repetition_penalty=0.0)),
    "penalty inf": GenerationRequest(max_tokens=1, sampling=SamplingParams(presence_penalty=float("inf"))),
    "frequency NaN": GenerationRequest(max_tokens=1, sampling=SamplingParams(frequency_penalty=float("nan"))),
    "seed": GenerationRequest(max_tokens=1, sampling=SamplingParams(seed=-5)),
    "logprobs": GenerationRequest(max_tokens=1, sampling=SamplingParams(num_logprobs=21)),
}


def test_every_field_out_of_range_ends_that_request_alone_with_a_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, slots=64).serving() as rig:
            good = rig.submit([1], 40)
            for what, request in BAD.items():
                raw = request if isinstance(request, bytes) else msgspec.msgpack.encode(request)
                client = rig.submit([1, 2], raw=raw)
                await rig.until(lambda client=client: client.end is not None)  # type: ignore[misc]
                assert client.end is not None
                assert (what, client.end.error_code) == (what, ErrorCode.INVALID_REQUEST)
                assert client.end.error_text, what
            assert rig.ring.num_pending == 0
            await rig.finish(good)
            assert good.tokens == generate([1], 40, VOCAB_SIZE)

    run(test())


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], ErrorCode.INVALID_REQUEST),
        ([VOCAB_SIZE], ErrorCode.INVALID_REQUEST),
        ([0xFFFFFFFF], ErrorCode.INVALID_REQUEST),
        ([1] * 200, ErrorCode.INVALID_REQUEST),  # the context is full
        ([1] * 257, ErrorCode.TOO_LARGE),  # more than all pages hold
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused(tmp_path: Path, prompt: list[int], code: ErrorCode) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, context=200, pages=16).serving() as rig:
            client = rig.submit(prompt, 4)
            await rig.finish(client)
            assert client.end is not None
            assert client.end.error_code == code
            assert client.end.error_text

    run(test())


@DEPTHS
def test_a_full_context_ends_with_length(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, context=50).serving() as rig:
            client = rig.submit([1] * 40, 1000)
            await rig.finish(client)
            assert reason_of(client) is FinishReason.LENGTH
            assert client.tokens == generate([1] * 40, 10, VOCAB_SIZE)

    run(test())


def test_a_sequence_may_fill_the_whole_cache(tmp_path: Path) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pages=4, context=512).serving() as rig:
            client = rig.submit([1] * 40, 1000)
            await rig.finish(client)
            assert reason_of(client) is FinishReason.LENGTH
            assert len(client.tokens) == 24

    run(test())


@DEPTHS
def test_a_sequence_that_outgrows_the_cache_alone_ends_with_an_error(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, pages=4, context=512).serving() as rig:
            rig.engine._admission._max_context_tokens = 512  # as if main had not cut the context to the cache
            client, mate = rig.submit([1] * 40, 1000), rig.submit([2], 5)
            await rig.finish(client, mate)
            assert client.end is not None
            assert client.end.error_code == ErrorCode.TOO_LARGE
            assert client.tokens == generate([1] * 40, 25, VOCAB_SIZE)
            assert mate.tokens == generate([2], 5, VOCAB_SIZE)

    run(test())


def test_nothing_to_generate_ends_with_length_and_no_token(tmp_path: Path) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path).serving() as rig:
            none, resumed = rig.submit([1, 2], 0), rig.submit([1, 2, 3], 2, num_resumed_tokens=2)
            await rig.finish(none, resumed)
            for client in (none, resumed):
                assert reason_of(client) is FinishReason.LENGTH
                assert client.tokens == []

    run(test())


@DEPTHS
def test_min_tokens_keeps_stop_ids_away_until_then(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth).serving() as rig:
            plain = generate([5, 6], 3, VOCAB_SIZE)
            client = rig.submit([5, 6], 40, min_tokens=3, stop_token_ids=(plain[0],))
            await rig.until(lambda: len(client.tokens) >= 3 or client.end is not None)
            assert client.tokens[0] == (plain[0] + 1) % VOCAB_SIZE
            client.stream.cancel()
            await rig.finish(client)

    run(test())


@DEPTHS
def test_min_tokens_counts_resumed_output(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth).serving() as rig:
            stop = generate([5, 6, 7], 1, VOCAB_SIZE)[0]
            reached = rig.submit([5, 6, 7], 9, min_tokens=2, stop_token_ids=(stop,), num_resumed_tokens=2)
            missing = rig.submit([5, 6, 7], 9, min_tokens=3, stop_token_ids=(stop,), num_resumed_tokens=2)
            await rig.finish(reached, missing)
            assert (reason_of(reached), reached.tokens) == (FinishReason.STOP, [])
            assert missing.tokens[0] == (stop + 1) % VOCAB_SIZE

    run(test())


def test_batching_off_runs_one_session_at_a_time_in_order(tmp_path: Path) -> None:
    async def test() -> None:
        settings = Settings(batched_sessions=0, max_batch_tokens=64, decode_coalesce_us=0)
        rig = EngineRig(tmp_path, settings=settings, front_ends=2)
        async with rig.serving():
            clients = [rig.submit([seed], 5, front_end=seed // 3) for seed in range(6)]
            order: list[int] = []
            for seed, client in enumerate(clients):
                client.task.add_done_callback(lambda _, seed=seed: order.append(seed))  # type: ignore[misc]
            await rig.finish(*clients)
            assert order == list(range(6))
            assert all(num_sequences == 1 for _, num_sequences in rig.device.batches)

    run(test())
