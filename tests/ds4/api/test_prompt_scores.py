"""ds4/api/prompt_scores.py, and what else of completions reads log-probabilities."""

import asyncio
from pathlib import Path
from typing import Any

from ds4.errors import ErrorCode
from ds4.generation import GenerationRequest
from tests.support.front_rig import Front, until, with_front
from tests.support.scripted_worker import failing

_PATH = "/v1/completions"


def _script(request: GenerationRequest, prompt: list[int]) -> list[int]:
    """Scores a prompt, and otherwise says its last token again."""
    return prompt[1:] if request.scores_prompt else [prompt[-1]] * 3


async def _complete(front: Front, **fields: Any) -> Any:
    response = await front.client.post(_PATH, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_prompt_alone_is_scored(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        ids = front.encode("hello you")
        answer = await _complete(front, prompt=ids, echo=True, logprobs=1, max_tokens=0)
        (choice,) = answer["choices"]
        assert choice["text"] == "hello you"
        assert choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == "hello you"
        # The rig's worker gives token number i of an answer -i / 8.
        assert logprobs["token_logprobs"] == [None, *(-index / 8 for index in range(len(ids) - 1))]
        assert logprobs["top_logprobs"][0] is None
        assert all(len(best) >= 1 for best in logprobs["top_logprobs"][1:])
        starts = [sum(map(len, logprobs["tokens"][:index])) for index in range(len(ids))]
        assert logprobs["text_offset"] == starts
        assert answer["usage"]["completion_tokens"] == 0
        assert front.worker is not None
        (asked,) = front.worker.requests
        assert asked.request.scores_prompt

    with_front(tmp_path, scenario, script=_script)


def test_what_is_generated_follows_the_prompts_scores(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        ids = front.encode("hello")
        fields = {"prompt": ["hello", ids], "echo": True, "logprobs": 0, "max_tokens": 2, "n": 2}
        whole = await _complete(front, **fields)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        for choice in whole["choices"]:
            logprobs = choice["logprobs"]
            lengths = {len(values) for values in logprobs.values()}
            assert len(lengths) == 1
            assert logprobs["token_logprobs"].count(None) == 1
            assert logprobs["token_logprobs"][-2:] == [0.0, -1 / 8]
            assert logprobs["text_offset"][-2] == len("hello")
        chunks = await front.events(_PATH, **fields)
        for index, choice in enumerate(whole["choices"]):
            parts = [
                part["logprobs"]
                for chunk in chunks[:-1]
                for part in chunk["choices"]
                if part["index"] == index and part["logprobs"]
            ]
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in part[name]] == values

    with_front(tmp_path, scenario, script=_script)


def test_the_token_that_was_put_before_a_text_has_no_place_in_it(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        tokenizer = front.state.model.tokenizer
        ids = tokenizer.encode("hello you", add_special=True, parse_special=True)
        answer = await _complete(front, prompt="hello you", echo=True, logprobs=1, max_tokens=0)
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(ids)
        has_bos = ids[0] == tokenizer.bos_id
        assert logprobs["text_offset"][:2] == ([0, 0] if has_bos else [0, len(logprobs["tokens"][0])])

    with_front(tmp_path, scenario, script=_script)


def test_a_prompt_of_one_token_has_nothing_to_be_scored_by(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _complete(front, prompt=[5], echo=True, logprobs=1, max_tokens=0)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None]
        assert front.worker is not None
        assert front.worker.requests == []

    with_front(tmp_path, scenario, script=_script)


def test_scoring_fails_with_its_own_error_and_leaves_nothing_running(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        body = {"prompt": ["hello you", "you there"], "echo": True, "logprobs": 1}
        worker.failure = failing(ErrorCode.NUMERIC, "not a number")
        assert (await front.client.post(_PATH, json=body)).status_code == 500
        worker.failure = None
        await until(lambda: worker.num_open == 0)
        worker.hold_after(0)
        waiting = asyncio.ensure_future(front.client.post(_PATH, json=body))
        await until(lambda: worker.num_open == 2)
        waiting.cancel()
        await until(lambda: worker.num_open == 0)
        long = await front.client.post(_PATH, json={**body, "prompt": [5] * 600})
        assert long.json()["error"]["code"] == "context_length_exceeded"
        many = await front.client.post(_PATH, json={**body, "prompt": ["a"] * 9})
        assert many.status_code == 400

    with_front(tmp_path, scenario, script=_script)


def test_the_best_of_several_are_answered(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        lengths = iter((3, 1, 2))  # the longer, the lower its mean log-probability in this rig
        ids = front.encode("hello you there")

        def script(request: GenerationRequest, prompt: list[int]) -> list[int]:
            return ids[: next(lengths)]

        front.start_worker(script)
        await front.ready()
        answer = await _complete(front, prompt=[5], n=2, best_of=3)
        texts = [choice["text"] for choice in answer["choices"]]
        decode = front.state.model.tokenizer.decode
        assert texts == [decode(ids[:1], special=False), decode(ids[:2], special=False)]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 6

    with_front(tmp_path, scenario, script=None)


def test_a_suffix_needs_a_model_that_fills_in(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        body = {"prompt": "a", "suffix": "b", "max_tokens": 1}
        refused = await front.client.post(_PATH, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "suffix"
        assert (await front.client.post(_PATH, json={**body, "suffix": ""})).status_code == 200
        names = ("fim_pre_token_id", "fim_suf_token_id", "middle_token_id")
        metadata = {f"tokenizer.ggml.{name}": 7 + index for index, name in enumerate(names)}
        file = front.state.model.file
        object.__setattr__(file, "metadata", {**file.metadata, **metadata})
        await _complete(front, **body)
        assert front.worker is not None
        prompt = front.worker.requests[-1].prompt
        bos = front.state.model.tokenizer.bos_id
        expected = [7, *front.encode("a"), 8, *front.encode("b"), 9]
        assert prompt in (expected, [bos, *expected])

    with_front(tmp_path, scenario, script=_script)
