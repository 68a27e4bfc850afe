"""Who was turned away for want of room and will be back: they stand before whoever is turned away next.

Owns: the times at which they were told to come back, and how long requests take. Runs in: front ends.
"""

import heapq
import math
from typing import Final

_MAX_REMEMBERED: Final = 10_000
_MAX_RETRY_AFTER_S: Final = 60


class Crowd:
    """Owned by the engine client."""

    def __init__(self) -> None:
        self._back_s: list[float] = []
        self._mean_duration_s = 1.0

    def served(self, duration_s: float) -> None:
        """A request ran to its end, and took so long."""
        self._mean_duration_s += 0.1 * (duration_s - self._mean_duration_s)

    def turn_away(self, now_s: float, num_waiting: int, num_running: int) -> int:
        """One more, behind so many that wait and run: in how many seconds a slot is likely to be free for it.

        Those who were turned away and have not had time to come back stand before it: told less, all
        of them would come back at once, again and again.
        """
        ahead = num_waiting + self.size(now_s) + 1
        seconds = math.ceil(self._mean_duration_s * ahead / max(1, num_running))
        seconds = max(1, min(_MAX_RETRY_AFTER_S, seconds))
        self.add(now_s + seconds)
        return seconds

    def size(self, now_s: float) -> int:
        """How many have not had time to come back."""
        while self._back_s and self._back_s[0] <= now_s:
            heapq.heappop(self._back_s)
        return len(self._back_s)

    def add(self, back_s: float) -> None:
        """One more, who was told to be back at `back_s`."""
        if len(self._back_s) < _MAX_REMEMBERED:
            heapq.heappush(self._back_s, back_s)
