"""KV pages: which are free, and how many sequences hold each of the others.

Owns the free list and the reference counts. Runs in the worker, pure Python. A page is *free* (on
the list), *held* (count above 0) or *parked* (count 0 but kept by the prefix cache). Page ids are
indices into every device's storage.
"""

from collections.abc import Iterable


class PagePool:
    """Free list and reference counts of all pages. Mutated by the prefix cache alone."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the next page taken is the last entry
        self._holders = [0] * num_pages
        self._num_held = 0

    @property
    def num_free(self) -> int:
        """Pages that hold nothing anybody wants."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that at least one sequence holds."""
        return self._num_held

    def holders(self, page: int) -> int:
        """How many sequences hold `page`."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages, held once each. `num_free` must cover them."""
        assert count <= len(self._free)
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._holders[page] = 1
        self._num_held += count
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more sequence holds each of `pages`, which are held or parked."""
        holders = self._holders
        for page in pages:
            count = holders[page]
            holders[page] = count + 1
            if count == 0:
                self._num_held += 1

    def drop(self, pages: Iterable[int]) -> list[int]:
        """One sequence less for each; those for which it was the last, now to be parked or freed."""
        holders = self._holders
        unused: list[int] = []
        for page in pages:
            count = holders[page] - 1
            assert count >= 0, "a page was given back twice"
            holders[page] = count
            if count == 0:
                unused.append(page)
        self._num_held -= len(unused)
        return unused

    def free(self, pages: list[int]) -> None:
        """Put parked pages on the free list."""
        assert not any(map(self._holders.__getitem__, pages))
        self._free += pages

    def check(self, parked: Iterable[int]) -> None:
        """Assert that free, held and `parked` pages are disjoint and together all pages."""
        free = set(self._free)
        parked = set(parked)
        held = {page for page, count in enumerate(self._holders) if count > 0}
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert self._num_held == len(held)
        assert not free & held
        assert not free & parked
        assert not held & parked
        assert len(free) + len(held) + len(parked) == self.num_pages, "a page leaked"
