"""workers/backlog.py and what the scheduler does for it: prompts whose own tokens are scored."""

from pathlib import Path
from typing import Any

import pytest

from ds4.errors import ErrorCode
from ds4.generation import FinishReason, SamplingParams
from tests.support.engine_rig import VOCAB_SIZE, Client, EngineRig, run
from tests.support.fake_device import generate

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
_PROMPT = [7 * index % 900 for index in range(75)]


def _score(rig: EngineRig, prompt: list[int], num_logprobs: int = 0, **fields: Any) -> Client:
    sampling = SamplingParams(temperature=0.0, num_logprobs=num_logprobs)
    return rig.submit(prompt, max(1, len(prompt) - 1), sampling=sampling, scores_prompt=True, **fields)


def _is_scored(client: Client, prompt: list[int]) -> None:
    assert client.tokens == prompt[1:]
    assert [event.logprob for event in client.events] == [-0.5 - token for token in prompt[1:]]
    assert client.end is not None
    assert client.end.reason is FinishReason.LENGTH


@DEPTHS
@pytest.mark.parametrize("seats", [1, 4])
def test_every_token_but_the_first_has_its_score(tmp_path: Path, depth: int, seats: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, seats=seats, rows=16).serving() as rig:
            client = _score(rig, _PROMPT, num_logprobs=3)
            await rig.finish(client)
            _is_scored(client, _PROMPT)
            assert [len(event.top) for event in client.events] == [3] * (len(_PROMPT) - 1)
            assert client.events[0].top[1] == (_PROMPT[1] + 1, -1.5 - _PROMPT[1])

    run(test())


@DEPTHS
def test_a_lone_prompt_is_scored_on_all_seats_at_once(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, seats=4).serving() as rig:
            client = _score(rig, list(range(9)))
            await rig.finish(client)
            assert rig.device.batches == [(4, 1), (4, 1)]

    run(test())


@DEPTHS
def test_what_the_cache_holds_is_scored_all_the_same(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth).serving() as rig:
            for _ in range(2):
                client = _score(rig, _PROMPT)
                await rig.finish(client)
                _is_scored(client, _PROMPT)
            follower = rig.submit(_PROMPT, 5)
            await rig.finish(follower)
            assert follower.tokens == generate(_PROMPT, 5, VOCAB_SIZE)
            assert follower.end is not None
            assert follower.end.num_cached_tokens == 64  # and what was scored is there for others

    run(test())


@DEPTHS
@pytest.mark.parametrize("seats", [1, 2, 5])
def test_scored_and_generating_requests_share_their_steps(tmp_path: Path, depth: int, seats: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, seats=seats, rows=16).serving() as rig:
            scored = [_score(rig, [start, *_PROMPT[: 20 + start]]) for start in range(4)]
            others = [rig.submit([start, 3], 30) for start in range(4)]
            await rig.finish(*scored, *others)
            for start in range(4):
                _is_scored(scored[start], [start, *_PROMPT[: 20 + start]])
                assert others[start].tokens == generate([start, 3], 30, VOCAB_SIZE)

    run(test())


@DEPTHS
def test_a_prompt_that_loses_its_pages_is_scored_once(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        rig = EngineRig(tmp_path, pipeline_depth=depth, seats=3, rows=8, pages=9)
        async with rig.serving():
            growing = [rig.submit([start] * 20, 60) for start in range(2)]
            await rig.turn(8)
            scored = _score(rig, _PROMPT[:60])
            await rig.finish(*growing, scored)
            _is_scored(scored, _PROMPT[:60])
            for start in range(2):
                assert growing[start].tokens == generate([start] * 20, 60, VOCAB_SIZE)

    run(test())


@DEPTHS
def test_a_cancel_after_any_number_of_turns_frees_everything(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, seats=3, rows=16).serving() as rig:
            for turns in range(20):
                mate = rig.submit([turns, 1], 12)
                victim = _score(rig, _PROMPT)
                await rig.turn(turns)
                victim.stream.cancel()
                await rig.finish(mate, victim)
                assert victim.tokens == _PROMPT[1 : 1 + len(victim.tokens)]
                assert mate.tokens == generate([turns, 1], 12, VOCAB_SIZE)

    run(test())


@DEPTHS
def test_a_reader_without_credit_gets_every_score_later(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        rig = EngineRig(tmp_path, pipeline_depth=depth, seats=4, window=8)
        async with rig.serving():
            client = _score(rig, _PROMPT)
            client.task.cancel()
            await rig.turn(60)
            assert rig.device.num_rows < len(_PROMPT), "computed past what the reader takes"
            reader = Client(client.stream)
            await rig.finish(reader)
            _is_scored(reader, _PROMPT)

    run(test())


@DEPTHS
@pytest.mark.parametrize("num_done", [1, 40, 73])
def test_scoring_goes_on_where_an_earlier_worker_left(tmp_path: Path, depth: int, num_done: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth).serving() as rig:
            resumed = [*_PROMPT, *_PROMPT[1 : 1 + num_done]]
            client = _score(rig, resumed, num_resumed_tokens=num_done)
            await rig.finish(client)
            assert client.tokens == _PROMPT[1 + num_done :]

    run(test())


@DEPTHS
def test_a_row_that_fails_ends_its_prompt_alone(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        rig = EngineRig(tmp_path, pipeline_depth=depth, poisoned=[999])
        async with rig.serving():
            bad, good = _score(rig, [*_PROMPT[:30], 999, *_PROMPT[:30]]), _score(rig, _PROMPT)
            await rig.finish(bad, good)
            _is_scored(good, _PROMPT)
            assert bad.end is not None
            assert bad.end.error_code == ErrorCode.NUMERIC

    run(test())


@DEPTHS
def test_a_prompt_may_fill_the_context(tmp_path: Path, depth: int) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path, pipeline_depth=depth, context=64).serving() as rig:
            client, longer = _score(rig, _PROMPT[:64]), _score(rig, _PROMPT[:65])
            resumed = _score(rig, [*_PROMPT[:64], *_PROMPT[1:60]], num_resumed_tokens=59)
            await rig.finish(client, longer, resumed)
            _is_scored(client, _PROMPT[:64])
            assert resumed.tokens == _PROMPT[60:64]
            assert longer.end is not None
            assert longer.end.error_code == ErrorCode.INVALID_REQUEST

    run(test())


def test_a_prompt_of_one_token_has_nothing_to_score(tmp_path: Path) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path).serving() as rig:
            client = _score(rig, [5])
            await rig.finish(client)
            assert client.tokens == []

    run(test())


def test_more_scores_than_the_prompt_can_have_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with EngineRig(tmp_path).serving() as rig:
            client = _score(rig, [5, 6, 7, 8], num_resumed_tokens=2)
            await rig.finish(client)
            assert client.end is not None
            assert client.end.error_code == ErrorCode.INVALID_REQUEST

    run(test())
