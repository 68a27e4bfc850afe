"""ds4/api/completions.py: what a client of /v1/completions sees."""

from pathlib import Path
from typing import Any

import pytest

from ds4.generation import GenerationRequest
from tests.support.front_rig import Front, with_front
from tests.support.tiny_model import IM_END, IM_START

_PATH = "/v1/completions"


async def _complete(front: Front, **fields: Any) -> Any:
    response = await front.client.post(_PATH, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_has_its_text_and_usage(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _complete(front, prompt="hello")
        assert answer["object"] == "text_completion"
        assert answer["choices"] == [
            {"index": 0, "text": " world", "logprobs": None, "finish_reason": "stop"}
        ]
        assert answer["usage"]["prompt_tokens"] == len(front.encode("hello"))
        assert answer["model"] == "tiny"

    with_front(tmp_path, scenario, " world")


def test_prompts_may_be_texts_or_ids_one_or_many(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        hello, other = front.encode("hello"), front.encode("the")

        def script(request: GenerationRequest, prompt: list[int]) -> list[int]:
            return prompt  # says its prompt again

        front.start_worker(script)
        await front.ready()
        for prompt, texts in (
            ("hello", ["hello"]),
            (["hello", "the"], ["hello", "the"]),
            (hello, ["hello"]),
            ([hello, other], ["hello", "the"]),
        ):
            answer = await _complete(front, prompt=prompt)
            assert [choice["text"] for choice in answer["choices"]] == texts
            assert answer["usage"]["prompt_tokens"] == sum(len(front.encode(text)) for text in texts)
        answer = await _complete(front, prompt=["hello", "the"], n=2)
        assert [choice["text"] for choice in answer["choices"]] == ["hello", "hello", "the", "the"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]

    with_front(tmp_path, scenario, None)


def test_control_tokens_in_a_raw_prompt_are_parsed(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        await _complete(front, prompt="<|im_end|>a")
        assert front.worker is not None
        assert front.worker.requests[0].prompt == [IM_END, *front.encode("a")]

    with_front(tmp_path, scenario)


def test_an_empty_prompt_is_the_beginning_token(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        await _complete(front, prompt="")
        assert front.worker is not None
        assert front.worker.requests[0].prompt == [IM_START]

    with_front(tmp_path, scenario)


@pytest.mark.parametrize(
    "prompt", [{}, "no", 5, [], [[]], ["a", 5], [1, "a"], [1.5], [True], [["a"]], [99999]]
)
def test_a_prompt_of_another_shape_is_refused_by_name(tmp_path: Path, prompt: Any) -> None:
    async def scenario(front: Front) -> None:
        fields = {} if prompt == "no" else {"prompt": prompt}
        response = await front.client.post(_PATH, json=fields)
        if prompt == [[]]:
            assert response.status_code == 200
            return
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("prompt")

    with_front(tmp_path, scenario)


def test_echo_puts_the_prompt_before_every_choice(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _complete(front, prompt=["hello", front.encode("the")], echo=True)
        assert [choice["text"] for choice in answer["choices"]] == ["hello world", "the world"]
        chunks = await front.events(_PATH, prompt="hello", echo=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "hello world"

    with_front(tmp_path, scenario, " world")


def test_max_tokens_zero_generates_nothing(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _complete(front, prompt="hello", echo=True, max_tokens=0)
        assert answer["choices"][0]["text"] == "hello"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        assert front.worker is not None
        assert front.worker.requests == []

    with_front(tmp_path, scenario)


def test_logprobs_are_parallel_lists_with_offsets_into_the_text(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _complete(front, prompt="x", logprobs=1)
        logprobs = answer["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == "abc"
        assert logprobs["token_logprobs"] == [0, -0.125, -0.25]
        assert logprobs["text_offset"] == [0, 1, 2]
        assert logprobs["top_logprobs"][0] == {"a": -0.5}
        chunks = await front.events(_PATH, prompt="x", logprobs=1)
        streamed = [
            offset
            for chunk in chunks[:-1]
            for choice in chunk["choices"]
            for offset in (choice["logprobs"] or {"text_offset": []})["text_offset"]
        ]
        assert streamed == [0, 1, 2]

    with_front(tmp_path, scenario, "abc")


def test_a_stream_ends_with_usage_and_done(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        *chunks, usage, done = await front.events(
            _PATH, prompt="hello", stream_options={"include_usage": True}
        )
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] > 0
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " world"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    with_front(tmp_path, scenario, " world")


def test_counts_come_with_every_chunk_where_they_were_asked_for(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        fields: dict[str, Any] = {"prompt": "hello", "echo": True, "stream_options": options}
        *chunks, last, _ = await front.events(_PATH, **fields)
        told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert told[0] == 0
        assert told == sorted(told)
        assert told[-1] == last["usage"]["completion_tokens"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"

    with_front(tmp_path, scenario, " world")


def test_the_best_are_chosen_under_either_name_of_n(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _complete(front, prompt="hello", n_cmpl=2, best_of=3)
        assert len(answer["choices"]) == 2

    with_front(tmp_path, scenario)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(front: Front) -> None:
        def fault(*_: object, **__: object) -> list[int]:
            raise AssertionError("tokenized")

        monkeypatch.setattr(front.state.model.tokenizer, "encode", fault)
        monkeypatch.setattr(front.state.model.tokenizer, "encode_rendered", fault)
        text = "hello " * 20_000
        chat = {"messages": [{"role": "user", "content": text}]}
        for path, body in ((_PATH, {"prompt": text}), ("/v1/chat/completions", chat)):
            response = await front.client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"

    with_front(tmp_path, scenario)
