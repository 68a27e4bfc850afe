"""Who was turned away for want of room and will be back: they stand before whoever is turned away next.

Owns: the times at which they were told to come back. Runs in: front ends.
"""

import heapq
from typing import Final

_MAX_REMEMBERED: Final = 10_000


class Crowd:
    """Owned by the engine client."""

    def __init__(self) -> None:
        self._back_s: list[float] = []

    def size(self, now_s: float) -> int:
        """How many have not had time to come back."""
        while self._back_s and self._back_s[0] <= now_s:
            heapq.heappop(self._back_s)
        return len(self._back_s)

    def add(self, back_s: float) -> None:
        """One more, who was told to be back at `back_s`."""
        if len(self._back_s) < _MAX_REMEMBERED:
            heapq.heappush(self._back_s, back_s)
