"""How many threads a step gets: fewer when a busy neighbour makes more of them slower.

Owns: recent step times. Runs in the worker's thread; plain Python, no clock of its own.

Threads that meet at barriers run at the pace of the slowest. Where another process takes a core, two
threads can be many times slower than one. So now and then a few steps run with half or twice the
threads, and the faster count stays. Results do not depend on the count.
"""

from collections import deque
from statistics import median
from typing import Final

_TRIAL_STEPS: Final = 3
_KEPT_STEPS: Final = 5
_FIRST_INTERVAL: Final = 8  # steps to the first trial: a machine may be crowded from the start
_MIN_INTERVAL: Final = 48  # steps between trials once a count has won one
_MAX_INTERVAL: Final = 768
_GAIN: Final = 0.9  # a trial wins when its time is below this share
_SUDDEN: Final = 1.5  # steps this much slower than before start a trial at once; in a trial, they end it


class _Bucket:
    """Steps of a similar number of rows."""

    def __init__(self, num_counts: int) -> None:
        self.num_counts = num_counts
        self.current = 0  # index into the counts, most threads first
        self.times: deque[float] = deque(maxlen=_KEPT_STEPS)
        self.usual = 0.0  # time at the last decision
        self.interval = self.wait = _FIRST_INTERVAL
        self.trial: int | None = None
        self.trial_times: list[float] = []
        self.downwards = True

    def index(self) -> int:
        return self.current if self.trial is None else self.trial

    def record(self, elapsed_s: float) -> None:
        if self.trial is not None:
            self.trial_times.append(elapsed_s)
            if len(self.trial_times) == _TRIAL_STEPS or elapsed_s > _SUDDEN * median(self.times):
                self._decide()
            return
        self.times.append(elapsed_s)
        self.wait -= 1
        if len(self.times) < _KEPT_STEPS:
            return
        now = median(self.times)
        self.usual = self.usual or now
        if now > _SUDDEN * self.usual:
            self.usual, self.downwards = now, True
            self._begin_trial()
        elif self.wait <= 0:
            self.usual = now
            self._begin_trial()

    def _begin_trial(self) -> None:
        step = 1 if self.downwards else -1
        if not 0 <= self.current + step < self.num_counts:
            step = -step
        self.downwards = step < 0  # the other way next time
        if 0 <= self.current + step < self.num_counts:
            self.trial, self.trial_times = self.current + step, []

    def _decide(self) -> None:
        assert self.trial is not None
        if median(self.trial_times) < _GAIN * median(self.times):
            self.downwards = self.trial > self.current
            self.current, self.interval = self.trial, _MIN_INTERVAL
            self.times.clear()
            self.times.extend(self.trial_times)
            self.usual = 0.0
        else:
            self.interval = min(_MAX_INTERVAL, 2 * self.interval)
        self.trial, self.wait = None, self.interval


class ThreadTuner:
    """Chooses a thread count for each step from the times of earlier ones. One owner, the device."""

    def __init__(self, max_threads: int) -> None:
        self.counts = [max_threads]
        while self.counts[-1] > 1:
            self.counts.append((self.counts[-1] + 1) // 2)
        self._buckets: dict[int, _Bucket] = {}

    def choose(self, num_rows: int) -> int:
        """Threads for a step of `num_rows` rows."""
        return self.counts[self._bucket(num_rows).index()]

    def record(self, num_rows: int, elapsed_s: float) -> None:
        """How long a step took with the count that was chosen for it."""
        self._bucket(num_rows).record(elapsed_s)

    def _bucket(self, num_rows: int) -> _Bucket:
        key = num_rows.bit_length()
        if key not in self._buckets:
            self._buckets[key] = _Bucket(len(self.counts))
        return self._buckets[key]
