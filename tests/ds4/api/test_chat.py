"""ds4/api/chat.py: what a client of /v1/chat/completions sees."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ds4.errors import ErrorCode
from ds4.generation import GenerationRequest
from tests.support.front_rig import Front, until, with_front
from tests.support.scripted_worker import failing


def _text(chunks: list[Any], index: int = 0) -> str:
    """What the deltas of one choice say together."""
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    return "".join(each["delta"].get("content", "") for each in choices if each["index"] == index)


def test_an_answer_has_its_text_reason_and_exact_usage(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = (await front.chat(model="any-name")).json()
        assert answer["object"] == "chat.completion"
        assert answer["model"] == "any-name"
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert front.worker is not None
        num_prompt = len(front.worker.requests[0].prompt)
        num_output = len(front.encode("hello world"))
        assert answer["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert answer["timings"]["prompt_n"] == num_prompt - 3
        assert answer["timings"]["predicted_n"] == num_output

    with_front(tmp_path, scenario)


def test_a_stream_has_role_deltas_reason_usage_and_done_in_this_order(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        *chunks, done = await front.events(stream_options={"include_usage": True})
        assert done == "[DONE]"
        role, *deltas, finish, usage = chunks
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in deltas) == "hello world"
        assert finish["choices"][0]["delta"] == {}
        assert finish["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(front.encode("hello world"))
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        for name in ("id", "created", "model", "system_fingerprint", "object"):
            assert len({chunk[name] for chunk in chunks}) == 1, name

    with_front(tmp_path, scenario)


def test_times_come_with_every_piece_where_they_were_asked_for(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        fields: dict[str, Any] = {"stream_options": {"include_usage": True}, "timings_per_token": True}
        first, *chunks, done = await front.events(**fields)
        assert done == "[DONE]"
        assert "timings" not in first
        told = [chunk["timings"]["predicted_n"] for chunk in chunks]
        assert told == sorted(told)
        assert told[-2:] == [chunks[-1]["usage"]["completion_tokens"]] * 2
        texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
        assert "".join(texts) == "hello world"
        plain = await front.events()
        assert [chunk for chunk in plain[:-1] if "timings" in chunk] == plain[-2:-1]

    with_front(tmp_path, scenario)


def test_counts_come_with_every_chunk_where_they_were_asked_for(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last, _ = await front.events(stream_options=options)
        told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert told[0] == 0
        assert told == sorted(told)
        assert chunks[-1]["usage"] == last["usage"]
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello world"
        # vLLM's rule: without include_usage there is none.
        silent = await front.events(stream_options={"continuous_usage_stats": True})
        assert all("usage" not in chunk for chunk in silent[:-1])

    with_front(tmp_path, scenario)


def test_choices_may_be_counted_in_llama_servers_words(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert len((await front.chat(n_cmpl=3)).json()["choices"]) == 3
        assert len((await front.chat(n=2)).json()["choices"]) == 2

    with_front(tmp_path, scenario)


def test_a_stream_without_include_usage_has_no_usage_at_all(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        chunks = await front.events()
        assert all("usage" not in chunk for chunk in chunks[:-1])

    with_front(tmp_path, scenario)


@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_streamed_and_whole_answers_cut_at_the_same_character(tmp_path: Path, tokens_per_step: int) -> None:
    said = "one two þree 😀 fo END ur END five"

    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.tokens_per_step = tokens_per_step
        for stop in (["END"], ["EN", "D u"], [" five", "x"], ["😀"], None):
            whole = (await front.chat(stop=stop)).json()
            chunks = await front.events(stop=stop, stream_options={"include_usage": True})
            assert _text(chunks) == whole["choices"][0]["message"]["content"]
            cut = min((said.index(each) for each in stop or () if each in said), default=len(said))
            assert _text(chunks) == said[:cut]
            assert chunks[-2]["usage"] == whole["usage"]
            assert chunks[-3]["choices"][0]["finish_reason"] == "stop"

    with_front(tmp_path, scenario, said)


def test_a_stop_string_frees_the_slot_at_once(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        answer = (await front.chat(stop="b")).json()
        assert answer["choices"][0]["message"]["content"] == "a"
        worker = front.worker
        await until(lambda: worker.num_open == 0)
        assert worker.num_cancelled == 1
        assert answer["usage"]["completion_tokens"] == 2

    with_front(tmp_path, scenario, "ab" + "c" * 400)


def test_every_choice_watches_for_the_stop_on_its_own(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        for answer in (
            (await front.chat(n=3, stop=["bc"])).json(),
            (await front.chat(n=3, stop="bc")).json(),
        ):
            assert [each["message"]["content"] for each in answer["choices"]] == ["aab"] * 3

    with_front(tmp_path, scenario, "aabbcc")


def test_min_tokens_holds_stop_strings_off(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = (await front.chat(stop="b", min_tokens=3)).json()
        assert answer["choices"][0]["message"]["content"] == "abca"

    with_front(tmp_path, scenario, "abcabc")


def test_a_stop_string_may_be_kept_in_the_output(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = (await front.chat(stop="b", include_stop_str_in_output=True)).json()
        assert answer["choices"][0]["message"]["content"] == "ab"

    with_front(tmp_path, scenario, "abcabc")


def test_max_tokens_ends_with_length_and_half_a_character_is_never_shown(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        num = len(front.encode("a😀")) - 1  # the emoji is several byte tokens
        answer = (await front.chat(max_completion_tokens=num)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["content"] == "a"
        chunks = await front.events(max_tokens=num)
        assert _text(chunks) == "a"

    with_front(tmp_path, scenario, "a😀b")


def test_choices_are_told_apart_and_draw_with_seeds_of_their_own(tmp_path: Path) -> None:
    words = ["hello", "world", "and"]

    async def scenario(front: Front) -> None:
        texts = [front.encode(word) for word in words]

        def script(request: GenerationRequest, prompt: list[int]) -> list[int]:
            return texts[request.sampling.seed - 7]

        front.start_worker(script)
        await front.ready()
        answer = (await front.chat(n=3, seed=7)).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == words
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == sum(map(len, texts))
        chunks = await front.events(n=3, seed=7)
        assert [_text(chunks, index) for index in range(3)] == words
        finishes = [
            choice["index"]
            for chunk in chunks[:-1]
            for choice in chunk["choices"]
            if choice["finish_reason"] == "stop"
        ]
        assert sorted(finishes) == [0, 1, 2]

    with_front(tmp_path, scenario, None)


def test_logprobs_come_with_their_tokens_streamed_or_not(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = (await front.chat(logprobs=True, top_logprobs=2)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == "hé world".encode()
        assert [entry["logprob"] for entry in content] == [-index / 8 for index in range(len(content))]
        assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -1.5]
        assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
        chunks = await front.events(logprobs=True, top_logprobs=2)
        streamed = [
            entry
            for chunk in chunks[:-1]
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == content
        plain = (await front.chat(logprobs=True)).json()
        assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    with_front(tmp_path, scenario, "hé world")


def test_a_character_that_max_tokens_cuts_off_is_only_in_the_bytes(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        limit = len(front.encode("hé 🙂")) - 1
        for logprobs in (False, True):
            (choice,) = (await front.chat(max_tokens=limit, logprobs=logprobs)).json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("hé ", "length")
            chunks = await front.events(max_tokens=limit, logprobs=logprobs)
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "hé "
        raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert raw == "hé 🙂".encode()[:-1]

    with_front(tmp_path, scenario, "hé 🙂")


def test_tokens_of_a_stop_string_have_no_logprobs(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = (await front.chat(logprobs=True, stop="cd")).json()
        tokens = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
        assert tokens == ["a", "b"]

    with_front(tmp_path, scenario, "abcdef")


def test_special_tokens_in_user_text_are_text(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        await front.chat(messages=[{"role": "user", "content": "<|im_end|>"}])
        assert front.worker is not None
        tokenizer = front.state.model.tokenizer
        prompt = front.worker.requests[0].prompt
        (end,) = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
        assert prompt.count(end) == 1  # the template's own
        assert "<|im_end|><|im_end|>" in tokenizer.decode(prompt, special=True)

    with_front(tmp_path, scenario)


def test_sampling_fields_reach_the_worker_and_defaults_fill_the_rest(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        await front.chat(
            temperature=0,
            top_k=7,
            top_p=0.5,
            min_p=0.25,
            typical_p=0.75,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={"5": -100},
            seed=11,
            stop_token_ids=[9],
            min_tokens=2,
            max_tokens=20,
        )
        request = front.worker.requests[-1].request
        assert request.max_tokens == 20
        assert request.min_tokens == 2
        assert 9 in request.stop_token_ids
        assert set(front.state.model.tokenizer.end_ids) < set(request.stop_token_ids)
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 7, 0.5, 0.25)
        assert sampling.typical_p == 0.75
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
        assert (sampling.repetition_penalty, sampling.seed) == (1.5, 11)
        assert sampling.logit_bias == ((5, -100.0),)
        await front.chat(ignore_eos=True)
        request = front.worker.requests[-1].request
        assert request.stop_token_ids == ()
        assert request.sampling.temperature == pytest.approx(0.75)
        assert request.sampling.min_p == pytest.approx(0.05)
        assert request.max_tokens == 512 - len(front.worker.requests[-1].prompt)

    with_front(tmp_path, scenario, temperature=0.75)


def test_a_prompt_over_the_context_is_refused_before_queueing(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await front.chat(messages=[{"role": "user", "content": "xyz" * 400}])
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "exceed_context_size_error"
        assert error["n_ctx"] == 512
        assert error["n_prompt_tokens"] > 1200
        assert error["param"] == "messages"
        assert front.worker is not None
        assert front.worker.requests == []

    with_front(tmp_path, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_generation_is_an_error_and_never_an_empty_answer(tmp_path: Path, stream: bool) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.failure = failing(ErrorCode.NUMERIC, "not a number")
        if stream:
            *_, error, done = await front.events()
            assert error["error"]["code"] == "numeric_error"
            assert done == "[DONE]"
        else:
            response = await front.chat()
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "not a number"

    with_front(tmp_path, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_survives_the_loss_of_its_worker(tmp_path: Path, stream: bool) -> None:
    said = "hello world and so on"

    async def scenario(front: Front) -> None:
        first = front.worker
        assert first is not None
        first.hold_after(3)

        async def ask() -> Any:
            if stream:
                return _text(await front.events(seed=5))
            return (await front.chat(seed=5)).json()["choices"][0]["message"]["content"]

        asking = asyncio.ensure_future(ask())
        await until(lambda: bool(first.requests) and first.requests[0].num_sent == 3)
        first.stop()
        second = front.start_worker(said)
        assert await asking == said
        (resumed,) = second.requests
        assert resumed.request.num_resumed_tokens == 3
        assert resumed.request.sampling.seed == 5
        assert resumed.prompt == first.requests[0].prompt
        assert front.state.engine.metrics.value("ds4_resumed_streams_total") == 1

    with_front(tmp_path, scenario, said)


def test_without_a_new_worker_in_time_the_client_is_told(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(1)
        asking = asyncio.ensure_future(front.chat())
        await until(lambda: bool(worker.requests))
        worker.stop()
        response = await asking
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "worker_lost"
        assert (await front.chat()).json()["error"]["code"] == "no_worker"

    with_front(tmp_path, scenario, resume_timeout_s=0)


def test_input_tokens_is_what_the_prompt_takes_and_needs_no_worker(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        body = {"messages": [{"role": "user", "content": "how long is this?"}]}
        for prefix in ("", "/v1"):
            counted = await front.client.post(prefix + "/chat/completions/input_tokens", json=body)
            assert counted.status_code == 200, counted.text
        refused = await front.client.post("/v1/chat/completions/input_tokens", json={})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        front.start_worker("x")
        await front.ready()
        usage = (await front.chat(**body)).json()["usage"]
        assert counted.json() == {"input_tokens": usage["prompt_tokens"]}

    with_front(tmp_path, scenario, script=None)
