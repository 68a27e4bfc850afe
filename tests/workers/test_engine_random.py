"""Random load on a small engine: every token of every request is checked, whatever happens around it."""

import asyncio
import random
from pathlib import Path

import pytest

from ds4.generation import FinishReason, SamplingParams
from tests.support.engine_rig import VOCAB_SIZE, Client, EngineRig, run
from tests.support.fake_device import generate
from workers import engine

PREFIXES = [[token] * length for token, length in ((1, 40), (1, 17), (2, 33), (3, 5))]


class Load:
    """Requests that come, are cancelled, read slowly, stop early or share prefixes."""

    def __init__(self, rig: EngineRig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.requests: list[tuple[Client, list[int], FinishReason]] = []
        self.cancelled: set[int] = set()
        self.stalled: dict[int, Client] = {}

    def submit(self) -> None:
        choose = self.random
        prompt = choose.choice(PREFIXES) + [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(20))]
        count, seed = choose.randint(1, 40), choose.randrange(3)
        full = generate(prompt, count, VOCAB_SIZE, seed)
        resumed = choose.randrange(count) if choose.random() < 0.3 else 0
        stop: tuple[int, ...] = ()
        reason = FinishReason.LENGTH
        if choose.random() < 0.4:
            stop, reason = (full[-1],), FinishReason.STOP
            full = full[: full.index(full[-1])]
            resumed = min(resumed, len(full))
        client = self.rig.submit(
            prompt + full[:resumed],
            count,
            front_end=choose.randrange(len(self.rig.front_ends)),
            sampling=SamplingParams(seed=seed),
            stop_token_ids=stop,
            num_resumed_tokens=resumed,
        )
        self.requests.append((client, full[resumed:], reason))

    async def disturb(self) -> None:
        choose = self.random
        index = choose.randrange(len(self.requests))
        client = self.requests[index][0]
        what = choose.random()
        if what < 0.1:
            client.stream.cancel()
            self.cancelled.add(index)
        elif what < 0.3 and client.end is None and index not in self.stalled:
            client.task.cancel()
            await asyncio.gather(client.task, return_exceptions=True)
            self.stalled[index] = client
        elif self.stalled and what < 0.6:
            self.resume(choose.choice(list(self.stalled)))

    def resume(self, index: int) -> None:
        client = self.stalled.pop(index)
        if client.end is None:
            client.task = asyncio.ensure_future(client._read())

    async def finish(self) -> None:
        for index in list(self.stalled):
            self.resume(index)
        await self.rig.finish(*(client for client, _, _ in self.requests))

    def check(self) -> None:
        for index, (client, full, reason) in enumerate(self.requests):
            assert client.end is not None
            if client.end.reason is FinishReason.CANCELLED:
                assert index in self.cancelled
                assert client.tokens == full[: len(client.tokens)]
            else:
                assert (client.end.reason, client.tokens) == (reason, full)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_right_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, depth: int
) -> None:
    monkeypatch.setattr(engine, "_PATIENCE_S", 0.0)  # slow readers are set aside at once

    async def test() -> None:
        choose = random.Random(seed)
        rig = EngineRig(
            tmp_path,
            pipeline_depth=depth,
            seats=choose.randint(1, 6),
            rows=choose.choice([6, 16, 40]),
            pages=choose.randint(8, 24),
            front_ends=2,
            slots=32,
            window=choose.choice([1, 3, 512]),
        )
        async with rig.serving():
            load = Load(rig, seed)
            for _ in range(28):
                load.submit()
                for _ in range(choose.randrange(12)):
                    await rig.turn()
                    await load.disturb()
            await load.finish()
            load.check()

    run(test())
