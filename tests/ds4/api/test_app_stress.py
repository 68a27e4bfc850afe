"""Many clients that behave in every way at once, and workers that die: nothing is wrong, lost or left."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any, Final

import pytest

from ds4.generation import GenerationRequest
from tests.support.front_rig import Front, until, with_front

_WORDS: Final = ("hello", "world", "and", "the", "one", "STOP", "😀", "é")
_NUM_CLIENTS: Final = 150


def _say(seed: int) -> str:
    """What the scripted worker answers to this seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(1, 40)))


def _script(front: Front) -> Any:
    def script(request: GenerationRequest, prompt: list[int]) -> list[int]:
        return front.encode(_say(request.sampling.seed))

    return script


def _shown(seed: int, stop: str | None) -> str:
    said = _say(seed)
    return said if stop is None or stop not in said else said[: said.index(stop)]


async def _leave(front: Front, body: dict[str, Any], rng: random.Random) -> None:
    """Ask, perhaps read a little, and hang up."""
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    writer.write((head + raw)[: rng.choice([10, len(head), len(head) + 5, len(head) + len(raw)])])
    await writer.drain()
    if rng.random() < 0.5:
        await asyncio.sleep(rng.random() * 0.02)
    writer.close()


async def _ask(front: Front, seed: int, counts: dict[str, int]) -> None:
    rng = random.Random(seed)
    stop = rng.choice([None, "STOP", "l"])
    number = rng.choice([1, 1, 3])
    body = {"messages": [{"role": "user", "content": "hi"}], "seed": seed, "n": number, "stop": stop}
    wanted = [_shown(seed + index, stop) for index in range(number)]
    if rng.random() < 0.3:
        await _leave(front, {**body, "stream": rng.random() < 0.5}, rng)
        counts["left"] += 1
        return
    while True:
        response = await front.client.post("/v1/chat/completions", json={**body, "stream": seed % 2 == 0})
        if response.status_code not in (429, 503):
            break
        counts["refused"] += 1
        await asyncio.sleep(0.02)
    assert response.status_code == 200, response.text
    if seed % 2:
        texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    else:
        texts = [""] * number
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == wanted
    counts["served"] += 1


@pytest.mark.stress
def test_nothing_is_wrong_lost_or_left_behind(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        counts = {"served": 0, "left": 0, "refused": 0}
        front.start_worker(_script(front))
        await front.ready()
        clients = [asyncio.ensure_future(_ask(front, seed * 10, counts)) for seed in range(_NUM_CLIENTS // 2)]
        clients += [
            asyncio.ensure_future(_ask(front, seed * 10 + 5, counts)) for seed in range(_NUM_CLIENTS // 2)
        ]
        for served in (20, 50):
            await until(lambda n=served: counts["served"] >= n or all(each.done() for each in clients))  # type: ignore[misc]
            assert front.worker is not None
            front.worker.stop()
            front.start_worker(_script(front))
        await asyncio.gather(*clients)
        assert counts["served"] + counts["left"] == 2 * (_NUM_CLIENTS // 2)
        assert counts["left"] > 10
        engine = front.state.engine
        await front.ready()
        await until(lambda: engine.ring.num_free_slots == 8)
        assert front.worker is not None
        worker = front.worker
        await until(lambda: worker.num_open == 0)
        assert engine.num_running == 0
        assert engine.num_resuming == 0
        assert engine.num_preparing == 0
        assert engine.metrics.value("ds4_http_responses_total", "5xx") <= counts["refused"]

    with_front(tmp_path, scenario, None, resume_attempts=10)
