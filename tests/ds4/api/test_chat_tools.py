"""ds4/api/chat.py with tools and reasoning: what a client of /v1/chat/completions sees of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds4.generation import GenerationRequest
from tests.support.front_rig import Front, parse_events, until, with_front

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SWITCHED = TEMPLATE.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}",
)
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "ping"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bo\\u006e", "n":  1}}\n</tool_call>'
ARGUMENTS = '{"city": "Bo\\u006e", "n":  1}'
PING = '<tool_call>{"name": "ping"}</tool_call>'


def hermes(template: str = TEMPLATE) -> dict[str, Any]:
    """The options of a model whose markers are control tokens, as in many vocabularies."""
    controls = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|other|>")
    return {"chat_template": template, "extra_controls": controls}


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """What the deltas of one choice say together, in the form of a whole message."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for choice in (choice for chunk in chunks[:-1] for choice in chunk["choices"]):
        if choice["index"] != index:
            continue
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({**call, "function": dict(call["function"])})
                del calls[-1]["index"]
            else:
                assert "name" not in call["function"]
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": "?"} for call in message.get("tool_calls", ())]
    return {**message, "content": message["content"] or "", "refusal": None, "tool_calls": calls}


def prompt_of(front: Front) -> str:
    assert front.worker is not None
    return front.state.model.tokenizer.decode(front.worker.requests[-1].prompt, special=True)


