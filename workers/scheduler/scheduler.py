"""The scheduler: who computes what in the next step.

Owns the queues, the seats and, through the prefix cache, all KV pages. Runs in the worker, pure
Python. One token budget per step: decode rows first, prompt chunks fill the rest. A sequence gets
pages for all its known tokens with its seat, and more whenever its output crosses a page border.
When pages run out, the latest arrival is preempted: it gives everything back and is computed again
later from its tokens (recompute as in vLLM). What comes out is a `Plan`; what happened in the step
comes back through the sequences' counters.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from workers.kvcache.prefix import PrefixCache
from workers.scheduler.batch import Batch, Plan, Span
from workers.scheduler.decode import growing, split_running
from workers.scheduler.fairness import WaitingQueue
from workers.scheduler.pace import PrefillPace
from workers.scheduler.prefill import share_rows
from workers.sequence import NO_SEAT, Sequence, Status

_MAX_DIGESTS: Final = 2048  # made in one plan to look prompts up, about 1.5 us each


class Scheduler:
    """Owned by the engine, which is the only caller."""

    def __init__(self, cache: PrefixCache, *, max_seats: int, max_rows: int, in_turn: bool = True) -> None:
        assert max_rows >= max_seats >= 1
        self.cache = cache
        self.max_seats = max_seats
        self.max_rows = max_rows
        self.seat_limit = max_seats  # of those, how many newcomers may fill; may change at any time
        self.row_limit = max_rows  # the token budget in force, not below `seat_limit`; likewise
        self.waiting = WaitingQueue(in_turn=in_turn)
        self.running: dict[int, Sequence] = {}  # by seat
        self._pace = PrefillPace(max_rows)
        self._leaving: dict[int, Sequence] = {}  # finished, with a step in flight; by seat
        self._free_seats = list(range(max_seats - 1, -1, -1))
        # The next in turn that did not fit, and what was so then: releases, and its cached pages.
        self._blocked: tuple[Sequence, int, int] | None = None
        self._is_looking = False  # the latest plan left somebody out who was not looked up yet

    @property
    def is_idle(self) -> bool:
        """True while nobody waits, runs or leaves."""
        return not self.waiting and not self.running and not self._leaving

    def fits(self, sequence: Sequence) -> bool:
        """True where this sequence could be computed if it were alone."""
        return self.cache.pages_for(len(sequence.tokens)) <= self.cache.num_pages

    def enqueue(self, sequence: Sequence) -> None:
        """A new sequence waits for a seat."""
        assert self.fits(sequence)
        self.waiting.push(sequence)

    def candidate_slots(self) -> list[int]:
        """The slots that the next plan may give a token: `plan` needs to know which are paused."""
        slots = [sequence.slot for sequence in self.running.values()]
        if self._free_seats:
            slots += [sequence.slot for sequence in self.waiting]
        return slots

    def plan(self, paused: Collection[int], *, may_preempt: bool) -> Plan:
        """Decide the next step and move the counters of everybody in it.

        `paused` are slots that may not get a token now. `may_preempt`: nothing is in flight.
        """
        self._is_looking = False
        rows, prompts = split_running(self.running.values(), paused)
        short = growing(itertools.chain(rows, prompts), self.cache)
        preempted: list[Sequence] = []
        too_large: list[Sequence] = []
        while sum(count for _, count in short) > self.cache.num_available:
            if not may_preempt:
                return Plan()  # collect what is in flight first: it may free pages
            victim = max(self.running.values(), key=_arrival)
            if len(self.running) == 1:
                too_large.append(victim)
                rows, short = [], []
                break
            self.set_aside(victim)
            preempted.append(victim)
            rows, prompts = (
                [sequence for sequence in each if sequence is not victim] for each in (rows, prompts)
            )
            short = [(sequence, count) for sequence, count in short if sequence is not victim]
        for sequence, count in short:
            sequence.pages += self.cache.take([], count)
        spans = [Span(sequence, sequence.num_scheduled, 1, sequence.schedule(1)) for sequence in rows]
        seated: list[Sequence] = []
        if not too_large:
            # What a preempted sequence frees is for those who were short of it, not for newcomers.
            newcomers = () if preempted else self._seatable(paused)
            num_left = self.row_limit - len(rows)
            if rows:
                num_left = min(num_left, self._pace.max_prompt_rows)
            spans += self._prefill_spans(num_left, prompts, newcomers, paused, seated)
        batch = None
        if spans:
            num_rows = sum(span.num_rows for span in spans)
            batch = Batch(spans=tuple(spans), num_rows=num_rows, num_decode=len(rows), seated=tuple(seated))
        return Plan(
            batch=batch,
            preempted=tuple(preempted),
            too_large=tuple(too_large),
            is_looking=self._is_looking,
        )

    def set_aside(self, sequence: Sequence) -> None:
        """Preempt a running sequence with nothing in flight: it waits again, before all newcomers."""
        self.cache.register(sequence)
        del self.running[sequence.seat]
        sequence.num_preemptions += 1
        sequence.move(Status.WAITING)
        self._release(sequence)
        self.waiting.push(sequence)

    def leave(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """A sequence was finished: out of its queue; seat and pages go once nothing is in flight.

        `is_sound` False: its keys and values are not to be trusted, nobody may share them.
        """
        assert sequence.status is Status.FINISHED
        if sequence.seat == NO_SEAT:
            self.waiting.remove(sequence, served=False)
            return
        if is_sound:
            self.cache.register(sequence)
        else:
            self.cache.forget(sequence.pages)
        self.running.pop(sequence.seat, None)
        if sequence.num_in_flight:
            self._leaving[sequence.seat] = sequence
        else:
            self._release(sequence)

    def collected(self, batch: Batch, elapsed_s: float) -> None:
        """A step was collected and its tokens are known: index full pages, let the finished ones go."""
        self._pace.note(batch.num_rows - batch.num_decode, batch.num_rows, elapsed_s)
        for span in batch.spans:
            sequence = span.sequence
            self._free_seats.extend(span.scoring_seats[1:])
            if span.samples:
                self.waiting.charge(sequence)
            if sequence.status is Status.RUNNING:
                if sequence.num_computed >= (sequence.num_registered + 1) * self.cache.page_tokens:
                    self.cache.register(sequence)
            elif sequence.num_in_flight == 0 and self._leaving.pop(sequence.seat, None) is not None:
                self._release(sequence)

    def check(self) -> None:
        """Assert that no page and no seat leaked; a few additions, cheap enough whenever the worker is idle."""
        assert self.cache.num_available + self.cache.num_held == self.cache.num_pages
        assert len(self._free_seats) + len(self.running) + len(self._leaving) == self.max_seats
        if not self.running and not self._leaving:
            assert self.cache.num_held == 0, "an idle worker holds KV pages"

    def _prefill_spans(
        self,
        num_rows: int,
        running: list[Sequence],
        newcomers: Iterable[tuple[Sequence, list[int]]],
        paused: Collection[int],
        seated: list[Sequence],
    ) -> Iterator[Span]:
        """Chunks for running prompts and for those that can be seated now, which go to `seated`."""
        if num_rows <= 0:
            return
        prompts = sorted((one for one in running if _work(one, paused) > 0), key=_arrival)
        work = [_work(sequence, paused) for sequence in prompts]
        found: dict[Sequence, list[int]] = {}
        num_given_up = self.cache.num_given_up
        for sequence, pages in newcomers:
            prompts.append(sequence)
            work.append(len(sequence.tokens) - len(pages) * self.cache.page_tokens)
            found[sequence] = pages
        scoring: list[tuple[Sequence, int]] = []
        for sequence, share in zip(prompts, share_rows(work, num_rows), strict=True):
            if share == 0:
                continue
            if sequence.status is Status.WAITING:
                # Others were seated in between: they may have taken parked pages that this one was to share,
                # but those were counted as taken, so there is room to compute them again.
                is_current = self.cache.num_given_up == num_given_up
                self._seat(sequence, found[sequence] if is_current else self._cached(sequence))
                seated.append(sequence)
            if sequence.num_to_score and sequence.num_scheduled >= sequence.num_scored:
                scoring.append((sequence, share))
                continue
            start, count = sequence.num_scheduled, min(share, _work(sequence, paused))
            yield Span(sequence, start, count, sequence.schedule(count))
        for sequence, share in scoring:
            yield self._scoring_span(sequence, share)

    def _scoring_span(self, sequence: Sequence, max_rows: int) -> Span:
        """Rows that are all scored, each on a seat of its own: the sequence's, and those that are free.

        They are free again once the step was collected.
        """
        start, free = sequence.num_scheduled, self._free_seats
        count = min(max_rows, sequence.num_to_score - start, 1 + len(free))
        seats = (sequence.seat, *(free.pop() for _ in range(count - 1)))
        sequence.num_scored += count
        samples = sequence.schedule(count)
        assert not samples
        return Span(sequence, start, count, False, seats)

    def _seatable(self, paused: Collection[int]) -> Iterator[tuple[Sequence, list[int]]]:
        """Waiting sequences for which there are seats and pages, and the cached pages of each.

        Stops at the first one whose pages do not fit, so that nobody is overtaken for ever. One whose
        digests are not all made yet is overtaken until they are, a few plans later. Each may make half of
        what is left for this plan: a short prompt never waits until a long one is through.
        """
        seats = self.seat_limit - (self.max_seats - len(self._free_seats))
        if seats <= 0 or not self.waiting:
            return
        # One page for each running sequence is left alone: they will cross a border soon.
        available = self.cache.num_available - len(self.running)
        is_next = True
        num_digests = _MAX_DIGESTS
        for sequence in self.waiting:
            if sequence.slot in paused:
                continue
            if is_next and self._is_still_blocked(sequence):
                return
            if not sequence.num_to_score:
                before = len(sequence.page_digests)
                is_ready = self.cache.prepare(sequence, num_digests // 2)
                num_digests -= len(sequence.page_digests) - before
                if not is_ready:
                    self._is_looking = True
                    if num_digests < 2:
                        return
                    continue
            found = self._cached(sequence)
            needed = self._num_pages_needed(sequence, found)
            if needed > available:
                if is_next:
                    self._blocked = sequence, self.cache.num_releases, len(found)
                return
            is_next = False
            available -= needed + 1
            yield sequence, found
            seats -= 1
            if seats == 0:
                return

    def _is_still_blocked(self, sequence: Sequence) -> bool:
        """True where nothing came back since it did not fit, and nobody computed a page that it shares."""
        if self._blocked is None or self._blocked[:2] != (sequence, self.cache.num_releases):
            return False
        return bool(sequence.num_to_score) or not self.cache.finds_more(sequence, self._blocked[2])

    def _cached(self, sequence: Sequence) -> list[int]:
        """Pages that need not be computed. What is to be scored has to be, whoever has it."""
        return [] if sequence.num_to_score else self.cache.find(sequence)

    def _num_pages_needed(self, sequence: Sequence, found: list[int]) -> int:
        """By how much seating this sequence lowers the number of available pages."""
        count = self.cache.pages_for(len(sequence.tokens)) - len(found)
        return count + self.cache.num_parked_of(found)

    def _seat(self, sequence: Sequence, found: list[int]) -> None:
        """Give a seat and pages, of which `found` are cached, to one that `_seatable` named."""
        count = self.cache.pages_for(len(sequence.tokens)) - len(found)
        pages = self.cache.take(found, count)
        self.waiting.remove(sequence, served=True)
        sequence.take_seat(self._free_seats.pop(), pages, len(found) * self.cache.page_tokens)
        sequence.num_registered = len(found)
        if not sequence.num_preemptions:
            sequence.reused_tokens = sequence.num_cached
        self.running[sequence.seat] = sequence

    def _release(self, sequence: Sequence) -> None:
        self._free_seats.append(sequence.seat)
        self.cache.release(sequence.unseat())


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _work(sequence: Sequence, paused: Collection[int]) -> int:
    """Prompt rows that may be computed now: of a paused sequence all but the one that samples.

    One that is scored goes step by step, since the seats of its rows are given anew for each; what it
    lost when it was set aside is computed again without scores.
    """
    if sequence.num_to_score:
        if sequence.num_in_flight:
            return 0
        if sequence.num_scheduled < sequence.num_scored:
            return sequence.num_scored - sequence.num_scheduled
        return 0 if sequence.slot in paused else sequence.num_to_score - sequence.num_scored
    work = sequence.num_unscheduled
    return work - 1 if sequence.slot in paused else work
