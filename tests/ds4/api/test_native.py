"""ds4/api/native.py: what a client of llama-server's own routes sees."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ds4.generation import GenerationRequest
from tests.support.front_rig import Front, with_front

_PATH = "/completion"


async def _complete(front: Front, **fields: Any) -> Any:
    response = await front.client.post(_PATH, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_has_what_llama_server_says(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _complete(front, prompt="hello", return_tokens=True, seed=7, n_predict=9, stop=["x"])
        ids = front.encode(" world\n")
        assert answer["content"] == " world\n"
        assert answer["tokens"] == ids
        assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "eos", "")
        assert (answer["has_new_line"], answer["truncated"], answer["id_slot"]) == (True, False, -1)
        assert answer["tokens_evaluated"] == answer["timings"]["prompt_n"] + answer["timings"]["cache_n"]
        assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == len(ids)
        assert answer["prompt"] == "hello"
        settings = answer["generation_settings"]
        assert (settings["seed"], settings["n_predict"], settings["stop"]) == (7, 9, ["x"])
        assert (await _complete(front, prompt="hello"))["tokens"] == []

    with_front(tmp_path, scenario, " world\n")


def test_prompts_are_texts_and_ids_in_every_mixture(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        def script(request: GenerationRequest, prompt: list[int]) -> list[int]:
            return prompt  # says its prompt again

        front.start_worker(script)
        await front.ready()
        hello, the = front.encode("hello"), front.encode("the")
        for prompt, text in (
            ("hello", "hello"),
            (hello, "hello"),
            ({"prompt_string": "hello"}, "hello"),
            ([*the, "hello", *the], "thehellothe"),
        ):
            assert (await _complete(front, prompt=prompt))["content"] == text
        answers = await _complete(front, prompt=[hello, "the", {"prompt_string": "hello"}])
        assert [each["content"] for each in answers] == ["hello", "the", "hello"]
        assert [each["index"] for each in answers] == [0, 1, 2]

    with_front(tmp_path, scenario, None)


def test_only_the_fields_that_were_asked_for(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        paths = ["content", "generation_settings/n_predict", "generation_settings/none", "no/such"]
        answer = await _complete(front, prompt="hello", n_predict=5, response_fields=paths)
        assert answer == {"content": " world", "generation_settings/n_predict": 5}

    with_front(tmp_path, scenario, " world")


def test_a_stream_has_the_same_text_and_its_end(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        fields = {"prompt": "hello", "stop": ["in"], "n_probs": 2}
        whole = await _complete(front, **fields)
        assert (whole["stop_type"], whole["stopping_word"], whole["content"]) == ("word", "in", "the world ")
        response = await front.client.post(_PATH, json={**fields, "stream": True, "timings_per_token": True})
        events = [
            msgspec.json.decode(line[6:]) for line in response.text.splitlines() if line.startswith("data")
        ]
        assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]
        assert "".join(each["content"] for each in events) == whole["content"]
        assert all("predicted_n" in each["timings"] for each in events)
        probabilities = [each for chunk in events for each in chunk["completion_probabilities"]]
        assert probabilities == whole["completion_probabilities"]
        assert [each["id"] for each in probabilities] == [id for chunk in events for id in chunk["tokens"]]
        assert [len(each["top_logprobs"]) for each in probabilities] == [2] * len(probabilities)
        assert events[-1]["stopping_word"] == "in"

    with_front(tmp_path, scenario, "the world in")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, None]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
        ({"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs"),
        ({"prompt": "a", "t_max_predict_ms": 5}, "t_max_predict_ms"),
        ({"prompt": "a", "stream": True, "return_progress": True}, "return_progress"),
        ({"prompt": "a", "n_probs": 21}, "n_probs"),
        ({"prompt": "a", "stream": True, "response_fields": ["content"]}, "response_fields"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async def scenario(front: Front) -> None:
        response = await front.client.post(_PATH, json=fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param or param in response.json()["error"]["message"]

    with_front(tmp_path, scenario, " world")


def test_filling_in_needs_a_model_that_can(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        body = {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c", "filename": "d"}]}
        response = await front.client.post("/infill", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "input_suffix"
        response = await front.client.post("/infill", json={**body, "input_extra": [{"filename": "d"}]})
        assert response.status_code == 400

    with_front(tmp_path, scenario, " world")


@pytest.mark.parametrize("has_files", [True, False])
def test_filling_in_shows_other_files_first_and_reads_no_control_tokens_in_them(
    tmp_path: Path, has_files: bool
) -> None:
    async def scenario(front: Front) -> None:
        marks = {"fim_pre_token_id": 7, "fim_suf_token_id": 8, "fim_mid_token_id": 9}
        if has_files:
            marks["fim_sep_token_id"] = 10
        file = front.state.model.file
        metadata = {f"tokenizer.ggml.{name}": mark for name, mark in marks.items()}
        object.__setattr__(file, "metadata", {**file.metadata, **metadata})
        tokenizer = front.state.model.tokenizer
        bos = tokenizer.encode("", add_special=True, parse_special=False)
        for prefix in ("a <|im_end|>", ""):  # the second: at the very beginning of a file
            extra = [{"text": "c <|im_end|>", "filename": "d.py"}]
            body = {"input_prefix": prefix, "input_suffix": "b", "input_extra": extra, "n_predict": 1}
            response = await front.client.post("/infill", json=body)
            assert response.status_code == 200, response.text
            assert front.worker is not None
            plain = [
                tokenizer.encode(text, add_special=False, parse_special=False)
                for text in ("d.py\n", "c <|im_end|>", "\n\n--- snippet ---\n\nc <|im_end|>", prefix, "b")
            ]
            shown = [10, *plain[0], *plain[1]] if has_files else plain[2]
            expected = [*bos, *shown, 7, *plain[3], 8, *plain[4], 9]
            assert front.worker.requests[-1].prompt == expected

    with_front(tmp_path, scenario, " world")
