"""Who is next: first in, first out for each front end, and the front ends in turn.

Owns the sequences that have no seat. Runs in the worker, pure Python. Front ends stand for groups of
users, so one that is flooded does not delay the others' requests. Preempted sequences were already
served once; they come before all others, the earliest arrival first.
"""

from collections.abc import Iterator
from itertools import chain

from workers.sequence import Sequence


class WaitingQueue:
    """Sequences without a seat. Owned by the scheduler. `in_turn` False: plain arrival order."""

    def __init__(self, *, in_turn: bool = True) -> None:
        self._in_turn = in_turn
        self._queues: dict[int, dict[int, Sequence]] = {}  # group → arrival → sequence; next group first
        self._preempted: dict[int, Sequence] = {}  # by arrival
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody, in the order they would be served."""
        return chain(self._earlier(), self._turns())

    def push(self, sequence: Sequence) -> None:
        """A new sequence, or a preempted one."""
        if sequence.num_preemptions:
            self._preempted[sequence.arrival] = sequence
        else:
            self._queues.setdefault(self._group(sequence), {})[sequence.arrival] = sequence
        self._size += 1

    def remove(self, sequence: Sequence, *, served: bool) -> None:
        """Take one out. `served`: it got its seat, so its front end has had its turn."""
        self._size -= 1
        if self._preempted.pop(sequence.arrival, None) is not None:
            return
        group = self._group(sequence)
        queue = self._queues[group]
        del queue[sequence.arrival]
        if served or not queue:
            del self._queues[group]
            if queue:
                self._queues[group] = queue  # now the last in turn

    def _group(self, sequence: Sequence) -> int:
        return sequence.front_end if self._in_turn else 0

    def _earlier(self) -> Iterator[Sequence]:
        return iter([self._preempted[arrival] for arrival in sorted(self._preempted)])

    def _turns(self) -> Iterator[Sequence]:
        turns = [iter(queue.values()) for queue in self._queues.values()]
        while turns:
            remaining = []
            for turn in turns:
                sequence = next(turn, None)
                if sequence is not None:
                    yield sequence
                    remaining.append(turn)
            turns = remaining
