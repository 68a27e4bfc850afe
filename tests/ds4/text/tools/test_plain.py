"""ds4/text/tools/plain.py: tools in words, for templates that know none."""

from typing import Any

import pytest

from ds4.text.chat_template import CHATML, ChatTemplate
from ds4.text.tokenizer import Tokenizer
from ds4.text.tools.plain import explained
from tests.ds4.text.outputs import TOOLS, call, format_of, parse
from tests.ds4.text.test_chat_template import write_model

STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FULL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city":"Bonn"}'},
            },
            {"id": "b", "type": "function", "function": {"name": "ping", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "name": "get_weather", "content": "sunny"},
    {"role": "tool", "tool_call_id": "b", "content": "pong"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_model(write_model(tmp_path_factory.mktemp("model") / "m.gguf"))


def test_a_template_that_knows_tools_gets_them_untouched(tokenizer: Tokenizer) -> None:
    assert explained(ChatTemplate(FULL, tokenizer), HISTORY, TOOLS) == HISTORY


@pytest.mark.parametrize(("source", "role"), [(CHATML, "system"), (STRICT, "user")])
def test_tools_are_described_in_words(tokenizer: Tokenizer, source: str, role: str) -> None:
    template = ChatTemplate(source, tokenizer)
    first, *_ = messages = explained(template, HISTORY, TOOLS)
    assert first["role"] == role
    assert '"get_weather"' in first["content"]
    assert len(messages) == (5 if role == "system" else 4) - (not template.shows_results)
    template.render(messages)


def test_a_system_message_is_kept(tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": "Be brief."}
    first, *rest = explained(ChatTemplate(CHATML, tokenizer), [system, *HISTORY[:1]], TOOLS)
    assert first["content"].endswith("\n\nBe brief.")
    assert rest == HISTORY[:1]


def test_calls_in_the_history_are_written_as_the_model_is_asked_to(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(STRICT, tokenizer)
    text = template.display(template.render(explained(template, HISTORY, [])))
    calls = '{"name":"get_weather","arguments":{"city":"Bonn"}}\n{"name":"ping","arguments":{}}'
    assert calls in text
    assert parse(format_of(STRICT), [calls]) == [
        *call(0, "get_weather", '{"city":"Bonn"}'),
        *call(1, "ping", "{}"),
    ]
    assert "sunny" in text
    assert "pong" in text


def test_results_of_parallel_calls_are_one_message(tokenizer: Tokenizer) -> None:
    messages = explained(ChatTemplate(STRICT, tokenizer), HISTORY, [])
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert all(set(message) == {"role", "content"} for message in messages)
