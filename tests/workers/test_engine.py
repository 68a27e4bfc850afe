"""The engine over the real ring and a device that notices every wrong token, page and position."""

import asyncio
from pathlib import Path

import pytest

from ds4.errors import ErrorCode
from ds4.generation import FinishReason, SamplingParams
from tests.support.engine_rig import VOCAB_SIZE, EngineRig, run
from tests.support.fake_device import generate

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def expected(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    return generate(prompt, count, VOCAB_SIZE, seed)


@DEPTHS
def test_a_request_gets_the_devices_tokens_and_ends_at_its_limit(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth).serving() as rig:
            client = rig.submit([1, 2, 3], 20)
            await rig.finish(client)
            assert client.tokens == expected([1, 2, 3], 20)
            assert client.end is not None
            assert client.end.reason is FinishReason.LENGTH

    run(test())


@DEPTHS
def test_batch_mates_do_not_change_a_sequence(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth).serving() as rig:
            prompts = [[seed] * (1 + 13 * seed) for seed in range(12)]
            clients = []
            for prompt in prompts:
                clients.append(rig.submit(prompt, 24))
                await rig.turn()
            await rig.finish(*clients)
            for prompt, client in zip(prompts, clients, strict=True):
                assert client.tokens == expected(prompt, 24)

    run(test())


@DEPTHS
def test_a_stop_id_ends_the_request_and_is_not_delivered(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth).serving() as rig:
            full = expected([5, 6], 10)
            client, mate = rig.submit([5, 6], 10, stop_token_ids=(full[4],)), rig.submit([7], 30)
            await rig.finish(client, mate)
            assert client.tokens == full[:4]
            assert client.end is not None
            assert client.end.reason is FinishReason.STOP
            assert mate.tokens == expected([7], 30)

    run(test())


@DEPTHS
def test_a_failing_row_ends_alone(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, rows=16, pipeline_depth=depth, poisoned=[666]).serving() as rig:
            sound = rig.submit([1], 30)
            poisoned = rig.submit([2, 666] * 20, 30)
            await rig.finish(sound, poisoned)
            assert sound.tokens == expected([1], 30)
            assert poisoned.tokens == []
            assert poisoned.end is not None
            assert poisoned.end.error_code == ErrorCode.NUMERIC
            assert poisoned.end.error_text
            again = rig.submit([2, 666] * 20, 30)  # nothing of it may be shared
            await rig.finish(again)
            assert again.end is not None
            assert again.end.num_cached_tokens == 0

    run(test())


@DEPTHS
def test_preemption_does_not_change_the_tokens(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, pages=8, seats=4).serving() as rig:
            clients = [rig.submit([seed] * 20, 60) for seed in range(6)]
            await rig.finish(*clients)
            for seed, client in enumerate(clients):
                assert client.tokens == expected([seed] * 20, 60)
                assert client.end is not None
                assert client.end.num_cached_tokens == 0, "what it computed itself before is no hit"
            assert rig.metrics.value("ds4_num_preemptions_total") > 0

    run(test())


@DEPTHS
def test_a_resumed_request_continues_with_the_same_tokens(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth).serving() as rig:
            prompt, full = [9, 8, 7], expected([9, 8, 7], 40)
            client = rig.submit(prompt + full[:15], 40, num_resumed_tokens=15)
            await rig.finish(client)
            assert client.tokens == full[15:]
            assert client.end is not None
            assert client.end.reason is FinishReason.LENGTH

    run(test())


def test_a_prompt_seen_before_is_taken_from_the_cache(tmp_path: Path) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path).serving() as rig:
            prompt = list(range(100))
            first = rig.submit(prompt, 4)
            await rig.finish(first)
            rows = rig.device.num_rows
            second = rig.submit(prompt, 4)
            await rig.finish(second)
            assert second.tokens == first.tokens
            assert first.end is not None
            assert second.end is not None
            assert first.end.num_cached_tokens == 0
            assert second.end.num_cached_tokens == 96
            assert rig.device.num_rows - rows == 4 + 3

    run(test())


def test_an_engine_does_not_sleep_before_a_long_prompt_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.scheduler.scheduler._MAX_DIGESTS", 8)

    async def test() -> None:
        async with EngineRig(tmp_path, pages=64, rows=64, context=512).serving() as rig:
            prompt = [number % 900 for number in range(401)]
            await rig.finish(rig.submit(prompt, 1))
            client = rig.submit(prompt, 4)
            num_turns = 0
            while client.end is None:
                assert rig.engine.step(), "there is something to do"
                num_turns += 1
                for _ in range(3):
                    await asyncio.sleep(0)
            assert num_turns >= 25 // 4
            assert client.tokens == expected(prompt, 4)
            assert client.end.num_cached_tokens == 400
            await rig.settle()

    run(test())


def test_a_wholly_cached_prompt_still_computes_its_last_page(tmp_path: Path) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path).serving() as rig:
            prompt = list(range(32))
            await rig.finish(first := rig.submit(prompt, 40))
            await rig.finish(second := rig.submit(prompt, 40))
            assert second.tokens == first.tokens
            assert second.end is not None
            assert second.end.num_cached_tokens == 16

    run(test())


def test_seeds_and_logprobs_reach_the_client(tmp_path: Path) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path).serving() as rig:
            client = rig.submit([3], 5, sampling=SamplingParams(seed=77, num_logprobs=3))
            plain = rig.submit([3], 5)
            await rig.finish(client, plain)
            assert client.tokens == expected([3], 5, seed=77)
            event = client.events[2]
            assert event.logprob == pytest.approx(-0.5 - event.token_id)
            assert [token_id for token_id, _ in event.top] == [event.token_id + rank for rank in range(3)]
            assert plain.events[2].top == ()

    run(test())
