"""Conversations for templates that are strict about turns: no system, or user and assistant by turns.

Owns: `without_system`, `by_turns`, `answered`. Runs in: front ends. Source: this project; what a template can take is
found by the probes of ds4/text/chat_template.py. Without this, an agent's usual conversation is refused by
the templates of Gemma 2 and Mistral.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_ANSWER: Final = "OK."  # some templates refuse an empty one
_JOINED: Final = frozenset(("user", "assistant"))


def without_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same with each system message at the head of the user's message after it."""
    out: list[Mapping[str, Any]] = []
    rules: Any = None
    for message in messages:
        if message["role"] in ("system", "developer"):
            rules = message.get("content") if rules is None else _joined(rules, message.get("content"))
        elif message["role"] == "user" and rules is not None:
            out.append({**message, "content": _joined(rules, message.get("content"))})
            rules = None
        else:
            out.append(message)
    if rules is not None:
        out.append({"role": "user", "content": rules})
    return out


def by_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same with neighbours of one role joined, where they are nothing but text."""
    out: list[Mapping[str, Any]] = []
    for message in messages:
        role = message["role"]
        is_plain = role in _JOINED and not message.get("tool_calls")
        if is_plain and out and out[-1]["role"] == role and not out[-1].get("tool_calls"):
            out[-1] = {**out[-1], "content": _joined(out[-1].get("content"), message.get("content"))}
        else:
            out.append(message)
    return out


def answered(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same with the shortest answer where the user speaks right after the results of tools."""
    out: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "user" and out and out[-1]["role"] == "tool":
            out.append({"role": "assistant", "content": _ANSWER})
        out.append(message)
    return out


def _joined(first: Any, second: Any) -> Any:
    """Two contents as one: texts, or lists of parts."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[content] if isinstance(content, str) else list(content) for content in (first, second)]
    return parts[0] + parts[1]
