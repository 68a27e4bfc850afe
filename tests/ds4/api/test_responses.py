"""ds4/api/responses.py: what a client of /v1/responses sees."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from ds4.api.response_store import FILE_NAME
from ds4.errors import ErrorCode
from ds4.generation import GenerationRequest
from tests.ds4.api.test_messages import parse_named
from tests.support.front_rig import Front, run, running_front, until, with_front
from tests.support.scripted_worker import failing

_PATH = "/v1/responses"


async def _post(front: Front, **fields: Any) -> httpx.Response:
    return await front.client.post(_PATH, json={"model": "m", "input": "hello", **fields})


async def _answer(front: Front, **fields: Any) -> Any:
    response = await _post(front, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def _events(front: Front, **fields: Any) -> list[Any]:
    response = await _post(front, stream=True, **fields)
    assert response.status_code == 200, response.text
    events = parse_named(response.content)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def _prompt(front: Front, index: int = -1) -> str:
    """The text of a prompt that the worker got."""
    assert front.worker is not None
    return front.state.model.tokenizer.decode(front.worker.requests[index].prompt, special=True)


def test_an_answer_has_every_field_of_its_dialect(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _answer(front, metadata={"a": "b"}, temperature=0.5, truncation="auto", user="u")
        assert answer["object"] == "response"
        assert answer["status"] == "completed"
        (item,) = answer["output"]
        assert item.pop("id").startswith("msg_")
        assert item == {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}],
        }
        assert front.worker is not None
        num_prompt, num_output = len(front.worker.requests[0].prompt), len(front.encode("hello world"))
        assert answer["usage"] == {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_output,
        }
        expected: dict[str, Any] = {
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {"a": "b"},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": True,
            "temperature": 0.5,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "auto",
            "user": "u",
        }
        assert {name: answer[name] for name in expected} == expected

    with_front(tmp_path, scenario)


def test_a_stream_tells_the_answer_step_by_step(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        events = await _events(front)
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
        text = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
        assert text == "hello world" == events[-4]["text"]
        assert events[0]["response"]["status"] == "in_progress"
        assert events[0]["response"]["id"] == events[-1]["response"]["id"]
        assert events[-1]["response"]["output"] == [events[-2]["item"]]
        item_ids = {event["item_id"] for event in events if "item_id" in event}
        assert item_ids == {events[-2]["item"]["id"]}

    with_front(tmp_path, scenario)


def test_the_limit_makes_a_response_incomplete(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _answer(front, max_output_tokens=2)
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["status"] == "incomplete"
        last = (await _events(front, max_output_tokens=2))[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["output"][0]["content"] == answer["output"][0]["content"]

    with_front(tmp_path, scenario)


def test_log_probabilities_come_where_they_were_asked_for(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        include = ["message.output_text.logprobs"]
        answer = await _answer(front, include=include, top_logprobs=1)
        tokens = answer["output"][0]["content"][0]["logprobs"]
        assert "".join(token["token"] for token in tokens) == "hello world"
        assert all(len(token["top_logprobs"]) == 1 for token in tokens)
        events = await _events(front, include=include, top_logprobs=1)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [token for event in deltas for token in event["logprobs"]] == tokens

    with_front(tmp_path, scenario)


def test_a_conversation_goes_on_from_a_stored_response(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        first = await _answer(front, input="one", instructions="be brief")
        second = (await _events(front, input="two", previous_response_id=first["id"]))[-1]["response"]
        await _answer(front, input="three", previous_response_id=second["id"])
        assert front.worker is not None
        prompt = _prompt(front)
        at = [prompt.index(text) for text in ("one", "hello world", "two", "three")]
        assert at == sorted(at)
        assert prompt.count("hello world") == 2
        assert "be brief" in _prompt(front, 0)
        assert "be brief" not in prompt  # instructions are of one turn

    with_front(tmp_path, scenario)


def test_another_front_end_knows_what_the_first_stored(tmp_path: Path) -> None:
    async def whole() -> None:
        async with running_front(tmp_path) as front:
            first = await _answer(front, input="one")
        async with running_front(tmp_path) as front:
            assert (await front.client.get(f"{_PATH}/{first['id']}")).json() == first
            assert (await _post(front, previous_response_id=first["id"])).status_code == 200

    run(whole)


def test_what_is_stored_can_be_looked_at_and_deleted(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        get, delete = front.client.get, front.client.delete
        items = [{"role": "user", "content": f"message {index}"} for index in range(3)]
        answer = await _answer(front, input=items)
        one = f"{_PATH}/{answer['id']}"
        assert (await get(one)).json() == answer
        page = (await get(one + "/input_items?order=asc&limit=2")).json()
        assert [item["content"] for item in page["data"]] == ["message 0", "message 1"]
        assert page["has_more"] is True
        rest = (await get(f"{one}/input_items?order=asc&after={page['last_id']}")).json()
        assert [item["content"] for item in rest["data"]] == ["message 2"]
        assert rest["has_more"] is False
        newest = (await get(one + "/input_items")).json()
        assert newest["data"][0]["content"] == "message 2"
        for query in ("order=up", "limit=0", "limit=x", "limit=101", "after=nothing"):
            assert (await get(f"{one}/input_items?{query}")).status_code == 400
        cancel = await front.client.post(one + "/cancel")
        assert cancel.status_code == 400
        assert "background" in cancel.json()["error"]["message"]
        assert (await get(one + "?stream=true")).status_code == 400
        assert (await delete(one)).json() == {"id": answer["id"], "object": "response", "deleted": True}
        for response in (
            await get(one),
            await get(one + "/input_items"),
            await delete(one),
            await front.client.post(one + "/cancel"),
        ):
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "response_not_found"
        gone = await _post(front, previous_response_id=answer["id"])
        assert gone.status_code == 400
        assert gone.json()["error"]["code"] == "previous_response_not_found"
        wrong = await front.client.put(one)
        assert wrong.status_code == 405
        assert {"GET", "DELETE"} <= set(wrong.headers["allow"].split(", "))

    with_front(tmp_path, scenario)


def test_what_shall_not_be_stored_is_not(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _answer(front, store=False)
        assert answer["store"] is False
        assert (await front.client.get(f"{_PATH}/{answer['id']}")).status_code == 404

    with_front(tmp_path, scenario)


def test_a_server_without_a_store_says_so_where_one_is_asked_for(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = await _answer(front)
        assert answer["store"] is False
        for fields in ({"store": True}, {"previous_response_id": answer["id"]}):
            response = await _post(front, **fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(fields))
        assert (await front.client.get(f"{_PATH}/{answer['id']}")).status_code == 404
        assert not (front.directory / FILE_NAME).exists()

    with_front(tmp_path, scenario, response_store_mib=0)


def test_a_store_that_fails_costs_nobody_the_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(front: Front) -> None:
        (front.directory / FILE_NAME).write_bytes(b"no database" * 1000)
        assert (await _answer(front))["store"] is False
        assert (await _events(front))[-1]["response"]["store"] is False
        assert "could not be stored" in caplog.text
        response = await _post(front, previous_response_id="resp_1")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "store_unavailable"

    with_front(tmp_path, scenario)


def test_truncation_drops_the_oldest_turns_and_keeps_the_rules(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        items = [{"role": "system", "content": "the rule"}]
        for index in range(40):
            items += [
                {"role": "user", "content": f"question {index:02} " + "x y " * 8},
                {"role": "assistant", "content": f"reply {index:02}"},
            ]
        items.append({"role": "user", "content": "the last"})
        refused = await _post(front, input=items)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert refused.json()["error"]["param"] == "input"
        await _answer(front, input=items, truncation="auto")
        prompt = _prompt(front)
        assert "the rule" in prompt
        assert "the last" in prompt
        assert "question 00" not in prompt
        kept = [index for index in range(40) if f"question {index:02}" in prompt]
        assert kept == list(range(kept[0], 40)), "a whole end of the conversation"
        one = await _post(front, input="z z " * 600, truncation="auto")
        assert one.status_code == 400

    with_front(tmp_path, scenario)


def test_a_failure_in_a_stream_is_a_failed_response(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.failure = failing(ErrorCode.NUMERIC, "not a number")
        last = (await _events(front))[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": "numeric_error", "message": "not a number"}

    with_front(tmp_path, scenario)


def test_a_client_that_leaves_ends_its_response(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.hold_after(1)
        waiting = asyncio.ensure_future(_post(front))
        await until(lambda: front.worker is not None and front.worker.num_open == 1)
        waiting.cancel()
        await until(lambda: front.worker is not None and front.worker.num_cancelled == 1)

    with_front(tmp_path, scenario)


_CALL = '{"name": "look", "arguments": {"at": "é"}}'
_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}


def test_a_call_is_an_item_and_its_result_goes_back(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        def script(request: GenerationRequest, prompt: list[int]) -> list[int]:
            return front.encode(_CALL)

        front.start_worker(script)
        await front.ready()
        answer = await _answer(front, tools=[_TOOL])
        (item,) = answer["output"]
        assert (item["type"], item["name"], item["status"]) == ("function_call", "look", "completed")
        assert item["arguments"] == '{"at": "é"}'
        events = await _events(front, tools=[_TOOL])
        kinds = [event["type"] for event in events]
        assert kinds[2] == "response.output_item.added"
        assert kinds[-3:-1] == ["response.function_call_arguments.done", "response.output_item.done"]
        deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
        assert "".join(deltas) == item["arguments"]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "a cat"}
        await _answer(front, input=[result], previous_response_id=answer["id"])
        assert "a cat" in _prompt(front)

    with_front(tmp_path, scenario, script=None)


def test_references_stand_for_what_was_answered(tmp_path: Path) -> None:
    """As @ai-sdk/openai sends a conversation that the server keeps."""

    async def scenario(front: Front) -> None:
        answer = await _answer(front, tools=[_TOOL], input=[{"role": "user", "content": "see"}])
        (item,) = answer["output"]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "a cat"}
        for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
            after = await _answer(front, input=[{"role": "user", "content": "see"}, reference, result])
            prompt = _prompt(front)
            assert '"at":"é"' in prompt
            assert prompt.index("see") < prompt.index('"at"') < prompt.index("a cat")
        page = (await front.client.get(f"{_PATH}/{after['id']}/input_items?order=asc")).json()["data"]
        assert [each["type"] for each in page] == ["message", "function_call", "function_call_output"]
        assert len({each["id"] for each in page}) == 3
        again = await _answer(front, input=[{"type": "item_reference", "id": page[0]["id"]}])
        assert again["output"]
        unknown = item["id"][:-4] + "ffff"
        for wrong in (unknown, "msg_none", "fc_" + "0" * 52, 5, None):
            refused = await _post(front, input=[result, {"type": "item_reference", "id": wrong}])
            assert refused.status_code == 404
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == ("input[1].id", "item_not_found")

    with_front(tmp_path, scenario, _CALL)


def test_chats_own_fields_mean_the_same_here_or_are_refused(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        await _answer(front, typical_p=0.5, min_tokens=2, ignore_eos=True, max_tokens=3)
        assert front.worker is not None
        asked = front.worker.requests[0].request
        assert (asked.sampling.typical_p, asked.min_tokens, asked.max_tokens) == (0.5, 2, 3)
        await _answer(front, max_tokens=3, max_output_tokens=4)
        assert front.worker.requests[1].request.max_tokens == 4, "the dialect's own field wins"
        all_refused: list[dict[str, Any]] = [
            {"n": 2},
            {"messages": []},
            {"mirostat": 1},
            {"prompt_logprobs": 1},
        ]
        for refused in all_refused:
            response = await _post(front, **refused)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(refused))

    with_front(tmp_path, scenario)


def test_only_allowed_tools_are_shown_and_the_choice_comes_back(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
        answer = await _answer(front, tools=[_TOOL, {**_TOOL, "name": "touch"}], tool_choice=choice)
        assert answer["tool_choice"] == choice
        assert len(answer["tools"]) == 2
        prompt = _prompt(front)
        assert "look" in prompt
        assert "touch" not in prompt

    with_front(tmp_path, scenario)


def test_a_key_does_not_reach_the_responses_of_another(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-old name=alice\nsk-new name=alice\nsk-bob\nsk-carol\n")

    async def scenario(front: Front) -> None:
        def headers(key: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {key}"}

        async def ask(key: str, **fields: Any) -> httpx.Response:
            body = {"model": "m", "input": "hello", **fields}
            return await front.client.post(_PATH, json=body, headers=headers(key))

        for owner, other in (("sk-old", "sk-bob"), ("sk-bob", "sk-carol")):
            kept = (await ask(owner)).json()["id"]
            url = f"{_PATH}/{kept}"
            refused = [
                await front.client.get(url, headers=headers(other)),
                await front.client.get(f"{url}/input_items", headers=headers(other)),
                await front.client.post(f"{url}/cancel", headers=headers(other)),
                await front.client.delete(url, headers=headers(other)),
            ]
            assert [each.status_code for each in refused] == [404] * 4
            onward = await ask(other, previous_response_id=kept)
            assert (onward.status_code, onward.json()["error"]["code"]) == (
                400,
                "previous_response_not_found",
            )
            assert (await front.client.get(url, headers=headers(owner))).status_code == 200
            assert (await ask(owner, previous_response_id=kept)).status_code == 200
        kept = (await ask("sk-old")).json()["id"]  # another key of the same tenant
        assert (await front.client.get(f"{_PATH}/{kept}", headers=headers("sk-new"))).status_code == 200

    with_front(tmp_path, scenario, api_key_file=str(path))


def test_input_tokens_counts_the_conversation_too(tmp_path: Path) -> None:
    async def counted(front: Front, **body: Any) -> int:
        answer = await front.client.post("/v1/responses/input_tokens", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["object"] == "response.input_tokens"
        return int(answer.json()["input_tokens"])

    async def scenario(front: Front) -> None:
        first = await _answer(front, input="one", instructions="be brief")
        assert await counted(front, input="one", instructions="be brief") == first["usage"]["input_tokens"]
        following = {"input": "two", "previous_response_id": first["id"]}
        second = await _answer(front, **following)
        assert await counted(front, **following) == second["usage"]["input_tokens"]
        wrong = {"input": "x", "text": {"format": {"type": "json_schema"}}}
        refused = await front.client.post("/v1/responses/input_tokens", json=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("text.format")

    with_front(tmp_path, scenario)
