"""What each key may use at a time and in a minute, counted over all front ends without a lock.

Owns: the file `usage-*` in the shared directory. Runs in: front ends. The file has a block for each
front-end place, and a block has one writer. A tenant's part of a block is one word for its running
sequences, and one for each period of some seconds: the number of the period above, the tokens below, so
that a word is never seen half old. The name has a checksum of the tenants: front ends with another key
file count in another file.

Who wants something first adds it to its own words, and then adds up everybody's: of two that come at the
same time at least the later one sees both. So a limit is never exceeded by what is known beforehand. That
two compete for the last place and refuse each other is prevented by turns: each raises a flag while it
asks, and gives way to the flags of places before it. A turn is only waited for; who waits too long, because
a process is stopped in the middle of its own, goes on without, and the limits hold all the same. Output is
counted as it comes: it can exceed the tokens of a minute, and then has to be waited out.

Source: a sliding window in periods; the clock is monotonic and one for all processes of a machine. The turns
are Burns' and Lamport's one-bit algorithm for mutual exclusion (Lamport, "The Mutual Exclusion Problem, part
II", 1986).
"""

import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.api.errors import KeyLimitError
from ds4.api.keys import Tenant
from ds4.errors import RequestError, RingError
from ds4.metrics import MAX_FRONT_ENDS
from ds4.ring.fence import process_fence
from ds4.ring.liveness import FIRST_FRONT_END_BYTE, Leases

FILE_PREFIX: Final = "usage-"
PERIOD_S: Final = 5
_NUM_PERIODS: Final = 13  # the current one and those of the minute before: the window is never too short
_TOKEN_BITS: Final = 40
_TOKEN_MASK: Final = (1 << _TOKEN_BITS) - 1
_PERIOD_MASK: Final = (1 << (64 - _TOKEN_BITS)) - 1
_WORD_BYTES: Final = 8
_WORDS: Final = 16  # of one tenant in one block: running, the periods, the flag; two cache lines
_FLAG: Final = 1 + _NUM_PERIODS
_MAX_TURN_S: Final = 0.005


