"""Tool calls as `invoke` elements with `parameter` elements: DeepSeek's DSML, MiniMax.

Owns: `InvokeCalls`. Runs in: front ends. Source: the chat templates of DeepSeek V3.2 and V4 and of
MiniMax M2. In DSML `string="true"` marks raw text and `string="false"` JSON; without the attribute the
tool's schema decides.
"""

from typing import Final

from ds4.text.arriving import SPACE, ArrivingText, Markers, Waiting
from ds4.text.tool_calls import EventSink
from ds4.text.tools.json_calls import begin_call, read_close
from ds4.text.tools.members import ObjectWriter, read_member, read_name

_TEXT: Final = frozenset(("string",))
_JSON: Final[frozenset[str]] = frozenset()


class InvokeCalls:
    """Blocks of `invoke` elements. Immutable.

    `blocks` are the names of the element around the calls; `prefixes` stand before every tag name, in the
    spellings that models use. A block's spelling may differ from that of the elements in it.
    """

    is_bare: Final = False

    def __init__(self, blocks: tuple[str, ...], prefixes: tuple[str, ...] = ("",)) -> None:
        self._prefixes = prefixes
        self.openers: Final = tuple(f"<{prefix}{block}>" for prefix in prefixes for block in blocks)
        closers = tuple(f"</{prefix}{block}>" for prefix in prefixes for block in blocks)
        self.markers: Final = self.openers + closers
        self._closers = Markers(closers)
        self._invokes = Markers(f'<{prefix}invoke name="' for prefix in prefixes)
        self._members = Markers(
            [f'<{prefix}parameter name="' for prefix in prefixes]
            + [f"</{prefix}invoke>" for prefix in prefixes]
        )
        self._ends = {
            prefix: Markers(
                [f"</{prefix}parameter>", *(f"</{other}parameter>" for other in prefixes if other)]
            )
            for prefix in prefixes
        }

    def calls(self, source: ArrivingText, sink: EventSink, opener: str) -> Waiting[bool]:
        """All calls of one block."""
        num_before = sink.num_calls
        while True:
            if sink.num_calls > num_before:
                source.mark()
            yield from source.skip(SPACE)
            if (yield from source.marker(self._invokes)) is None:
                break
            if not (yield from self._call(source, sink)):
                break
        if sink.num_calls == num_before:
            return False
        source.rewind()
        yield from read_close(source, self._closers)
        return True

    def _call(self, source: ArrivingText, sink: EventSink) -> Waiting[bool]:
        name = yield from read_name(source)
        if not (yield from source.literal('">')) or not begin_call(source, sink, name):
            return False
        arguments = ObjectWriter(sink.arguments)
        while True:
            yield from source.skip(SPACE)
            tag = yield from source.marker(self._members)
            if tag is None or tag.startswith("</"):
                break
            prefix = tag.removeprefix("<").removesuffix('parameter name="')
            key = yield from read_name(source)
            types = yield from self._types(source, sink.types(name, key))
            arguments.member(key)
            ends = self._ends[prefix]
            inside = "&lt;" + ends.texts[0][1:]  # how DeepSeek writes the end tag itself
            if (yield from read_member(source, sink, ends, types=types, end_inside=inside)) is None:
                sink.end()
                return True
        arguments.close()
        sink.end()
        return True

    @staticmethod
    def _types(source: ArrivingText, types: frozenset[str]) -> Waiting[frozenset[str]]:
        """The types of a value as its tag tells them, after reading the rest of the tag."""
        yield from source.literal('"')
        yield from source.skip(" ")
        if (yield from source.literal('string="')):
            said = yield from read_name(source)
            types = _TEXT if said == "true" else _JSON
            yield from source.literal('"')
        yield from source.literal(">")
        return types
