"""Which way a model writes reasoning and tool calls: found in its chat template.

Owns: `find_output_format`. Runs in: front ends, once at start. Source: the templates of the model
families; a template that shows the model how calls look names the markers that parse them.
"""

from collections.abc import Callable
from typing import Final

from ds4.text.output import OutputFormat
from ds4.text.reasoning import find_think_tags
from ds4.text.tool_calls import ToolFormat
from ds4.text.tools.json_calls import JsonCalls

_BARE: Final = JsonCalls((), is_bare=True)
# What a template must hold, and the family it then is of; the first that fits.
_FAMILIES: Final[tuple[tuple[tuple[str, ...], ToolFormat], ...]] = (
    (("<tool_call>",), JsonCalls(("<tool_call>",), ("</tool_call>",))),
)


def find_output_format(template: str, is_token: Callable[[str], bool]) -> OutputFormat:
    """The format of a model with this template; `is_token` tells whether its vocabulary has a text."""
    tools = next(
        (family for signs, family in _FAMILIES if all(sign in template for sign in signs)),
        _BARE,
    )
    return OutputFormat(think=find_think_tags(template, is_token), tools=tools)