class KeyLimits:
    """Counts and refuses. Owned by the front end's state; `open` once it has its place in the ring."""

    def __init__(self, tenants: Iterable[Tenant], *, clock: Callable[[], float] = time.monotonic) -> None:
        limited = {tenant.number: tenant for tenant in tenants if tenant.is_limited}
        self._starts = {number: index * _WORDS for index, number in enumerate(limited)}
        self._block_words = len(limited) * _WORDS
        self._names = repr([(tenant.number, tenant.name) for tenant in limited.values()])
        self._clock = clock
        self._own = 0  # where this front end's block starts
        self._view: mmap.mmap | None = None
        self._words = memoryview(b"").cast("Q")
        self._blocks: NDArray[np.uint64] = np.zeros((0, 0), np.uint64)  # all of the file, [place, word]
        self._leases: Leases | None = None

    def open(self, directory: Path, index: int) -> None:
        """Map the file, made if missing, for front end `index`. Raises RingError."""
        if not self._block_words:
            return
        layout = zlib.crc32(f"{self._names} {_WORDS} {PERIOD_S}".encode())
        num_bytes = MAX_FRONT_ENDS * self._block_words * _WORD_BYTES
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(directory / f"{FILE_PREFIX}{layout:08x}", flags, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)  # zeros, and only where there is nothing yet
                self._view = mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
            self._leases = Leases(directory, create=False)
        except OSError as error:
            raise RingError(f"cannot count what keys use in {directory}: {error.strerror}") from error
        self._words = memoryview(self._view).cast("Q")
        self._blocks = np.frombuffer(self._words, np.uint64).reshape(MAX_FRONT_ENDS, self._block_words)
        self._own = index * self._block_words
        for start in self._starts.values():  # what a predecessor had running is over; what it used counts
            self._words[self._own + start] = 0
            self._words[self._own + start + _FLAG] = 0

    def close(self) -> None:
        """Unmap. The file stays: it belongs to the shared directory."""
        self._blocks = np.zeros((0, 0), np.uint64)
        self._words.release()
        if self._view is not None:
            self._view.close()
            self._view = None
        if self._leases is not None:
            self._leases.abandon()
            self._leases = None

    def take(self, tenant: Tenant, num_sequences: int, num_tokens: int) -> None:
        """Begin a request of so many sequences and prompt tokens. Raises KeyLimitError, and RequestError for
        more sequences than could ever run.
        """
        start = self._starts.get(tenant.number)
        if start is None:
            return
        if 0 < tenant.max_concurrent < num_sequences:
            raise RequestError(
                f"this API key may have {tenant.max_concurrent} concurrent requests (max_concurrent), and this "
                f"one alone counts as {num_sequences}; ask for fewer choices or prompts",
                param="n",
                code="invalid_value",
            )
        has_turn = self._wait_for_turn(start)
        self._words[self._own + start] += num_sequences
        try:
            process_fence().call()  # ours before theirs: pairs with the same fence in every other front end
            if tenant.max_concurrent and self._num_running(start) > tenant.max_concurrent:
                raise KeyLimitError(
                    f"this API key may have {tenant.max_concurrent} concurrent requests, and no more "
                    f"(max_concurrent); this one would be {_counted(num_sequences)}",
                    retry_after_s=1,
                )
            if tenant.tokens_per_minute:
                self._take_tokens(start, tenant.tokens_per_minute, num_tokens)
        except KeyLimitError:
            self._words[self._own + start] -= num_sequences
            raise
        finally:
            if has_turn:
                self._words[self._own + start + _FLAG] = 0

    def _wait_for_turn(self, start: int) -> bool:
        """Raise this tenant's flag and wait until nobody else asks; False, and no flag, after too long."""
        flag = self._own + start + _FLAG
        place = self._own // self._block_words
        gives_up_s = time.monotonic() + _MAX_TURN_S
        gives_way = False
        while True:
            if not gives_way:
                self._words[flag] = 1
                process_fence().call()  # pairs with the same fence in every other front end
            others = self._asking(start)
            if not others and not gives_way:
                return True
            gives_way = bool(others) and others[0] < place
            is_late = time.monotonic() > gives_up_s
            if gives_way or is_late:
                self._words[flag] = 0
            if is_late:
                return False

    def _asking(self, start: int) -> list[int]:
        """Other places that live and have their flag up, in order."""
        assert self._leases is not None
        own = self._own // self._block_words
        return [
            place
            for place in np.flatnonzero(self._blocks[:, start + _FLAG]).tolist()
            if place != own and self._leases.is_held_by_other(FIRST_FRONT_END_BYTE + place)
        ]

    def add_tokens(self, tenant: Tenant, num_tokens: int) -> None:
        """Output came; or, below zero, what was taken is not used."""
        start = self._starts.get(tenant.number)
        if start is not None:
            self._count(start, self._period, num_tokens)

    def give_back(self, tenant: Tenant, num_sequences: int) -> None:
        """A request that was begun is over."""
        start = self._starts.get(tenant.number)
        if start is not None:
            self._words[self._own + start] -= num_sequences

    @property
    def _period(self) -> int:
        return int(self._clock()) // PERIOD_S

    def _num_running(self, start: int) -> int:
        """Running sequences over all front ends that live."""
        total = 0
        assert self._leases is not None
        counts = self._blocks[:, start]
        for place in np.flatnonzero(counts).tolist():
            is_own = place * self._block_words == self._own
            if is_own or self._leases.is_held_by_other(FIRST_FRONT_END_BYTE + place):
                total += int(counts[place])
        return total

    def _take_tokens(self, start: int, limit: int, num_tokens: int) -> None:
        period = self._period
        self._count(start, period, num_tokens)
        process_fence().call()  # as in `take`
        used = self._used(start, period)
        if sum(used) <= limit:
            return
        self._count(start, period, -num_tokens)
        used[-1] -= num_tokens
        told = f"this API key may use {limit} tokens per minute (tokens_per_minute)"
        if num_tokens > limit:
            raise KeyLimitError(f"{told}; this prompt alone has {num_tokens}", retry_after_s=60)
        # By when enough of the oldest periods have left the window.
        left, num_over = sum(used), 0
        while num_over < len(used) and left + num_tokens > limit:
            left -= used[num_over]
            num_over += 1
        ends_s = (period + num_over) * PERIOD_S
        raise KeyLimitError(
            f"{told}, and used {sum(used)} in the last one; this prompt has {num_tokens}",
            retry_after_s=max(1, int(ends_s - self._clock()) + 1),
        )

    def _count(self, start: int, period: int, num_tokens: int) -> None:
        index = self._own + start + 1 + period % _NUM_PERIODS
        word = self._words[index]
        before = word & _TOKEN_MASK if word >> _TOKEN_BITS == period & _PERIOD_MASK else 0
        tokens = min(_TOKEN_MASK, max(0, before + num_tokens))
        self._words[index] = (period & _PERIOD_MASK) << _TOKEN_BITS | tokens

    def _used(self, start: int, now: int) -> list[int]:
        """Tokens of each period of the window over all front ends, the oldest first."""
        words = self._blocks[:, start + 1 : start + 1 + _NUM_PERIODS]
        periods = range(now - _NUM_PERIODS + 1, now + 1)
        order = [period % _NUM_PERIODS for period in periods]
        numbers = np.array([period & _PERIOD_MASK for period in periods], np.uint64)
        words = words[:, order]  # a copy: what is looked at below does not change meanwhile
        tokens = np.where(words >> np.uint64(_TOKEN_BITS) == numbers, words & np.uint64(_TOKEN_MASK), 0)
        return [int(each) for each in tokens.sum(axis=0)]


def _counted(num_sequences: int) -> str:
    return "one more" if num_sequences == 1 else f"{num_sequences} more"
