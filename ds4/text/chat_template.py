"""Messages to the one text that the model was trained on, by the template in its file.

Owns: `ChatTemplate`. Runs in: front ends. Source: the conventions are those of Hugging Face
transformers' `apply_chat_template`; what a template can take is found out by rendering a probe.

Everything that comes from the client is guarded (ds4/text/markers.py) before the template sees it.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ds4.errors import RequestError
from ds4.json_size import check_json_size
from ds4.model_file import ModelFile
from ds4.text.markers import GUARD
from ds4.text.template_sandbox import (
    EndlessTemplateError,
    compile_template,
    free_variables,
    render_template,
)
from ds4.text.tokenizer import Tokenizer
from ds4.text.tool_history import described, one_call_each
from ds4.text.turn_order import answered, by_turns, without_system

logger = logging.getLogger(__name__)

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PROBE: Final = "probe of the content"
_LONG_ID: Final = "call_probe0001"
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "options": {"type": "object"}},
        },
    },
}
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class ChatTemplate:
    """The chat template of one model. Immutable: any number of requests may render it."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, tool_source: str | None = None, is_default: bool = False
    ) -> None:
        """Raises ValueError saying what is wrong with the template."""
        self.source: Final = source
        self.is_default: Final = is_default
        self.all_source: Final = source + (tool_source or "")
        self._tokenizer = tokenizer
        self._template = compile_template(source)
        self._tool_template = compile_template(tool_source) if tool_source else self._template
        self._variables = free_variables(source) | free_variables(tool_source or "")
        self._no_tools: list[Any] | None = None
        if not self._understands(_user(_PROBE)):
            self._no_tools = []  # a template made for tools may walk through them without asking
        self._takes_text = self._understands(_user(_PROBE))
        self._takes_parts = self._understands(_user([{"type": "text", "text": _PROBE}]))
        self._takes_json_arguments = self._understands(
            _user("?") + _tool_call('{"probe": "' + _PROBE + '"}')
        ) and not self._understands(_user("?") + _tool_call({"probe": _PROBE}))
        self._takes_any_id = not self._refuses_long_ids()
        call = _tool_call('{"probe": "?"}' if self._takes_json_arguments else {"probe": "?"})
        probe = _user("?") + _tool_call({"probe": _PROBE})
        self.shows_calls: Final = (
            self._takes_json_arguments
            or self._understands(probe)
            or self._understands(probe + _tool_result(""))
        )
        self.shows_results: Final = self._understands(_user("?") + call + _tool_result(_PROBE))
        self.takes_system: Final = self._understands([{"role": "system", "content": _PROBE}, *_user("?")])
        self._takes_repeats = self._probe([*_user("?"), *_user("?")], self._no_tools) is not None
        results = _user("?") + call + _tool_result("?")
        self._takes_words_after_results = (
            self._probe(results, self._no_tools) is None
            or self._probe([*results, *_user("?")], self._no_tools) is not None
        )
        # Written for tools that say everything: with less, some templates fail.
        self._needs_descriptions = self._shows_tool(_PROBE_TOOL) is None
        self.takes_tools: Final = bool(
            self._shows_tool(described(_PROBE_TOOL) if self._needs_descriptions else _PROBE_TOOL)
        )
        self.shows_several_calls: Final = not self.shows_calls or self._shows_several_calls()

    @classmethod
    def from_model(cls, model: ModelFile, tokenizer: Tokenizer) -> "ChatTemplate":
        """The model's template; ChatML, said in the log, where the file has none or a broken one."""
        source = model.chat_template
        if not source:
            logger.warning("the model file has no chat template; chat uses ChatML")
            return cls(CHATML, tokenizer, is_default=True)
        tool_source = model.metadata.get("tokenizer.chat_template.tool_use")
        try:
            return cls(source, tokenizer, tool_source=tool_source if isinstance(tool_source, str) else None)
        except ValueError as error:
            logger.warning("the model's chat template cannot be used; chat uses ChatML reason=%s", error)
            return cls(CHATML, tokenizer, is_default=True)

    def _understands(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the probe comes out as text, and not inside Python's idea of a list or an object."""
        text = self._probe(messages, self._no_tools)
        if text is None:
            return False
        return _PROBE in text and not any(sign in text for sign in ("'type'", '"type": "text"', "{'probe'"))

    def _shows_tool(self, tool: Mapping[str, Any]) -> bool | None:
        """Whether the prompt tells the model of this tool; None where the template fails."""
        text = self._probe(_user("?"), [tool])
        return None if text is None else tool["function"]["name"] in text

    def _shows_several_calls(self) -> bool:
        """Whether two calls of one message come out; Llama's templates refuse them, others drop one."""
        arguments = '{"word": ""}' if self._takes_json_arguments else {"word": ""}
        calls = _tool_call(arguments, name="first_probe")[0]["tool_calls"]
        calls = calls + _tool_call(arguments, "probe0002", name="second_probe")[0]["tool_calls"]
        messages = [*_user("?"), {"role": "assistant", "content": "", "tool_calls": calls}]
        messages += _tool_result("", name="first_probe") + _tool_result("", "probe0002", name="second_probe")
        text = self._probe(messages, self._no_tools)
        return text is not None and "first_probe" in text and "second_probe" in text

    def _refuses_long_ids(self) -> bool:
        """Mistral's templates raise for ids of calls that have not nine characters."""
        arguments = '{"probe": ""}' if self._takes_json_arguments else {"probe": ""}
        short, long = (
            _user("?") + _tool_call(arguments, call_id) + _tool_result("", call_id)
            for call_id in ("probe0001", _LONG_ID)
        )
        return self._probe(short, self._no_tools) is not None and self._probe(long, self._no_tools) is None

    def _probe(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None) -> str | None:
        """What the template makes of these; None where it refuses. Raises ValueError where it does not end."""
        try:
            return self._render(self._tool_template, messages, tools, True, {})
        except EndlessTemplateError as error:
            raise ValueError(str(error)) from None
        except RequestError:
            return None

    def _render(
        self,
        template: Any,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        tokenizer = self._tokenizer
        bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
        if "functions" in self._variables:  # FireFunction's names for the tools and the time
            functions = [tool.get("function", tool) for tool in tools or ()]
            kwargs = {
                "datetime": datetime.now(UTC).strftime("%b %d %Y %H:%M:%S GMT"),
                "functions": json.dumps(functions, ensure_ascii=False, indent=4),
                **kwargs,
            }
        if "date_string" in self._variables:  # Llama's name for today, else some day in 2024
            kwargs = {"date_string": datetime.now(UTC).strftime("%d %b %Y"), **kwargs}
        return render_template(
            template,
            {
                **kwargs,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": "" if bos_id is None else tokenizer.token_text(bos_id),
                "eos_token": "" if eos_id is None else tokenizer.token_text(eos_id),
            },
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The guarded text for `Tokenizer.encode_rendered`.

        `messages` as in OpenAI's API; contents must be text. `kwargs` become template variables.
        Raises RequestError where the template refuses, with its message.
        """
        if not self.takes_system:
            messages = without_system(messages)
        if not self._takes_repeats:
            messages = by_turns(messages)
        if not self._takes_words_after_results:
            messages = answered(messages)
        if not self.shows_several_calls:
            messages = one_call_each(messages)
        if tools and self._needs_descriptions:
            tools = [described(tool) for tool in tools]
        extra = self._guard(dict(kwargs or {}))
        if reserved := sorted(_RESERVED & extra.keys()):
            raise RequestError(f"{reserved[0]} cannot be set for the template", param="chat_template_kwargs")
        return self._render(
            self._tool_template if tools else self._template,
            [self._message(message, index) for index, message in enumerate(messages)],
            self._guard(list(tools)) if tools else self._no_tools,
            add_generation_prompt,
            extra,
        )

    def display(self, guarded: str) -> str:
        """What `render` returned, for people: without the guards."""
        return self._tokenizer.markers.unguard(guarded)

    def guarded(self, text: str) -> str:
        """Text of a client's, to be put after what was rendered."""
        return self._tokenizer.markers.guard(text)

    def _guard(self, value: Any) -> Any:
        """A copy of decoded JSON in which no text holds a marker."""
        if isinstance(value, str):
            return self._tokenizer.markers.guard(value)
        if isinstance(value, Mapping):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item) for item in value]
        return value

    def _message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        param = f"messages[{index}]"
        guarded: dict[str, Any] = {}
        for name, value in message.items():
            if name == "role":
                guarded[name] = self._role(value)
            elif name == "content":
                continue
            elif name == "tool_calls" and value:
                calls = value if self._takes_json_arguments else map(_with_object_arguments, value)
                guarded[name] = [self._guard(self._with_id(call)) for call in calls]
            elif name == "tool_call_id" and isinstance(value, str) and not self._takes_any_id:
                guarded[name] = _short_id(value)
            else:
                guarded[name] = self._guard(value)
        guarded["content"] = self._content(message.get("content"), f"{param}.content")
        return guarded

    def _with_id(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        call_id = call.get("id")
        if self._takes_any_id or not isinstance(call_id, str):
            return call
        return {**call, "id": _short_id(call_id)}

    def _role(self, role: str) -> str:
        """Templates build markers from roles (`'<|' + role + '|>'`), so only known ones pass unbroken."""
        if role == "developer" and "developer" not in self.all_source:
            return "system"  # OpenAI's new name for it, which older templates do not know
        if role in _ROLES or f"'{role}'" in self.all_source or f'"{role}"' in self.all_source:
            return role
        return GUARD + self._tokenizer.markers.guard(role)

    def _content(self, content: Any, param: str) -> Any:
        """Text or text parts, whichever the template takes; an absent content is an empty one."""
        if content is None:
            content = ""
        if isinstance(content, str):
            texts = [content]
        else:
            texts = [_text_of(part, f"{param}[{index}]") for index, part in enumerate(content)]
        guarded = [self._tokenizer.markers.guard(text) for text in texts]
        if self._takes_parts and (not isinstance(content, str) or not self._takes_text):
            return [{"type": "text", "text": text} for text in guarded]
        return "\n".join(guarded)


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _tool_call(arguments: Any, call_id: str = "probe0001", name: str = "probe") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


def _tool_result(content: str, call_id: str = "probe0001", name: str = "probe") -> list[dict[str, Any]]:
    return [{"role": "tool", "content": content, "tool_call_id": call_id, "name": name}]


def _short_id(call_id: str) -> str:
    """Nine letters and digits that stand for this id."""
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _text_of(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    text = part.get("text")
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise RequestError(f"content of type {kind!r} is not supported; this model takes text", param=param)
    return text


def _with_object_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates expect a tool call's arguments as an object, OpenAI's API sends them as JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"].encode("utf-8", "replace") or b"{}"
    check_json_size(text)
    try:
        arguments = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return call  # a model may have written it wrong: let the template show it as it is
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
