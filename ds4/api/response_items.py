"""Output events become the items of a response, and the events of its stream.

Owns: `ItemBuilder`. Runs in: front ends. Source: the OpenAI API reference. Whole and streamed answers are
built by the same steps, so that both are the same.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from ds4.api.choices import TokenText
from ds4.api.item_ids import ItemIds
from ds4.protocol import openai_responses_output as out
from ds4.protocol.openai_responses import opaque
from ds4.text import tool_calls

_ItemStatus = Literal["completed", "incomplete"]
_OpenItem = out.MessageItem | out.ReasoningItem | out.CallItem


class ItemBuilder:
    """The output of one response. Owned by the task that answers it."""

    def __init__(self, ids: ItemIds, *, summarises: bool, keeps_opaque: bool) -> None:
        self.items: Final[list[out.OutputItem]] = []
        self._ids = ids
        self._summarises = summarises
        self._keeps_opaque = keeps_opaque
        self._num_events = 0
        self._open: _OpenItem | None = None
        self._texts: list[str] = []
        self._logprobs: list[out.TokenLogprob] = []
        self._events: list[out.StreamEvent] = []

    def number(self) -> int:
        """The next event's sequence number."""
        self._num_events += 1
        return self._num_events - 1

    def take(
        self, events: Iterable[tool_calls.OutputEvent], tokens: Sequence[TokenText] = ()
    ) -> list[out.StreamEvent]:
        """What new output means for a stream. The tokens belong to the first text among it."""
        for event in events:
            if isinstance(event, tool_calls.TextDelta):
                self._text(event.text, [_logprob(token) for token in tokens])
                tokens = ()
            elif isinstance(event, tool_calls.ReasoningDelta):
                self._reasoning(event.text)
            elif isinstance(event, tool_calls.CallBegin):
                self._call(event)
            elif isinstance(event, tool_calls.ArgumentsDelta):
                self._arguments(event.text)
            else:
                self._close("completed")
        return self._drain()

    def end(self, *, is_complete: bool) -> list[out.StreamEvent]:
        """Nothing more comes. Incomplete: the last item is not whole."""
        self._close("completed" if is_complete else "incomplete")
        return self._drain()

    def _drain(self) -> list[out.StreamEvent]:
        events, self._events = self._events, []
        return events

    @property
    def _index(self) -> int:
        return len(self.items)

    def _begin(self, item: _OpenItem) -> None:
        self._close("completed")
        self._open = item
        self._emit(out.ItemAdded(sequence_number=self.number(), output_index=self._index, item=item))

    def _emit(self, event: out.StreamEvent) -> None:
        self._events.append(event)

    def _text(self, text: str, logprobs: list[out.TokenLogprob]) -> None:
        if not isinstance(self._open, out.MessageItem):
            self._begin(out.MessageItem(id=self._ids.new("msg_"), status="in_progress", content=[]))
            self._emit(
                out.PartAdded(
                    sequence_number=self.number(),
                    item_id=self._id,
                    output_index=self._index,
                    part=out.OutputText(text=""),
                )
            )
        self._texts.append(text)
        self._logprobs += logprobs
        self._emit(
            out.TextDelta(
                sequence_number=self.number(),
                item_id=self._id,
                output_index=self._index,
                delta=text,
                logprobs=logprobs,
            )
        )

    def _reasoning(self, text: str) -> None:
        if not isinstance(self._open, out.ReasoningItem):
            self._begin(out.ReasoningItem(id=self._ids.new("rs_"), status="in_progress", summary=[]))
            self._emit_reasoning_part(is_begin=True, text="")
        self._texts.append(text)
        number, item_id, index = self.number(), self._id, self._index
        if self._summarises:
            self._emit(
                out.SummaryDelta(sequence_number=number, item_id=item_id, output_index=index, delta=text)
            )
        else:
            self._emit(
                out.ReasoningDelta(sequence_number=number, item_id=item_id, output_index=index, delta=text)
            )

    def _emit_reasoning_part(self, *, is_begin: bool, text: str) -> None:
        number, item_id, index = self.number(), self._id, self._index
        if self._summarises:
            summary = out.SummaryPartAdded if is_begin else out.SummaryPartDone
            part = out.SummaryText(text=text)
            self._emit(summary(sequence_number=number, item_id=item_id, output_index=index, part=part))
        else:
            content = out.PartAdded if is_begin else out.PartDone
            whole = out.ReasoningText(text=text)
            self._emit(content(sequence_number=number, item_id=item_id, output_index=index, part=whole))

    def _call(self, event: tool_calls.CallBegin) -> None:
        self._begin(
            out.CallItem(
                id=self._ids.new("fc_"), status="in_progress", call_id=event.id, name=event.name, arguments=""
            )
        )

    def _arguments(self, text: str) -> None:
        self._texts.append(text)
        self._emit(
            out.ArgumentsDelta(
                sequence_number=self.number(), item_id=self._id, output_index=self._index, delta=text
            )
        )

    @property
    def _id(self) -> str:
        assert self._open is not None
        return self._open.id

    def _close(self, status: _ItemStatus) -> None:
        item = self._open
        if item is None:
            return
        text = "".join(self._texts)
        if isinstance(item, out.MessageItem):
            done: out.OutputItem = self._close_message(item, text, status)
        elif isinstance(item, out.ReasoningItem):
            done = self._close_reasoning(item, text, status)
        else:
            done = self._close_call(item, text, status)
        self._emit(out.ItemDone(sequence_number=self.number(), output_index=self._index, item=done))
        self.items.append(done)
        self._open, self._texts, self._logprobs = None, [], []

    def _close_message(self, item: out.MessageItem, text: str, status: _ItemStatus) -> out.MessageItem:
        part = out.OutputText(text=text, logprobs=self._logprobs)
        self._emit(
            out.TextDone(
                sequence_number=self.number(),
                item_id=item.id,
                output_index=self._index,
                text=text,
                logprobs=self._logprobs,
            )
        )
        self._emit(
            out.PartDone(sequence_number=self.number(), item_id=item.id, output_index=self._index, part=part)
        )
        return msgspec.structs.replace(item, status=status, content=[part])

    def _close_reasoning(self, item: out.ReasoningItem, text: str, status: _ItemStatus) -> out.ReasoningItem:
        done = out.SummaryDone if self._summarises else out.ReasoningDone
        self._emit(done(sequence_number=self.number(), item_id=item.id, output_index=self._index, text=text))
        self._emit_reasoning_part(is_begin=False, text=text)
        return msgspec.structs.replace(
            item,
            status=status,
            summary=[out.SummaryText(text=text)] if self._summarises else [],
            content=None if self._summarises else [out.ReasoningText(text=text)],
            encrypted_content=opaque(text) if self._keeps_opaque else None,
        )

    def _close_call(self, item: out.CallItem, text: str, status: _ItemStatus) -> out.CallItem:
        self._emit(
            out.ArgumentsDone(
                sequence_number=self.number(),
                item_id=item.id,
                output_index=self._index,
                name=item.name,
                arguments=text,
            )
        )
        return msgspec.structs.replace(item, status=status, arguments=text)


def _logprob(token: TokenText) -> out.TokenLogprob:
    top = [out.TopToken(raw.decode("utf-8", "replace"), logprob, list(raw)) for raw, logprob in token.top]
    return out.TokenLogprob(token.text, token.logprob, list(token.raw), top)