def test_a_call_is_a_tool_call_and_no_text(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        choice = (await front.chat(tools=TOOLS)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        (call,) = message.pop("tool_calls")
        assert message == {"role": "assistant", "content": None, "refusal": None}
        assert call["id"].startswith("call_")
        assert call["type"] == "function"
        assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        assert '"get_weather"' in prompt_of(front)

    with_front(tmp_path, scenario, CALL, model=hermes())


@pytest.mark.parametrize("tokens_per_step", [1, 4, 1000])
@pytest.mark.parametrize(
    "said",
    [
        f"Let me see.\n{CALL}\n{PING}",
        f"<think>\nwhich?\n</think>\n\n{CALL}",
        "<think>why</think>So <tool_call>that is no call</tool_call>.",
        "Only text with a <tool_call>",
        f"{CALL} and more",
        "<think>never ends",
    ],
)
def test_streamed_and_whole_answers_are_the_same(tmp_path: Path, said: str, tokens_per_step: int) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        front.worker.tokens_per_step = tokens_per_step
        whole = (await front.chat(tools=TOOLS)).json()
        chunks = await front.events(tools=TOOLS, stream_options={"include_usage": True})
        assert without_ids(joined(chunks)) == without_ids(whole["choices"][0]["message"])
        assert chunks[-3]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert chunks[-2]["usage"] == whole["usage"]

    with_front(tmp_path, scenario, said, model=hermes())


def test_a_stream_names_a_call_first_and_then_adds_to_its_arguments(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        cut = CALL.index("Bo")
        worker.hold_after(len(front.encode(CALL[:cut], markers=True)))
        body = {"messages": [{"role": "user", "content": "hello"}], "tools": TOOLS, "stream": True}
        raw = b""
        async with front.client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for chunk in response.aiter_bytes():
                raw += chunk
                if b'"arguments":"{' in raw:  # arguments arrive before the rest of them is written
                    worker.release()
        deltas = [choice["delta"] for chunk in parse_events(raw)[:-1] for choice in chunk["choices"]]
        first, *rest = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "get_weather")
        assert first["function"]["arguments"] == ""
        assert all(set(call) == {"index", "function"} for call in rest)
        assert "".join(call["function"]["arguments"] for call in rest) == ARGUMENTS

    with_front(tmp_path, scenario, CALL, model=hermes())


def test_without_tools_tags_are_what_the_vocabulary_makes_of_them(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = (await front.chat(**fields)).json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert "tool_calls" not in choice["message"]
            assert "ping" in choice["message"]["content"]
            assert "get_weather" not in prompt_of(front)

    with_front(tmp_path, scenario, PING, model=hermes())


def test_control_tokens_that_mean_nothing_to_the_parser_stay_silent(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        message = (await front.chat(tools=TOOLS)).json()["choices"][0]["message"]
        assert message["content"] == "ab"

    with_front(tmp_path, scenario, "a<|other|>b", model=hermes())


def test_only_one_call_where_parallel_ones_are_not_wanted(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        worker = front.worker
        for tokens_per_step in (1, 1000):
            worker.tokens_per_step = tokens_per_step
            answer = (await front.chat(tools=TOOLS, parallel_tool_calls=False)).json()
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert len(choice["message"]["tool_calls"]) == 1
            # The object's end is the call's; nothing after it is counted or waited for.
            assert answer["usage"]["completion_tokens"] == len(
                front.encode(PING[: PING.index("}") + 1], markers=True)
            )
            await until(lambda: worker.num_open == 0)

    with_front(tmp_path, scenario, (PING + "\n") * 9, model=hermes())


def test_a_call_that_is_cut_off_says_length(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        choice = (await front.chat(tools=TOOLS, max_tokens=50)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert arguments
        assert ARGUMENTS.startswith(arguments)

    with_front(tmp_path, scenario, CALL, model=hermes())


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_head_of_a_call_that_is_cut_off_is_no_text(tmp_path: Path, choice: str) -> None:
    async def scenario(front: Front) -> None:
        asked = {"tools": TOOLS, "max_tokens": 12, "tool_choice": choice}
        whole = (await front.chat(**asked)).json()["choices"][0]
        assert whole["finish_reason"] == "length"
        assert not whole["message"]["content"]
        assert "tool_calls" not in whole["message"]
        chunks = parse_events((await front.chat(**asked, stream=True)).content)
        assert not joined(chunks)["content"]

    with_front(tmp_path, scenario, CALL, model=hermes())


def test_several_choices_have_calls_of_their_own(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        choices = (await front.chat(tools=TOOLS, n=3)).json()["choices"]
        assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3
        chunks = await front.events(tools=TOOLS, n=3)
        for index in range(3):
            assert joined(chunks, index)["tool_calls"][0]["function"]["arguments"] == ARGUMENTS

    with_front(tmp_path, scenario, CALL, model=hermes())


def test_log_probabilities_cover_the_tokens_of_calls(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        whole = (await front.chat(tools=TOOLS, logprobs=True)).json()["choices"][0]
        assert len(whole["logprobs"]["content"]) == len(front.encode(CALL, markers=True))
        chunks = await front.events(tools=TOOLS, logprobs=True)
        tokens = [
            token
            for chunk in chunks[:-1]
            for choice in chunk["choices"]
            for token in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert tokens == whole["logprobs"]["content"]
        assert joined(chunks)["tool_calls"][0]["function"]["arguments"] == ARGUMENTS

    with_front(tmp_path, scenario, CALL, model=hermes())


def test_stop_strings_work_inside_of_calls_and_reasoning(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        choice = (await front.chat(tools=TOOLS, stop=['"n"'])).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS.split('"n"')[0]
        choice = (await front.chat(tools=TOOLS, stop=["hy"])).json()["choices"][0]
        assert choice["message"]["reasoning_content"] == "w"
        assert choice["finish_reason"] == "stop"

    with_front(tmp_path, scenario, "<think>why</think>" + CALL, model=hermes())


def test_history_with_calls_and_results_reaches_the_template(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "ping", "arguments": '{"x": "<|im_end|>"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "pong"}]},
    ]

    async def scenario(front: Front) -> None:
        await front.chat(tools=TOOLS, messages=messages)
        prompt = prompt_of(front)
        assert "<|im_start|>tool\npong<|im_end|>" in prompt
        before, after = prompt.split("<tool_call>")[-1].split("</tool_call>")
        assert json.loads(before) == {"name": "ping", "arguments": {"x": "<|im_end|>"}}
        assert after.startswith("<|im_end|>")
        ids = front.worker.requests[-1].prompt if front.worker is not None else []
        assert ids.count(2) == 3  # one <|im_end|> for each message: the one in the arguments is text

    with_front(tmp_path, scenario, "ok", model=hermes())


def test_reasoning_is_apart_from_content_and_counted(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        answer = (await front.chat()).json()
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "why\nnot"
        assert message["content"] == "So."
        details = answer["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": len(front.encode("why\nnot\n</think>", markers=True))}

    with_front(tmp_path, scenario, "why\nnot\n</think>\n\nSo.", model=hermes(THINKING))


@pytest.mark.parametrize(
    ("template", "fields", "end"),
    [
        (THINKING, {}, "<think>\n"),
        (THINKING, {"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
        (THINKING, {"reasoning_effort": "low"}, "<think>\n"),
        (SWITCHED, {"thinking": {"type": "disabled"}}, "<think>\n\n</think>\n\n"),
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n"),
        (SWITCHED, {"thinking": {"type": "enabled"}}, "assistant\n"),
        (TEMPLATE, {"thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_can_be_switched_off(
    tmp_path: Path, template: str, fields: dict[str, Any], end: str
) -> None:
    async def scenario(front: Front) -> None:
        assert (await front.chat(**fields)).status_code == 200
        assert prompt_of(front).endswith(end)
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        shown = (await front.client.post("/apply-template", json=body)).json()["prompt"]
        assert shown == prompt_of(front)

    with_front(tmp_path, scenario, "ok", model=hermes(template))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking"),
        ({"thinking": True}, "thinking"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_budget": 100}, "reasoning_budget"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ({"thinking": {"type": "disabled"}}, None),
        ({"thinking": {"type": "adaptive"}}, None),  # the model decides, and never wants to
        ({"thinking": False}, None),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_budget": 0}, None),
        ({"reasoning_budget": -1}, None),
    ],
)
def test_a_model_that_does_not_think_cannot_be_asked_to(
    tmp_path: Path, fields: dict[str, Any], param: str | None
) -> None:
    async def scenario(front: Front) -> None:
        response = await front.chat(**fields)
        if param is None:
            assert response.status_code == 200
            return
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(param)
        assert "leave it out, or switch it off" in error["message"]

    with_front(tmp_path, scenario)


def test_a_template_without_tools_gets_them_in_words(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        choice = (await front.chat(tools=TOOLS)).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "ping", "arguments": '{"a":1}'}
        assert prompt_of(front).startswith("<|im_start|>system\n")
        assert '"get_weather"' in prompt_of(front)

    with_front(tmp_path, scenario, '{"name": "ping", "arguments": {"a":1}}')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async def scenario(front: Front) -> None:
        answer = await front.chat(**fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param

    with_front(tmp_path, scenario, None)


THOUGHT = "one two three four five six seven eight nine ten"
CLOSING = "\n</think>\n\n"


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
@pytest.mark.parametrize("template", [THINKING, TEMPLATE])
def test_reasoning_ends_when_its_budget_is_used_up(
    tmp_path: Path, template: str, tokens_per_step: int
) -> None:
    opening = "" if template is THINKING else "<think>"

    async def scenario(front: Front) -> None:
        whole = front.encode(opening + THOUGHT * 4, markers=True)
        num_opening = 1 if opening else 0
        kept = whole[: num_opening + 12] + front.encode(CLOSING, markers=True)
        answer = kept + front.encode("So.")

        def script(request: GenerationRequest, prompt: list[int]) -> list[int]:
            return answer if request.num_resumed_tokens else whole

        worker = front.start_worker(script)
        worker.tokens_per_step = tokens_per_step
        await front.ready()
        for fields in ({"reasoning_budget": 12}, {"thinking": {"type": "enabled", "budget_tokens": 12}}):
            reply = (await front.chat(**fields)).json()
            message = reply["choices"][0]["message"]
            tokenizer = front.state.model.tokenizer
            assert message["reasoning_content"] == tokenizer.decode(whole[num_opening:][:12], special=False)
            assert message["content"] == "So."
            assert reply["usage"]["completion_tokens"] == len(answer)
            second = worker.requests[-1].request
            assert second.num_resumed_tokens == len(kept)
            assert second.max_tokens == worker.requests[-2].request.max_tokens
            chunks = await front.events(**fields)
            assert without_ids(joined(chunks)) == without_ids(message)
        await until(lambda: worker.num_open == 0)
        assert front.state.engine.metrics.value("ds4_resumed_streams_total") == 0

    with_front(tmp_path, scenario, None, model=hermes(template))


def test_a_budget_changes_nothing_for_shorter_reasoning(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert front.worker is not None
        for fields in ({}, {"reasoning_budget": 400}, {"reasoning_budget": 4, "max_tokens": 6}):
            reply = (await front.chat(**fields)).json()
            assert reply["choices"][0]["message"]["reasoning_content"]
            assert front.worker.requests[-1].request.num_resumed_tokens == 0

    with_front(tmp_path, scenario, "why not" + CLOSING + "So.", model=hermes(THINKING))


def test_a_budget_of_nothing_means_no_reasoning(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        await front.chat(reasoning_budget=0)
        assert prompt_of(front).endswith("<think>\n\n</think>\n\n")

    with_front(tmp_path, scenario, "So.", model=hermes(THINKING))


def test_a_client_that_leaves_while_reasoning_is_closed_frees_its_slot(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        thought = front.encode(THOUGHT)
        answer = [*thought[:5], *front.encode(CLOSING, markers=True), *thought]

        def script(request: GenerationRequest, prompt: list[int]) -> list[int]:
            return answer if request.num_resumed_tokens else thought

        worker = front.start_worker(script)
        worker.hold_after(12)
        await front.ready()
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "reasoning_budget": 5}
        async with front.client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for chunk in response.aiter_bytes():
                if b"reasoning_content" in chunk:
                    break
        await until(lambda: worker.num_open == 0 and front.state.engine.num_running == 0)

    with_front(tmp_path, scenario, None, model=hermes(THINKING))
