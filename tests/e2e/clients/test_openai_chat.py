"""The OpenAI Python client's chat and model calls against a real server."""

import json
from collections.abc import Iterator
from typing import Final

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

from tests.support.server import DEADLINE_S, Server

pytestmark = pytest.mark.e2e

_USER: Final[list[ChatCompletionMessageParam]] = [{"role": "user", "content": "hello"}]
_LOOK: Final[ChatCompletionFunctionToolParam] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}},
            "required": ["far"],
            "additionalProperties": False,
        },
    },
}


class _Fact(pydantic.BaseModel):
    is_true: bool


@pytest.fixture
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tiny_server.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S
    ) as made:
        yield made


def test_every_listed_model_can_be_asked_for(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", max_tokens=40, seed=5, messages=_USER)
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="m",
        max_tokens=40,
        seed=5,
        messages=_USER,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_schema_comes_back_as_the_clients_own_type(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="m", messages=_USER, response_format=_Fact, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, _Fact)


def test_a_named_tool_is_called_as_its_schema_says_streamed_or_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="m",
        seed=5,
        max_tokens=400,
        messages=_USER,
        tools=[_LOOK],
        tool_choice={"type": "function", "function": {"name": "look"}},
    )
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert set(json.loads(call.function.arguments)) == {"far"}
    with client.chat.completions.stream(
        model="m",
        seed=5,
        max_tokens=400,
        messages=_USER,
        tools=[_LOOK],
        tool_choice={"type": "function", "function": {"name": "look"}},
    ) as stream:
        streamed = stream.get_final_completion()
    (again,) = streamed.choices[0].message.tool_calls or []
    assert again.function.name == "look"
    assert again.function.arguments == call.function.arguments


def test_an_overlong_prompt_is_known_by_its_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "xyz" * 20_000}])
    assert caught.value.code == "context_length_exceeded"
