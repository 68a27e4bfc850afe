"""How many prompt rows a step may hold while streams decode, so that they keep their pace.

Owns the estimate of what a row costs. Runs in the worker, pure Python. Between two tokens of a
running stream lies one step; on a slow device a step that is filled to its budget with prompt rows
takes seconds. The limit follows from measured steps: their time divided by their rows, which has its
fixed point where a step takes just the target. Results do not depend on how a prompt is cut.
"""

from typing import Final

TARGET_S: Final = 0.2  # a step with both decode and prompt rows
MIN_ROWS: Final = 16  # prompts always get on
_NEWEST: Final = 0.3  # weight of the newest measurement


class PrefillPace:
    """Owned by the scheduler."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._row_s = 0.0

    def note(self, num_prompt_rows: int, num_rows: int, elapsed_s: float) -> None:
        """A step was measured. Steps with few prompt rows say nothing about what those cost."""
        if num_prompt_rows < MIN_ROWS:
            return
        row_s = elapsed_s / num_rows
        self._row_s += (row_s - self._row_s) * (_NEWEST if self._row_s else 1.0)

    @property
    def max_prompt_rows(self) -> int:
        """Prompt rows for a step that also holds decode rows."""
        if self._row_s * self._max_rows <= TARGET_S:
            return self._max_rows
        return max(MIN_ROWS, int(TARGET_S / self._row_s))
