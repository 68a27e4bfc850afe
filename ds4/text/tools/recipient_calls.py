"""Outputs as messages to recipients: `>>>all` and text, or `>>>name` and the JSON arguments of a call.

Owns: `RecipientCalls`. Runs in: front ends. Source: Functionary 3.2's chat template. The prompt ends with
the first `>>>`, so that the output begins with a recipient.
"""

from typing import Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.tool_calls import EventSink
from ds4.text.tools.json_calls import begin_call, pass_arguments
from ds4.text.tools.members import read_name

_OPENER: Final = ">>>"
_EVERYBODY: Final = "all"


class RecipientCalls:
    """Messages, each with a recipient. Immutable."""

    openers: Final = (_OPENER,)
    markers: Final = (_OPENER,)
    is_bare: Final = True

    def __init__(self) -> None:
        self._ends = Markers((_OPENER,))

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """One message's head, and the arguments where it is a call; text follows to everybody."""
        name = yield from read_name(source)
        if not (yield from source.literal("\n")):
            return False
        if name == _EVERYBODY:
            source.forget_mark()
            return True
        yield from source.skip(SPACE)
        if (yield from source.peek()) != "{" or not begin_call(source, sink, name, known_only=True):
            return False
        yield from pass_arguments(source, sink, self._ends)
        sink.end()
        yield from source.skip(SPACE)
        return True
