"""Tokens of which a step brought several to one slot: to the ring one by one, in their order.

Owns: which sequences have tokens that are not sent yet: scores of a prompt, and output that a grammar
forced. Runs in the worker, on the engine's thread. The ring takes one token of a slot at a time.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np

from ds4.generation import FinishReason, GenerationEnd
from ds4.ring.worker_end import WorkerRing
from workers.devices.interface import StepResult
from workers.scheduler.batch import Span
from workers.sequence import Sequence


class Backlog:
    """Owned by the engine."""

    def __init__(self, ring: WorkerRing) -> None:
        self._ring = ring
        self._owing: dict[int, Sequence] = {}  # by slot

    @property
    def owing(self) -> set[int]:
        """Slots that are owed tokens: nothing more of them may be drawn before those are sent."""
        return set(self._owing)

    def take_scores(self, span: Span, result: StepResult, first: int) -> bool:
        """The scores of a span's rows, which are the samples from `first` on; False where they are unsound."""
        sequence = span.sequence
        wanted = sequence.request.sampling.num_logprobs
        for row in range(span.num_rows):
            index = first + row
            token_id = int(result.token_ids[index])
            if not result.ok[index] or token_id != sequence.tokens[span.start + row + 1]:
                return False
            top: list[tuple[int, float]] = []
            if wanted > 0:
                ids, values = result.top_ids[index, :wanted], result.top_logprobs[index, :wanted]
                top = list(zip(ids.tolist(), values.tolist(), strict=True))
            sequence.backlog.append((token_id, float(result.logprobs[index]), top))
        self._owing[sequence.slot] = sequence
        return True

    def take_forced(self, sequence: Sequence, token_ids: Items[int]) -> None:
        """Output that is known without a draw, after what was published before."""
        sequence.backlog += [(token_id, 0.0, []) for token_id in sequence.extend(token_ids)]
        self._owing[sequence.slot] = sequence

    def send(self, by_slot: Mapping[int, Sequence]) -> list[tuple[Sequence, GenerationEnd]]:
        """Send what is owed as far as readers take it; the sequences that ended with their last token.

        `by_slot`: the living ones; what is owed to others is forgotten.
        """
        ended: list[tuple[Sequence, GenerationEnd]] = []
        owing = self._owing = {
            slot: sequence for slot, sequence in self._owing.items() if by_slot.get(slot) is sequence
        }
        while owing:
            slots = np.array(sorted(owing), np.int64)
            slots = slots[self._ring.writable(slots)]
            if not len(slots):
                break
            tokens = [owing[slot].backlog.popleft() for slot in slots.tolist()]
            ends: dict[int, GenerationEnd] = {}
            for row, slot in enumerate(slots.tolist()):
                if owing[slot].backlog:
                    continue
                sequence = owing.pop(slot)
                if sequence.is_complete:
                    ends[row] = sequence.finish(FinishReason.LENGTH)
                    ended.append((sequence, ends[row]))
            self._ring.publish(
                slots,
                np.array([token_id for token_id, _, _ in tokens], np.int32),
                np.array([logprob for _, logprob, _ in tokens], np.float32),
                {row: top for row, (_, _, top) in enumerate(tokens) if top} or None,
                ends or None,
            )
        return ended
