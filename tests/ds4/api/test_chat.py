"""ds4/api/chat.py: what a client of /v1/chat/completions sees."""

from pathlib import Path

from tests.support.front_rig import Front, with_front


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
