"""Scores of prompts: from a step's samples to the ring, in their order.

Owns: which sequences have scores that are not sent yet. Runs in the worker, on the engine's thread. One
step may bring many scores to one slot, while the ring takes one token of a slot at a time.
"""

from collections.abc import Mapping

import numpy as np

from ds4.generation import FinishReason, GenerationEnd
from ds4.ring.worker_end import WorkerRing
from workers.devices.interface import StepResult
from workers.scheduler.batch import Span
from workers.sequence import Sequence


class ScoreDelivery:
    """Owned by the engine."""

    def __init__(self, ring: WorkerRing) -> None:
        self._ring = ring
        self._owing: dict[int, Sequence] = {}  # by slot

    @property
    def owing(self) -> set[int]:
        """Slots that are owed scores: nothing more of them may be computed before those are sent."""
        return set(self._owing)

    def take(self, span: Span, result: StepResult, first: int) -> bool:
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

    def send(self, by_slot: Mapping[int, Sequence]) -> list[tuple[Sequence, GenerationEnd]]:
        """Send what is owed as far as readers take it; the sequences that ended with their last score.

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
            scores = [owing[slot].backlog.popleft() for slot in slots.tolist()]
            ends: dict[int, GenerationEnd] = {}
            for row, slot in enumerate(slots.tolist()):
                if owing[slot].backlog:
                    continue
                sequence = owing.pop(slot)
                if sequence.num_scored == sequence.num_to_score:
                    ends[row] = sequence.finish(FinishReason.LENGTH)
                    ended.append((sequence, ends[row]))
            self._ring.publish(
                slots,
                np.array([token_id for token_id, _, _ in scores], np.int32),
                np.array([logprob for _, logprob, _ in scores], np.float32),
                {row: top for row, (_, _, top) in enumerate(scores) if top} or None,
                ends or None,
            )
        return ended
