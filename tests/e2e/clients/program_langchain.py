"""What users of langchain-openai do. Run by test_other_clients.py with the server's URL."""

import sys
from typing import Any, Final

import pydantic
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

_URL: Final = sys.argv[1]


class Fact(pydantic.BaseModel):
    """A fact."""

    is_true: bool


def _look(far: bool) -> str:
    """Look around."""
    return "a wall far away" if far else "a wall"


look: Final = tool("look")(_look)


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{_URL}/v1", api_key="any", model="m", temperature=0, max_retries=0, **options
    )


def whole_and_streamed(**options: Any) -> None:
    """A chat and its stream say the same."""
    chat = model(max_tokens=20, **options)
    whole = chat.invoke("hello")
    streamed = list(chat.stream("hello"))
    assert "".join(chunk.text for chunk in streamed) == whole.text
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0


def an_agents_loop(**options: Any) -> None:
    """A streamed call, run, and its result handed back."""
    chat = model(max_tokens=200, **options)
    asked = HumanMessage("look")
    total: AIMessageChunk | None = None
    for chunk in chat.bind_tools([look], tool_choice="look").stream([asked]):
        total = chunk if total is None else total + chunk
    assert total is not None
    assert not total.invalid_tool_calls
    results = [look.invoke(call) for call in total.tool_calls]
    assert results
    assert all(isinstance(result, ToolMessage) for result in results)
    answer = chat.bind_tools([look]).invoke([asked, total, *results])
    assert answer.usage_metadata is not None


def an_answer_in_a_form(**options: Any) -> None:
    """Structured output by every method."""
    for method in ("json_schema", "function_calling"):
        fact = model(max_tokens=200, **options).with_structured_output(Fact, method=method).invoke("hello")
        assert isinstance(fact, Fact)


for dialect in ({}, {"use_responses_api": True}):
    whole_and_streamed(**dialect)
    an_agents_loop(**dialect)
    an_answer_in_a_form(**dialect)
