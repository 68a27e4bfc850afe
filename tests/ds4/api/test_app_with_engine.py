"""The front end with the real worker engine behind the real ring; only the device is fake."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from ds4.api.chat import chat_job
from ds4.config import Settings
from ds4.generation import ModelInfo, encode_model_info
from ds4.metrics import WORKER, Metrics
from ds4.protocol.openai_chat import ChatMessage, ChatRequest
from ds4.ring.layout import RingShape
from ds4.ring.states import WorkerState
from ds4.ring.worker_end import WorkerRing
from tests.support.fake_device import FakeDevice, generate
from tests.support.front_rig import Front, run, running_front, until
from workers.devices.interface import PAGE_TOKENS, Limits, StepBatch
from workers.engine import build_engine

_LIMITS: Final = Limits(max_rows=32, max_seats=4, max_context_tokens=512, num_pages=96)


class _Held(FakeDevice):
    """Computes nothing before `go` is set."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(limits, **options)
        self.go = threading.Event()

    def submit(self, batch: StepBatch) -> None:
        self.go.wait()
        super().submit(batch)


@contextlib.asynccontextmanager
async def _engine(front: Front) -> AsyncIterator[_Held]:
    """A worker's engine in a thread, as `workers.main` runs it in a process."""
    model = front.state.model
    info = ModelInfo(
        architecture="fake",
        vocab_size=model.vocabulary.size,
        max_context_tokens=512,
        tokenizer_hash=model.file.tokenizer_hash,
        device="fake",
        batched_sessions=_LIMITS.max_seats,
        num_pages=_LIMITS.num_pages,
        page_tokens=PAGE_TOKENS,
    )
    device = _Held(_LIMITS, vocab_size=model.vocabulary.size, pipeline_depth=1)
    ring = WorkerRing(
        front.directory, RingShape(num_front_ends=2, slots_per_front_end=16), encode_model_info(info)
    )
    metrics = Metrics.open(front.directory, owner=WORKER)
    settings = Settings(batched_sessions=_LIMITS.max_seats, max_batch_tokens=_LIMITS.max_rows)
    engine = build_engine(settings, ring=ring, metrics=metrics, device=device, limits=_LIMITS, info=info)
    ring.set_state(WorkerState.READY)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        await front.ready()
        yield device
    finally:
        device.go.set()
        engine.request_drain()
        await asyncio.to_thread(thread.join, 60)
        ring.close()
        metrics.close()


def _expected(front: Front, content: str, count: int, seed: int) -> str:
    """What the fake device says after this conversation, cut at the first end token."""
    model = front.state.model
    request = ChatRequest(messages=[ChatMessage(role="user", content=content)])
    prompt = chat_job(model, request, "messages").prompts[0]
    ids: list[int] = []
    for token_id in generate(prompt, count, model.vocabulary.size, seed):
        if token_id in model.vocabulary.end_ids:
            break
        ids.append(token_id)
    shown = b"".join(
        model.tokenizer.token_bytes(each) for each in ids if not model.tokenizer.is_control(each)
    )
    return shown.decode("utf-8", "replace")


def test_many_users_get_their_own_text_streamed_or_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_front(tmp_path, None, slots_per_front_end=16) as front, _engine(front) as device:

            async def ask(index: int) -> None:
                content, count = "hello " * (index % 5 + 1) + str(index), 10 + index
                fields: dict[str, Any] = {
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": count,
                }
                if index % 2:
                    chunks = await front.events(seed=index, **fields)
                    deltas = [each["delta"] for chunk in chunks[:-1] for each in chunk["choices"]]
                    text = "".join(delta.get("content", "") for delta in deltas)
                else:
                    answer = (await front.chat(seed=index, **fields)).json()
                    text = answer["choices"][0]["message"]["content"]
                # The last token may be a part of a character, which is not shown.
                assert text.rstrip("\ufffd") == _expected(front, content, count, index).rstrip("\ufffd")

            asked = [asyncio.ensure_future(ask(index)) for index in range(16)]
            await until(lambda: front.state.engine.ring.num_free_slots == 0)
            device.go.set()  # so that no request is over before the last has come
            await asyncio.gather(*asked)
            assert max(sequences for _, sequences in device.batches) > 1
            repeated = {"messages": [{"role": "user", "content": "again and again " * 4}], "max_tokens": 4}
            first, second = [(await front.chat(**repeated)).json()["usage"] for _ in range(2)]
            assert first["prompt_tokens_details"]["cached_tokens"] == 0
            assert second["prompt_tokens_details"]["cached_tokens"] >= PAGE_TOKENS
            await until(lambda: front.state.engine.ring.num_free_slots == 16)
            text = (await front.client.get("/metrics")).text
            assert "ds4_prefix_cache_hits_total 0\n" not in text
            assert "ds4_batch_size_count 0\n" not in text

    run(scenario)
