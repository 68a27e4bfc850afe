"""Who is next: every tenant its share by weight, the front ends of a tenant in turn, each in order.

Owns the sequences that have no seat. Runs in the worker, pure Python. A tenant is an API key's owner, a
number here; without keys there is one. Front ends stand for groups of users, so one that is flooded does
not delay the others' requests. Preempted sequences were already served once; they come before all
others, the earliest arrival first.

Source: the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024),
with weights. Each tenant has a tag: the tokens that were computed for it, over its weight; the lowest is
next. A prompt is charged when it gets its seat, output token by token. Who comes back from having nothing
to wait for starts level with those who wait, or with the one served last: there is no saving up. So while
two tenants wait, what they get, over their weights, stays together up to what one request of each costs
that is being served, whatever a third one does.
"""

import heapq
from collections.abc import Iterator
from itertools import chain
from typing import Final

from workers.sequence import Sequence

_MAX_IDLE: Final = 1024  # tenants that are remembered while nothing of theirs waits


class _Tenant:
    """One tenant's waiting sequences and its tag. Owned by the queue."""

    __slots__ = ("number", "queues", "tag", "turn", "weight")

    def __init__(self, number: int) -> None:
        self.number = number
        self.weight = 1
        self.tag = 0.0
        self.turn = 0  # counts up; of equal tags the one that has waited longest for its turn is next
        self.queues: dict[int, dict[int, Sequence]] = {}  # group → arrival → sequence; next group first

    def turns(self) -> Iterator[Sequence]:
        """Its sequences in the order they would be served."""
        turns = [iter(queue.values()) for queue in self.queues.values()]
        while turns:
            remaining = []
            for turn in turns:
                sequence = next(turn, None)
                if sequence is not None:
                    yield sequence
                    remaining.append(turn)
            turns = remaining


class WaitingQueue:
    """Sequences without a seat. Owned by the scheduler. `in_turn` False: plain arrival order."""

    def __init__(self, *, in_turn: bool = True) -> None:
        self._in_turn = in_turn
        self._tenants: dict[int, _Tenant] = {}  # all that wait, and some that do not
        self._waiting: dict[int, _Tenant] = {}  # those with a sequence here
        self._preempted: dict[int, Sequence] = {}  # by arrival
        self._size = 0
        self._last: _Tenant | None = None  # the one served last
        self._num_turns = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody, in the order they would be served."""
        return chain(self._earlier(), self._by_tag())

    def push(self, sequence: Sequence) -> None:
        """A new sequence, or a preempted one."""
        self._size += 1
        if sequence.num_preemptions:
            self._preempted[sequence.arrival] = sequence
            return
        tenant = self._tenant(sequence)
        tenant.weight = sequence.request.weight
        if not tenant.queues:
            tenant.tag = max(tenant.tag, self._lowest_tag)
            self._num_turns += 1
            tenant.turn = self._num_turns
            self._waiting[tenant.number] = tenant
        tenant.queues.setdefault(self._group(sequence), {})[sequence.arrival] = sequence

    def remove(self, sequence: Sequence, *, served: bool) -> None:
        """Take one out. `served`: it got its seat, so its tenant and its front end have had their turn."""
        self._size -= 1
        if self._preempted.pop(sequence.arrival, None) is not None:
            return
        tenant, group = self._tenant(sequence), self._group(sequence)
        queue = tenant.queues[group]
        del queue[sequence.arrival]
        if served or not queue:
            del tenant.queues[group]
            if queue:
                tenant.queues[group] = queue  # now the last in turn
        if served:
            self._last = tenant
            self._num_turns += 1
            tenant.turn = self._num_turns
            tenant.tag += _cost(sequence) / tenant.weight
        if not tenant.queues:
            del self._waiting[tenant.number]

    def charge(self, sequence: Sequence) -> None:
        """A token was generated."""
        if len(self._tenants) > 1:  # else there is nobody to compare with
            tenant = self._tenant(sequence)
            tenant.tag += 1.0 / tenant.weight

    @property
    def _lowest_tag(self) -> float:
        if self._waiting:
            return min(tenant.tag for tenant in self._waiting.values())
        return 0.0 if self._last is None else self._last.tag

    def _group(self, sequence: Sequence) -> int:
        return sequence.front_end if self._in_turn else 0

    def _tenant(self, sequence: Sequence) -> _Tenant:
        number = sequence.request.tenant if self._in_turn else 0
        tenant = self._tenants.get(number)
        if tenant is None:
            if len(self._tenants) >= _MAX_IDLE + len(self._waiting):
                self._tenants = dict(self._waiting)
            tenant = self._tenants[number] = _Tenant(number)
        return tenant

    def _earlier(self) -> Iterator[Sequence]:
        return iter([self._preempted[arrival] for arrival in sorted(self._preempted)])

    def _by_tag(self) -> Iterator[Sequence]:
        if len(self._waiting) == 1:
            (tenant,) = self._waiting.values()
            yield from tenant.turns()
            return
        heap = [(one.tag, one.turn, one.number, one, one.turns()) for one in self._waiting.values()]
        heapq.heapify(heap)
        num_turns = self._num_turns
        while heap:
            tag, _, number, tenant, turns = heap[0]
            sequence = next(turns, None)
            if sequence is None:
                heapq.heappop(heap)
                continue
            yield sequence
            num_turns += 1
            heapq.heapreplace(heap, (tag + _cost(sequence) / tenant.weight, num_turns, number, tenant, turns))


def _cost(sequence: Sequence) -> int:
    return len(sequence.tokens)
