"""Reasoning apart from the answer: which tags a model thinks between, and where it starts.

Owns: `ThinkTags`. Runs in: front ends. Source: the chat templates of the model families named below.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from ds4.text.arriving import SPACE, ArrivingText, Emit, Markers, Waiting
from ds4.text.tool_calls import EventSink


class ThinkTags(msgspec.Struct, frozen=True):
    """The texts that open and close a model's reasoning."""

    open: str
    close: str

    def is_open(self, rendered: str) -> bool:
        """Whether the prompt itself opened the reasoning: the model goes on inside."""
        return rendered.rstrip(SPACE).endswith(self.open)

    def closing(self) -> str:
        """What ends open reasoning, as the models write it."""
        return f"\n{self.close}\n\n"

    def without_reasoning(self, rendered: str) -> str:
        """The prompt with its reasoning over, so that the answer comes at once."""
        if rendered.rstrip(SPACE).endswith(self.close):
            return rendered
        opening = "" if self.is_open(rendered) else f"{self.open}\n"
        return rendered + opening + self.closing()


# Most families (DeepSeek, Qwen, GLM, …) use the first; Mistral, Seed, Cohere, Gemma, Apertus, MiniMax M3
# and Hunyuan have their own.
_KNOWN: Final = (
    ThinkTags("<think>", "</think>"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<seed:think>", "</seed:think>"),
    ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkTags("<|channel>thought", "<channel|>"),
    ThinkTags("<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkTags("<mm:think>", "</mm:think>"),
    ThinkTags("<think:opensource>", "</think:opensource>"),
)


def find_think_tags(template: str, is_token: Callable[[str], bool]) -> ThinkTags | None:
    """The tags that the template names, else those that are tokens of the vocabulary."""
    for tags in _KNOWN:
        if tags.open in template or tags.close in template:
            return tags
    return next((tags for tags in _KNOWN if is_token(tags.open) and is_token(tags.close)), None)


class ReasoningReader:
    """Reads the reasoning that stands before an answer. Immutable."""

    def __init__(self, tags: ThinkTags) -> None:
        self.tags: Final = tags
        self._open = Markers((tags.open,))
        self._close = Markers((tags.close,))

    def read(self, source: ArrivingText, sink: EventSink, emit: Emit, *, is_open: bool) -> Waiting[bool]:
        """Read up to where the answer begins; `emit` gets the reasoning. Returns whether it never ended.

        Only at the very start a tag counts: in the middle of an answer it is text about tags. The line
        breaks inside and after the tags belong to the format.
        """
        if not is_open:
            source.mark()
            yield from source.skip(SPACE)
            if (yield from source.marker(self._open)) is None:
                if (yield from source.marker(self._close)) is None:  # the prompt had closed it already
                    source.rewind()
                    return False
                source.forget_mark()
                yield from source.skip("\r\n")
                return False
            source.forget_mark()
        sink.is_reasoning = True
        yield from source.skip("\r\n")
        if (yield from source.until(self._close, emit, trims=True)) is None:
            return True
        sink.is_reasoning = False
        yield from source.skip("\r\n")
        return False
