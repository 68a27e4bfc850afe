"""What litellm's users do, in all three dialects. Run by test_other_clients.py with the server's URL."""

import json
import sys
from typing import Any, Final

import litellm

_URL: Final = sys.argv[1]
_USER: Final = [{"role": "user", "content": "hello"}]
_LOOK: Final = {
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
_OPENAI: Final[dict[str, Any]] = {"model": "openai/m", "api_base": f"{_URL}/v1", "api_key": "any"}
_ANTHROPIC: Final[dict[str, Any]] = {"model": "anthropic/m", "api_base": _URL, "api_key": "any"}


def whole_and_streamed(**options: Any) -> None:
    """A chat and its stream say the same, and both count."""
    whole = litellm.completion(**options, messages=_USER, max_tokens=20, temperature=0)
    assert whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(
        litellm.completion(
            **options,
            messages=_USER,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == (whole.choices[0].message.content or "")
    usage = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)][-1]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def an_agents_loop(**options: Any) -> None:
    """A forced call, streamed, its result, and the answer to it."""
    chunks = list(
        litellm.completion(
            **options,
            messages=_USER,
            tools=[_LOOK],
            tool_choice="required",
            temperature=0,
            parallel_tool_calls=False,  # a model of random weights would call until the limit
            max_tokens=200,
            stream=True,
        )
    )
    built = litellm.stream_chunk_builder(chunks, messages=_USER)
    assert built is not None
    message = built.choices[0].message
    assert built.choices[0].finish_reason == "tool_calls"
    calls = message.tool_calls
    assert calls
    assert isinstance(json.loads(calls[0].function.arguments)["far"], bool)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "a wall"} for call in calls]
    answer = litellm.completion(
        **options, messages=[*_USER, message.model_dump(), *results], tools=[_LOOK], max_tokens=20
    )
    assert answer.usage.prompt_tokens > 0


def errors_have_their_classes() -> None:
    """What the server says becomes what litellm's users catch."""
    try:
        litellm.completion(**_OPENAI, messages=[{"role": "user", "content": "hello " * 20_000}])
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("a prompt that cannot fit was taken")
    try:
        litellm.completion(**_OPENAI, messages=_USER, temperature=-1)
    except litellm.BadRequestError:
        pass
    else:
        raise AssertionError("a temperature below zero was taken")


def responses_go_on_from_each_other() -> None:
    """The Responses API with a stored turn."""
    first = litellm.responses(**_OPENAI, input="hello", max_output_tokens=8)
    second = litellm.responses(**_OPENAI, input="and?", max_output_tokens=8, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens


litellm.num_retries = 0
whole_and_streamed(**_OPENAI)
whole_and_streamed(**_ANTHROPIC)
an_agents_loop(**_OPENAI)
an_agents_loop(**_ANTHROPIC)
errors_have_their_classes()
responses_go_on_from_each_other()
