"""Prefix sharing: computed pages found again by what they hold, for all users alike.

Owns the index from digests to pages and the order in which unused pages are given up. Runs in the
worker, pure Python. A page is indexed when it is full and computed. Its digest covers its tokens and
the digest of the page before it, so one digest stands for the whole prefix (hash chaining as in
vLLM's automatic prefix caching). BLAKE2b under a key drawn at start: nobody can prepare two prompts
that collide, and by chance 128 bits do not. A chain begins with the request's cache salt, so that
requests with different salts find nothing of each other.

A page that no sequence holds stays in the index, *parked*, until its room is needed; the one unused
for longest goes first, and of one sequence the last page first, because a prefix is useless without
its beginning.

A prompt may have tens of thousands of pages, and the other streams wait while something is done for each.
A digest costs some ten times what all the rest does: those of a waiting prompt are made some at a time.
"""

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice, takewhile

from workers.kvcache.pages import PagePool
from workers.sequence import Sequence


class PrefixCache:
    """All KV pages. Owned by the scheduler; the only one who takes pages from the pool."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._pool = PagePool(num_pages)
        self._key = secrets.token_bytes(16)
        self._page_by_digest: dict[bytes, int] = {}
        self._digest_by_page: dict[int, bytes] = {}
        self._parked: OrderedDict[int, None] = OrderedDict()  # in the order they are given up
        self.num_releases = 0  # counts up whenever pages may have become available
        self.num_given_up = 0  # parked pages that went to somebody else, so that `find` may find less

    @property
    def num_pages(self) -> int:
        """Pages that exist."""
        return self._pool.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be taken now: free and parked ones."""
        return self._pool.num_free + len(self._parked)

    @property
    def num_parked(self) -> int:
        """Pages kept only as prefix cache."""
        return len(self._parked)

    @property
    def num_held(self) -> int:
        """Pages that sequences hold."""
        return self._pool.num_held

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` positions need."""
        return -(-num_tokens // self.page_tokens)

    def find(self, sequence: Sequence) -> list[int]:
        """The pages that hold the longest indexed prefix of the sequence's tokens.

        Never all of them: at least one token is left to compute, since something must be sampled.
        """
        self.prepare(sequence, len(sequence.tokens))
        digests = sequence.page_digests[: self._num_shareable(sequence)]
        pages = map(self._page_by_digest.get, digests)
        return [page for page in takewhile(_is_page, pages) if page is not None]

    def prepare(self, sequence: Sequence, max_digests: int) -> bool:
        """Make at most `max_digests` of the digests that `find` has yet to look up; True when it lacks none."""
        digests, index = sequence.page_digests, self._page_by_digest
        num_shareable = self._num_shareable(sequence)
        end = min(num_shareable, len(digests) + max_digests)
        while not digests or digests[-1] in index:  # no further than needed: most prompts are new
            if len(digests) >= end:
                return len(digests) >= num_shareable
            self._digests(sequence, len(digests) + 1)
        return True

    def finds_more(self, sequence: Sequence, num_found: int) -> bool:
        """Whether `find` would find more than `num_found` pages by now. Cheap."""
        if num_found >= self._num_shareable(sequence):
            return False
        return self._digests(sequence, num_found + 1)[num_found] in self._page_by_digest

    def num_parked_of(self, pages: Iterable[int]) -> int:
        """How many of `pages` are parked, so that holding them makes fewer available."""
        return sum(map(self._parked.__contains__, pages))

    def take(self, found: list[int], count: int) -> list[int]:
        """Hold the pages `found`, and `count` new ones after them. `num_available` must cover it."""
        unpark = self._parked.pop
        for page in found:
            unpark(page, None)
        self._pool.hold(found)
        missing = count - self._pool.num_free
        if missing > 0:
            self._give_up(missing)
        return found + self._pool.take(count)

    def register(self, sequence: Sequence) -> None:
        """Index the sequence's pages that are full of computed, known tokens."""
        num_full = min(sequence.num_computed, len(sequence.tokens)) // self.page_tokens
        if num_full <= sequence.num_registered:
            return
        digests = self._digests(sequence, num_full)
        for index in range(sequence.num_registered, num_full):
            digest, page = digests[index], sequence.pages[index]
            if digest not in self._page_by_digest and page not in self._digest_by_page:
                self._page_by_digest[digest] = page
                self._digest_by_page[page] = digest
        sequence.num_registered = num_full

    def release(self, pages: list[int]) -> None:
        """A sequence gives its pages up; those that are indexed stay as prefix cache."""
        self.num_releases += 1
        unused = self._pool.drop(reversed(pages))
        indexed, parked = self._digest_by_page, self._parked
        for page in unused:
            if page in indexed:
                parked[page] = None
        self._pool.free([page for page in unused if page not in indexed])

    def forget(self, pages: Iterable[int]) -> None:
        """Take held `pages` out of the index: what they hold is not to be trusted (NaN)."""
        for page in pages:
            digest = self._digest_by_page.pop(page, None)
            if digest is not None:
                del self._page_by_digest[digest]

    def check(self) -> None:
        """Assert that no page leaked and the index is sound."""
        self._pool.check(self._parked)
        assert len(self._page_by_digest) == len(self._digest_by_page)
        for digest, page in self._page_by_digest.items():
            assert self._digest_by_page[page] == digest
            assert page in self._parked or self._pool.holders(page) > 0
        assert all(page in self._digest_by_page for page in self._parked)

    def _give_up(self, count: int) -> None:
        assert count <= len(self._parked)
        pages = list(islice(self._parked, count))
        parked, index, digest_of = self._parked, self._page_by_digest, self._digest_by_page.pop
        for page in pages:
            del parked[page]
            del index[digest_of(page)]
        self.num_given_up += count
        self._pool.free(pages)

    def _num_shareable(self, sequence: Sequence) -> int:
        """Pages that may be found: all that are full, but for the one with the last token."""
        return (len(sequence.tokens) - 1) // self.page_tokens

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """The chained digests of the first `count` pages at least, kept with the sequence."""
        digests, size = sequence.page_digests, self.page_tokens
        previous = digests[-1] if digests else sequence.request.cache_salt
        for index in range(len(digests), count):
            page: array[int] = sequence.tokens[index * size : (index + 1) * size]
            previous = hashlib.blake2b(previous + page.tobytes(), digest_size=16, key=self._key).digest()
            digests.append(previous)
        return digests


def _is_page(page: int | None) -> bool:
    return page is not None
