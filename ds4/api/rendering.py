"""A conversation as the prompt of one model: through its template, with tools and thinking as asked.

Owns: `render`. Runs in: front ends.
"""

from typing import Any, Final

from ds4.api.state import ServedModel
from ds4.errors import RequestError
from ds4.protocol.conversation import Conversation
from ds4.text.tools.plain import explained

# Variables by which templates are told whether to think; each family has its own.
_SWITCHES: Final = ("enable_thinking", "thinking")


def render(model: ServedModel, conversation: Conversation) -> str:
    """The guarded text for `Tokenizer.encode_rendered`. Raises RequestError."""
    template, think = model.template, model.output.think
    thinking = conversation.thinking
    if (thinking or conversation.max_reasoning_tokens) and think is None and model.output.harmony is None:
        raise RequestError(
            f"{conversation.thinking_param}: this model does not think before it answers; leave it out, or switch it off",
            param=conversation.thinking_param,
            code="unsupported_parameter",
        )
    kwargs: dict[str, Any] = dict(conversation.kwargs)
    if thinking is not None:
        for switch in _SWITCHES:
            kwargs.setdefault(switch, thinking)
    messages, begun = list(conversation.messages), None
    if conversation.continues:
        begun = template.guarded(messages.pop()["content"])
    rendered = template.render(
        explained(template, messages, conversation.tools),
        tools=conversation.tools if template.takes_tools else None,
        add_generation_prompt=conversation.add_generation_prompt or conversation.continues,
        kwargs=kwargs,
    )
    if begun is not None:  # an answer that has begun is past its reasoning
        return (think.without_reasoning(rendered) if think is not None else rendered) + begun
    if thinking is False and think is not None and conversation.add_generation_prompt:
        knows = any(switch in template.all_source for switch in _SWITCHES)
        if think.is_open(rendered) or not knows:
            return think.without_reasoning(rendered)
    return rendered
