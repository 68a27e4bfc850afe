"""The chat templates of known models: what they show of calls, our parsers read back.

The templates are llama.cpp's collection, which is not ours to keep: DS4_TEST_TEMPLATES names its folder, in
llama-cpp-python's source distribution `vendor/llama.cpp/models/templates`.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from ds4.text.chat_template import ChatTemplate
from ds4.text.output_format import find_output_format
from ds4.text.tokenizer import Tokenizer
from ds4.text.tools.plain import explained
from tests.ds4.text.outputs import Flat, cuts, parse, tool
from tests.ds4.text.test_chat_template import write_model

_FOLDER: Final = os.environ.get("DS4_TEST_TEMPLATES", "")  # noqa: TID251 - where test data is, no setting
_FILES: Final = sorted(Path(_FOLDER).glob("*.jinja")) if _FOLDER else []
# Their whole outputs are messages in a notation of their own, which nothing here reads.
_UNREAD: Final = ("Kimi-K3", "muse-glimmer")
_TOOLS: Final = [
    tool("get_weather", city="string", days="integer", detail="boolean", box="object"),
    tool("ping", n="integer"),
]
_WEATHER: Final = (
    "get_weather",
    {"city": 'S\u00e3o "Paulo"\nx', "days": 3, "detail": True, "box": {"a": [1, "b"]}},
)
_CALLS: Final[list[list[tuple[str, dict[str, Any]]]]] = [
    [_WEATHER],
    [("ping", {})],
    [_WEATHER, ("ping", {"n": 1})],
]

pytestmark = pytest.mark.skipif(
    not _FILES, reason="DS4_TEST_TEMPLATES names no folder with llama.cpp's chat templates"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_model(write_model(tmp_path_factory.mktemp("model") / "m.gguf"))


class _Model:
    """A template with what a front end knows of it."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        source = path.read_text("utf-8")
        self.template = ChatTemplate(source, tokenizer)
        self.output = find_output_format(
            source, lambda text: text in source, takes_tools=self.template.takes_tools
        )

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        rendered = self.template.render(
            explained(self.template, messages, _TOOLS),
            tools=_TOOLS if self.template.takes_tools else None,
            **options,
        )
        return self.template.display(rendered)


def _history(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    made = [
        {
            "id": f"call0000{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "", "tool_calls": made},
    ]


def _results(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": f"call0000{index}", "name": name, "content": f"result-{index}"}
        for index, (name, _) in enumerate(calls)
    ]


def _calls(events: Flat) -> list[tuple[str, Any]]:
    names = [event[2] for event in events if event[0] == "begin"]
    texts = [""] * len(names)
    for event in events:
        if event[0] == "arguments":
            texts[int(event[1])] += event[2]
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def _output(prompt: str, whole: str) -> tuple[str, str]:
    """Where the prompt ends and what the model then said, cut at no marker's middle."""
    pairs = enumerate(zip(prompt, whole, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(prompt), len(whole)))
    while at < len(prompt) and prompt.rfind("<", 0, at) > prompt.rfind(">", 0, at):
        at = prompt.rfind("<", 0, at)
    return prompt[:at], whole[at:]


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_tools_calls_and_results_reach_the_model(path: Path, tokenizer: Tokenizer) -> None:
    model = _Model(path, tokenizer)
    for calls in _CALLS:
        prompt = model.render([*_history(calls), *_results(calls)])
        for index, (name, _) in enumerate(calls):
            assert name in prompt
            assert f"result-{index}" in prompt


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_an_agents_conversation_is_refused_by_none(path: Path, tokenizer: Tokenizer) -> None:
    """Rules, a call with its result and the user's words after it, two messages in a row."""
    model = _Model(path, tokenizer)
    messages = [
        {"role": "system", "content": "said-0"},
        *_history(_CALLS[0]),
        *_results(_CALLS[0]),
        {"role": "user", "content": "said-1"},
        {"role": "user", "content": "said-2"},
        {"role": "assistant", "content": "said-3"},
        {"role": "user", "content": "said-4"},
    ]
    prompt = model.render(messages)
    for index in range(5):
        assert f"said-{index}" in prompt


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_calls_as_the_template_shows_them_are_read_however_they_are_cut(
    path: Path, tokenizer: Tokenizer
) -> None:
    model = _Model(path, tokenizer)
    if path.stem in _UNREAD:
        pytest.skip("the family's notation is not read")
    if not model.template.shows_calls and model.template.takes_tools:
        pytest.skip("the template tells of tools, but shows no calls")
    for calls in _CALLS if model.template.shows_several_calls else _CALLS[:2]:
        history = _history(calls)
        before, text = _output(model.render(history[:1]), model.render(history, add_generation_prompt=False))
        events = parse(model.output, [text], tools=_TOOLS, rendered=before)
        assert _calls(events) == calls, text
        for seed in range(8):
            assert parse(model.output, cuts(text, seed), tools=_TOOLS, rendered=before) == events
        assert parse(model.output, list(text), tools=_TOOLS, rendered=before) == events
