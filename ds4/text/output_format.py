"""Which way a model writes reasoning and tool calls: found in its chat template.

Owns: `find_output_format`. Runs in: front ends, once at start. Source: the templates of the model
families; a template that shows the model how calls look names the markers that parse them.
"""

from collections.abc import Callable
from typing import Final

from ds4.text.harmony import HarmonyReader
from ds4.text.output import OutputFormat
from ds4.text.reasoning import find_think_tags
from ds4.text.tool_calls import ToolFormat
from ds4.text.tools.element_calls import ElementCalls
from ds4.text.tools.gemma_calls import GemmaCalls
from ds4.text.tools.invoke_calls import InvokeCalls
from ds4.text.tools.json_calls import BareOr, JsonCalls
from ds4.text.tools.keyed_calls import KeyedCalls
from ds4.text.tools.marked_calls import LlamaCalls, MarkedCalls, MistralCalls
from ds4.text.tools.param_calls import ParamCalls
from ds4.text.tools.python_calls import PythonCalls
from ds4.text.tools.recipient_calls import RecipientCalls
from ds4.text.tools.tagged_calls import ArgumentTagCalls, FunctionTagCalls

_DSML_BAR: Final = "\uff5c"
_GENERIC: Final = JsonCalls((), is_bare=True)
_DEEPSEEK: Final = MarkedCalls(
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)
_KIMI: Final = MarkedCalls(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_SOLAR: Final = MarkedCalls(
    ("<|tool_calls|>", "<|calls|>"),
    "<|tool_call:begin|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
    name_open="<|tool_call:name|>",
)
_DSML: Final = InvokeCalls(
    ("tool_calls", "function_calls"), (f"{_DSML_BAR}DSML{_DSML_BAR}", f"DSML{_DSML_BAR}", "")
)
_LFM: Final = PythonCalls("<|tool_call_start|>", "<|tool_call_end|>")
# Its tool `directly-answer` stands for no call at all.
_COMMAND_R: Final = JsonCalls(
    ("Action:\n```json", "Action: ```json", "Action:```json"), ("```",), known_only=True
)
_GIGACHAT: Final = JsonCalls(("<|message_sep|>\n\nfunction call<|role_sep|>\n",), ("<|message_sep|>",))
# Templates that only name no marker; then what the vocabulary has a token for.
_TOKENS: Final[tuple[tuple[str, ToolFormat], ...]] = (
    ("<|tool_call_start|>", _LFM),
    ("<tool_call>", JsonCalls(("<tool_call>",), ("</tool_call>",))),
)
# What a template must hold, and the family it then is of; the first that fits.
_FAMILIES: Final[tuple[tuple[tuple[str, ...], ToolFormat], ...]] = (
    ((f"{_DSML_BAR}DSML{_DSML_BAR}",), _DSML),
    (("<minimax:tool_call>",), InvokeCalls(("minimax:tool_call",))),
    (("]<]minimax[>[",), ElementCalls("]<]minimax[>[")),
    (("<arg_key>",), ArgumentTagCalls()),
    (("<arg_key{}>", ":opensource"), ArgumentTagCalls(":opensource")),
    (('<function name="', '<param name="'), ParamCalls()),
    (
        ("<function=", "<parameter=", "seed:tool_call"),
        FunctionTagCalls("<seed:tool_call>", "</seed:tool_call>"),
    ),
    (("<function=", "<parameter="), FunctionTagCalls("<tool_call>", "</tool_call>")),
    (("[TOOL_CALLS]",), MistralCalls()),
    (("tool\u2581call\u2581begin",), _DEEPSEEK),
    (("<|tool_call_begin|>",), _KIMI),
    (("<|tool_call:begin|>", "<|tool_call:name|>"), _SOLAR),
    (("<|tool_call>", "<tool_call|>"), GemmaCalls()),
    (("<|tools_prefix|>",), KeyedCalls("<|tools_prefix|>", "<|tools_suffix|>")),
    ((">>>all",), RecipientCalls()),
    (("directly-answer", "Action:"), _COMMAND_R),
    (("'role': 'function call'",), _GIGACHAT),
    (("<TOOLCALL>",), JsonCalls(("<TOOLCALL>",), ("</TOOLCALL>",))),
    (("<|tool_call|>",), JsonCalls(("<|tool_call|>",), ("<|/tool_call|>",))),
    (("<|START_ACTION|>",), JsonCalls(("<|START_ACTION|>",), ("<|END_ACTION|>",))),
    (("functools[",), JsonCalls(("functools",))),
    (("<tool_calls>",), JsonCalls(("<tool_calls>",), ("</tool_calls>",))),
    (("<|function_call|>",), JsonCalls(("<|function_call|>",))),
    (("<|tool_call_start|>",), _LFM),
    (("<|tool_list_start|>",), _LFM),
    (("<tool_call>",), JsonCalls(("<tool_call>",), ("</tool_call>",))),
    (("<|python_tag|>",), LlamaCalls()),
    (("ipython",), LlamaCalls()),
)


def find_output_format(
    template: str, is_token: Callable[[str], bool], *, takes_tools: bool = True
) -> OutputFormat:
    """The format of a model with this template; `is_token` tells whether its vocabulary has a text.

    Where the template does not tell the model about tools (`takes_tools`), the model is asked for bare JSON
    (ds4/text/tools/plain.py), and may still write what it was trained for.
    """
    if "<|channel|>" in template and "<|message|>" in template:
        return OutputFormat(harmony=HarmonyReader())
    found = (family for signs, family in _FAMILIES if all(sign in template for sign in signs))
    in_words = (family for token, family in _TOKENS if is_token(token))
    tools = next(found, None) or next(in_words, _GENERIC)
    if not takes_tools and tools is not _GENERIC:
        tools = BareOr(tools, _GENERIC)
    return OutputFormat(think=find_think_tags(template, is_token), tools=tools)
