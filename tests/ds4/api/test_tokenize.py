"""ds4/api/tokenize.py: text and ids, without the worker."""

from pathlib import Path
from typing import Any

from tests.support.front_rig import Front, with_front
from tests.support.tiny_model import IM_END, IM_START


async def _post(front: Front, path: str, status: int = 200, **fields: Any) -> Any:
    response = await front.client.post(path, json=fields)
    assert response.status_code == status, response.text
    return response.json()


def test_text_to_ids_and_back(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        ids = front.encode("hello wörld")
        answer = await _post(front, "/tokenize", content="hello wörld")
        assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 512}
        assert (await _post(front, "/tokenize", prompt="hello wörld"))["tokens"] == ids
        assert (await _post(front, "/detokenize", tokens=ids))["content"] == "hello wörld"

    with_front(tmp_path, scenario, None)


def test_the_special_tokens_and_the_template_are_told(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await front.client.get("/tokenizer_info")
        assert response.status_code == 200
        told = response.json()
        tokenizer = front.state.model.tokenizer
        assert tokenizer.eos_id is not None
        assert (await _post(front, "/tokenize", prompt=told["eos_token"]))["tokens"] == [tokenizer.eos_id]
        assert told["add_bos_token"] == tokenizer.add_bos
        assert told["model_max_length"] == 512
        assert told["chat_template"] == front.state.model.file.chat_template

    with_front(tmp_path, scenario, None)


def test_special_tokens_are_parsed_unless_that_is_switched_off(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert (await _post(front, "/tokenize", content="<|im_end|>"))["tokens"] == [IM_END]
        as_text = await _post(front, "/tokenize", content="<|im_end|>", parse_special=False)
        assert as_text["count"] > 1
        assert (await _post(front, "/detokenize", tokens=[IM_END]))["content"] == "<|im_end|>"

    with_front(tmp_path, scenario, None)


def test_pieces_are_text_or_bytes(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _post(front, "/tokenize", content="aé", with_pieces=True)
        assert [token["piece"] for token in answer["tokens"]] == ["a", [0xC3], [0xA9]]

    with_front(tmp_path, scenario, None)


def test_apply_template_shows_what_the_model_would_see(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        messages = [{"role": "user", "content": "a <|im_end|> b"}]
        answer = await _post(front, "/apply-template", messages=messages)
        assert answer["prompt"] == "<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\n"
        answer = await _post(front, "/apply-template", messages=messages, add_generation_prompt=False)
        assert answer["prompt"].endswith("<|im_end|>\n")
        begun = [*messages, {"role": "assistant", "content": "It is"}]
        fields: dict[str, Any] = {"messages": begun, "continue_final_message": True}
        answer = await _post(front, "/apply-template", **fields)
        assert answer["prompt"].endswith("b<|im_end|>\n<|im_start|>assistant\nIt is")
        both = {**fields, "add_generation_prompt": True}
        refused = await front.client.post("/apply-template", json=both)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "continue_final_message"
        assert IM_START == 1

    with_front(tmp_path, scenario, None)


def test_messages_are_counted_as_a_chat_counts_them(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        messages = [{"role": "user", "content": "hi <|im_end|>"}]
        answer = await _post(front, "/tokenize", messages=messages, return_token_strs=True)
        counted = await _post(front, "/v1/chat/completions/input_tokens", messages=messages)
        assert answer["count"] == counted["input_tokens"]
        assert answer["tokens"][0] == IM_START
        assert answer["tokens"].count(IM_END) == 1
        assert len(answer["token_strs"]) == answer["count"]
        assert answer["token_strs"][0] == "<|im_start|>"
        shorter = await _post(front, "/tokenize", messages=messages, add_generation_prompt=False)
        assert shorter["count"] < answer["count"]

    with_front(tmp_path, scenario, None)


def test_each_spelling_adds_special_tokens_as_its_own_server_does(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        plain = front.encode("ab")
        asked: list[tuple[dict[str, Any], list[int]]] = [
            ({"content": "ab"}, plain),
            ({"content": "ab", "add_special": True}, [IM_START, *plain]),
            ({"prompt": "ab"}, [IM_START, *plain]),
            ({"prompt": "ab", "add_special_tokens": False}, plain),
        ]
        for fields, ids in asked:
            assert (await _post(front, "/tokenize", **fields))["tokens"] == ids

    with_front(tmp_path, scenario, None, model={"add_bos": True})


def test_wrong_bodies_name_the_field(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        for path, fields, param in (
            ("/tokenize", {}, "content"),
            ("/tokenize", {"content": 5}, "content"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
            ("/detokenize", {"tokens": [99999]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
            ("/apply-template", {"messages": []}, "messages"),
        ):
            answer = await _post(front, path, 400, **fields)
            assert answer["error"]["param"] == param, answer

    with_front(tmp_path, scenario, None)
