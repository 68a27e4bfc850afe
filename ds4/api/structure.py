"""How an answer is made to have a form: a client's schema or grammar, forced tool calls, reasoning first.

Owns: what of a conversation goes into the grammar. Runs in: front ends. A model that reasons may do so
before an answer of any form. Where tools may be called, a call may stand in the place of the answer that
`response_format` asks for.
"""

from collections.abc import Mapping

import msgspec

from ds4.api.state import ServedModel
from ds4.errors import RequestError
from ds4.protocol.common import Plan
from ds4.protocol.conversation import Conversation, NamedTool
from ds4.protocol.structured import Structure
from ds4.text.arriving import SPACE
from ds4.text.grammar import harmony_rules, thinking_rules
from ds4.text.output import OutputFormat
from ds4.text.tool_grammar import HARMONY, PLAIN, CallLayout, grammar_for_tools, layout_of
from ds4.text.tools.json_calls import BareOr, JsonCalls


def structured(
    model: ServedModel, plan: Plan, asked: Conversation, rendered: str
) -> tuple[OutputFormat, Plan]:
    """How the output is read, and the plan with the structure that the answer must have, if any.

    Raises RequestError.
    """
    choice, output = asked.tool_choice, model.output
    is_forced = asked.is_forced
    given = plan.structure
    if not is_forced and given is None:
        return output, plan
    if is_forced and given is not None:
        raise RequestError(
            f"{given.param} cannot be given together with a tool_choice that forces a call",
            param=given.param,
            code="invalid_value",
        )
    control_ids = _control_ids(model)
    calls = ""
    if asked.tools:
        output, layout = _calling(output)
        calls = grammar_for_tools(
            asked.tools,
            choice.name if isinstance(choice, NamedTool) else None,
            layout,
            # Who names a tool wants one call of it; a weak model would go on.
            is_parallel=asked.is_parallel and not isinstance(choice, NamedTool),
            control_ids=control_ids,
        )
    thinking = _thinking(output, rendered, control_ids, has_calls=is_forced)
    if given is None:
        structure = Structure("grammar", calls, "tools", thinking)
    elif output.harmony is not None:
        structure = msgspec.structs.replace(given, thinking=thinking)
    else:
        structure = msgspec.structs.replace(given, thinking=thinking, calls=calls)
    ends = tuple(dict.fromkeys((*sorted(model.vocabulary.end_ids), *plan.stop_token_ids)))
    return output, msgspec.structs.replace(plan, structure=structure, stop_token_ids=ends)


def _calling(output: OutputFormat) -> tuple[OutputFormat, CallLayout]:
    """The form of calls, and a format that reads it: plain JSON where the family's own is not for grammars."""
    if output.harmony is not None:
        return output, HARMONY
    layout = layout_of(output.tools)
    if layout is not None and output.tools is not None:
        return output, layout
    plain = JsonCalls((), is_bare=True)
    tools = plain if output.tools is None else BareOr(output.tools, plain)
    return msgspec.structs.replace(output, tools=tools), PLAIN


def _thinking(output: OutputFormat, rendered: str, control_ids: Mapping[str, int], *, has_calls: bool) -> str:
    if output.harmony is not None:
        return harmony_rules(has_calls=has_calls, control_ids=control_ids)
    tags = output.think
    if tags is None or rendered.rstrip(SPACE).endswith(tags.close):
        return ""
    return thinking_rules(tags.open, tags.close, is_open=tags.is_open(rendered), control_ids=control_ids)


def _control_ids(model: ServedModel) -> dict[str, int]:
    """The markers of the output format that are one control token each."""
    return {
        text: token_id
        for text in model.output.markers
        for start, end, token_id in model.tokenizer.markers.find(text)
        if start == 0 and end == len(text)
    }
