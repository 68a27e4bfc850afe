"""Every route with a body, against bodies that nobody foresaw: an answer, and never one of 5xx."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Final

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4.protocol.anthropic_messages import MessagesRequest
from ds4.protocol.llama_completion import InfillRequest, NativeRequest
from ds4.protocol.openai_chat import ChatMessage, ChatRequest, ContentPart
from ds4.protocol.openai_completions import CompletionRequest
from ds4.protocol.openai_responses import ResponsesRequest
from tests.support.front_rig import DEADLINE_S, run, running_front

_ROUTES: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/chat/completions/input_tokens",
    "/v1/responses/input_tokens",
    "/completion",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/apply-template",
)


# Where some of the bodies must be good enough to be answered: else the test would prove nothing.
_REACHED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/completion")

_LAST: Final[dict[str, bytes | tuple[bytes, ...]]] = {  # how a stream ends that ended well
    "/completion": b'data: {"index"',
    "/v1/messages": b"event: message_stop",
    "/v1/responses": (b"event: response.completed", b"event: response.incomplete"),
}


def _names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


_KNOWN: Final = sorted(
    {
        *_names(ChatRequest),
        *_names(CompletionRequest),
        *_names(MessagesRequest),
        *_names(ResponsesRequest),
        *_names(NativeRequest),
        *_names(InfillRequest),
        "content",
        "tokens",
        "with_pieces",
    }
)
_texts: Final = st.text(max_size=20) | st.sampled_from(
    ["", "<|im_end|>", "\x00", "😀", "\ud800", "user", "text", "hello world", "ͼ" * 50]
)
_leaves: Final = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.integers(-2, 130)
    | st.floats(allow_nan=True, allow_infinity=True)
    | _texts
)
_values: Final = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)
_parts: Final = st.fixed_dictionaries({}, optional=dict.fromkeys(_names(ContentPart), _values))
_messages: Final = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | _texts},
        optional={
            **{name: _values for name in _names(ChatMessage) if name != "role"},
            "content": _texts | st.lists(_parts, max_size=2) | st.none(),
        },
    ),
    max_size=4,
)
_blocks: Final = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "document"]) | _texts},
    optional=dict.fromkeys(["text", "thinking", "id", "name", "tool_use_id", "source", "is_error"], _values)
    | {
        "input": st.dictionaries(_texts, _values, max_size=2),
        "content": _texts | st.lists(_values, max_size=2),
    },
)
_block_messages: Final = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.lists(_blocks, max_size=3)}
    ),
    max_size=3,
)
_items: Final = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"])
            | _texts,
            "role": st.sampled_from(["user", "assistant", "system"]) | _values,
            **dict.fromkeys(
                ["id", "content", "summary", "encrypted_content", "name", "arguments", "call_id", "output"],
                _values,
            ),
        },
    ),
    max_size=4,
)
_prompts: Final = _texts | st.lists(st.integers(-1, 300), max_size=5) | st.lists(_texts, max_size=3) | _values
_good_messages: Final = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=20)}),
    min_size=1,
    max_size=3,
)
_others: Final = st.dictionaries(st.sampled_from(_KNOWN), _values, max_size=2)
_good: Final = st.fixed_dictionaries(
    {
        "messages": _good_messages,
        "prompt": st.text(max_size=20) | st.lists(st.integers(0, 200), max_size=5),
        "input": st.text(max_size=20) | _good_messages,
        "content": st.text(max_size=20),
        "input_prefix": st.text(max_size=20),
        "input_suffix": st.text(max_size=20),
        "tokens": st.lists(st.integers(0, 200), max_size=5),
    },
    optional={"max_tokens": st.integers(1, 4), "n": st.integers(1, 3), "stream": st.booleans()},
)
_odd: Final = st.fixed_dictionaries(
    {},
    optional={
        "messages": _messages | _block_messages,
        "prompt": _prompts,
        "input": _items | _values,
        "content": _texts,
        "tokens": _values,
    },
)
_bodies: Final = (
    st.builds(lambda good, others, odd: {**good, **others, **odd}, _good, _others, st.just({}) | _odd) | _odd
)
_raw: Final = (
    _bodies.map(lambda body: json.dumps(body).encode())
    | _values.map(lambda body: json.dumps(body).encode())
    | st.binary(max_size=60)
    | st.builds(
        lambda body, at, new: json.dumps(body).encode()[:at] + new + json.dumps(body).encode()[at:],
        _bodies,
        st.integers(0, 80),
        st.binary(min_size=1, max_size=3),
    )
)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A front end in a thread: hypothesis calls tests that are not asynchronous."""
    ports: list[int] = []
    started, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running_front(
            tmp_path_factory.mktemp("fuzz"), "hello world", max_body_bytes=65536
        ) as front:
            ports.append(front.port)
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=run, args=(serve, None))  # it serves as long as the module's tests take
    thread.start()
    try:
        assert started.wait(DEADLINE_S)
        yield ports[0]
    finally:
        ended.set()
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("route", _ROUTES)
def test_no_body_makes_a_server_error(port: int, route: str) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:

        @settings(
            max_examples=120 if route.startswith("/v1") else 40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(body=_raw)
        def post(body: bytes) -> None:
            response = client.post(route, content=body)
            assert response.status_code in (200, 400), (response.status_code, body, response.text)
            if response.status_code == 400:
                error: Any = response.json()["error"]
                assert error["message"]
                assert error["type"] == "invalid_request_error"
            elif not response.headers["content-type"].startswith("text/event-stream"):
                response.json()
            else:
                last = response.content.split(b"\n\n")[-2]
                assert last.startswith(_LAST.get(route, b"data: [DONE]")), response.content
                assert b'"error":{' not in response.content

        def num_prompt_tokens() -> int:
            found = re.search(r"^ds4_prompt_tokens_total (\d+)$", client.get("/metrics").text, re.MULTILINE)
            assert found is not None
            return int(found[1])

        before = num_prompt_tokens()
        post()
        assert route not in _REACHED or num_prompt_tokens() > before, "all bodies were refused"
