"""Every known field of every route with values of every kind: served or refused by name, never an error of ours.

What a request asks is worked out as the routes do it; nothing is generated.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from ds4.api import completions, messages, native, responses, tokenize
from ds4.api.chat import chat_job
from ds4.api.state import ServedModel
from ds4.config import Settings
from ds4.errors import RequestError
from ds4.model_file import ModelFile
from ds4.protocol.anthropic_messages import MessagesRequest
from ds4.protocol.llama_completion import InfillRequest, NativeRequest
from ds4.protocol.openai_chat import ChatRequest, decode_chat
from ds4.protocol.openai_completions import CompletionRequest
from ds4.protocol.openai_responses import ResponsesRequest, input_items
from ds4.protocol.tokens import DetokenizeRequest, TokenizeRequest
from tests.support.tiny_model import write_tiny_model

_CHAT: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "x"}]}
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SCALARS: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    5,
    1 << 70,
    0.5,
    -1e300,
    "",
    "x",
    "none",
    "\x00",
)
_INSIDE: Final[tuple[Any, ...]] = ("x", 5, [], {}, None)
_VALUES: Final[tuple[Any, ...]] = (
    *_SCALARS,
    [],
    {},
    *([each] for each in _SCALARS),
    [[]],
    [{}],
    [["x", 1]],
    [_TOOL],
    {"x": 1},
    {"": {}},
    *({name: each} for name in ("type", "name", "function", "tools", "schema") for each in _INSIDE),
    {"type": "function", "function": 5},
    {"type": "function", "function": {"name": 5}},
    {"type": "enabled", "budget_tokens": []},
    {"type": "json_schema", "json_schema": 5},
    {"type": "json_schema", "json_schema": {"schema": 5}},
    {"type": "allowed_tools", "allowed_tools": 5},
    {"type": "allowed_tools", "mode": "auto", "tools": [5]},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
)


def _responses(model: ServedModel, body: bytes) -> object:
    request, more = responses._decoded(body)
    return responses._fitting_job(model, request, more, input_items(request), model.max_context_tokens)


Asked = Callable[[ServedModel, bytes], object]
_ROUTES: Final[dict[str, tuple[type[msgspec.Struct], dict[str, Any], Asked]]] = {
    "chat": (ChatRequest, _CHAT, lambda model, body: chat_job(model, decode_chat(body), "messages")),
    "tools": (
        ChatRequest,
        {**_CHAT, "tools": [_TOOL]},
        lambda model, body: chat_job(model, decode_chat(body), "messages"),
    ),
    "completions": (CompletionRequest, {"prompt": "x"}, completions._prepare),
    "messages": (MessagesRequest, {**_CHAT, "max_tokens": 5}, messages._prepare),
    "chat's in messages": (ChatRequest, {**_CHAT, "max_tokens": 5}, messages._prepare),
    "chat's in responses": (ChatRequest, {"input": "x"}, _responses),
    "responses": (ResponsesRequest, {"input": "x"}, _responses),
    "completion": (NativeRequest, {"prompt": "x"}, native._prepare),
    "infill": (InfillRequest, {"input_prefix": "x", "input_suffix": "y"}, native._prepare_infill),
    "tokenize": (TokenizeRequest, {"content": "x"}, lambda model, body: tokenize._tokenize(model, body, 512)),
    "detokenize": (DetokenizeRequest, {"tokens": [5]}, tokenize._detokenize),
    "template": (ChatRequest, _CHAT, tokenize._apply_template),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    marks = {
        f"tokenizer.ggml.fim_{name}_token_id": 7 + index for index, name in enumerate(("pre", "suf", "mid"))
    }
    path: Path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", extra_uint32=marks)
    return ServedModel(Settings(), ModelFile.open(path))


@pytest.mark.parametrize("route", _ROUTES)
def test_a_value_of_any_kind_is_served_or_refused(model: ServedModel, route: str) -> None:
    kind, plain, asked = _ROUTES[route]
    asked(model, msgspec.json.encode(plain))  # else everything below would be refused
    num_served = 0
    for field in msgspec.structs.fields(kind):
        for value in _VALUES:
            body = {**plain, field.encode_name: value}
            try:
                asked(model, msgspec.json.encode(body))
            except RequestError:
                continue
            except Exception as error:
                raise AssertionError(body) from error
            num_served += 1
    assert num_served
