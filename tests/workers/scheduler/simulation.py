"""The scheduler in a loop without a device: steps are collected some turns after they were planned."""

from collections import deque
from collections.abc import Callable

from ds4.generation import FinishReason
from workers.kvcache.prefix import PrefixCache
from workers.scheduler.batch import Batch, Plan
from workers.scheduler.scheduler import Scheduler
from workers.sequence import Sequence, Status

PAGE = 4


class Simulation:
    """Plans, checks every plan, and collects `depth` steps behind. Tokens are what `sample` says."""

    def __init__(
        self,
        *,
        pages: int = 64,
        seats: int = 4,
        rows: int = 16,
        depth: int = 0,
        in_turn: bool = True,
        row_s: float = 0.0,
        sample: Callable[[Sequence], int] = lambda sequence: len(sequence.tokens),
    ) -> None:
        self.scheduler = Scheduler(PrefixCache(pages, PAGE), max_seats=seats, max_rows=rows, in_turn=in_turn)
        self.rows = rows
        self.depth = depth
        self.row_s = row_s  # what a row costs
        self.sample = sample
        self.paused: set[int] = set()
        self.flights: deque[Batch] = deque()
        self.finished: list[Sequence] = []
        self.first_rows: list[Sequence] = []  # in the order in which they first got rows
        self.too_large: list[Sequence] = []

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.enqueue(sequence)

    def turn(self) -> Plan:
        plan = self.scheduler.plan(self.paused, may_preempt=not self.flights)
        for sequence in plan.too_large:
            sequence.finish(FinishReason.CANCELLED)
            self.scheduler.leave(sequence)
            self.too_large.append(sequence)
        if plan.batch is not None:
            self.check(plan.batch)
            self.first_rows += [one for one in plan.batch.seated if one not in self.first_rows]
            self.flights.append(plan.batch)
        if self.flights and (plan.batch is None or len(self.flights) > self.depth):
            self.collect()
        return plan

    def run(self, max_turns: int = 5000) -> None:
        for _ in range(max_turns):
            if self.scheduler.is_idle and not self.flights:
                self.scheduler.check()
                self.scheduler.cache.check()
                return
            self.turn()
        raise AssertionError("somebody starves")

    def finish(self, sequence: Sequence) -> None:
        sequence.finish(FinishReason.CANCELLED)
        self.scheduler.leave(sequence)
        self.finished.append(sequence)

    def collect(self) -> None:
        batch = self.flights.popleft()
        for span in batch.spans:
            sequence = span.sequence
            sequence.collect(span.num_rows, span.samples)
            if span.samples and sequence.status is Status.RUNNING:
                end = sequence.accept(self.sample(sequence))
                if end is not None:
                    self.scheduler.leave(sequence)
                    self.finished.append(sequence)
        self.scheduler.collected(batch, self.row_s * batch.num_rows)

    def check(self, batch: Batch) -> None:
        assert batch.num_rows == sum(span.num_rows for span in batch.spans) <= self.rows
        assert len({span.sequence.seat for span in batch.spans}) == len(batch.spans)
        writers: set[int] = set()
        for index, span in enumerate(batch.spans):
            sequence, end = span.sequence, span.start + span.num_rows
            assert span.num_rows > 0
            assert sequence.status is Status.RUNNING
            assert end == sequence.num_scheduled <= len(sequence.pages) * PAGE
            assert not (span.samples and sequence.slot in self.paused)
            if index < batch.num_decode:
                assert span.num_rows == 1
                assert span.samples
            written = {sequence.pages[position // PAGE] for position in range(span.start, end)}
            assert not written & writers, "two sequences write to one page"
            writers |= written
        for page in writers:
            assert self.scheduler.cache._pool.holders(page) == 1, "a shared page is written"
        self.scheduler.cache.check()
