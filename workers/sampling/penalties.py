"""Repetition, presence and frequency penalties: which ids a sequence holds, and how often.

Owns: `Penalties`, one per seat that asked, made by `HostSampler.seat` and fed by `HostSampler.sample`.
Runs in: the worker. Source: repetition as in CTRL (Keskar et al. 2019) with the sign rule that Hugging
Face and llama.cpp use; presence and frequency as in the OpenAI API.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.generation import SamplingParams

MAX_LOGIT: Final = float(np.finfo(np.float32).max)


def wanted(params: SamplingParams) -> bool:
    """Whether a sequence needs its tokens counted at all."""
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


class Penalties:
    """The distinct ids of one sequence in order of first appearance, with their output counts."""

    def __init__(self, params: SamplingParams, history: NDArray[np.uint32], num_prompt_tokens: int) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        prompt = history[:num_prompt_tokens] if params.repetition_penalty != 1.0 else history[:0]
        output, counts = np.unique(history[num_prompt_tokens:], return_counts=True)
        only_prompt = np.setdiff1d(prompt, output)
        self._size = len(only_prompt) + len(output)
        self._ids = np.zeros(max(64, 2 * self._size), np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._ids[: self._size] = np.concatenate([only_prompt, output])
        self._counts[len(only_prompt) : self._size] = counts
        self._index = dict(zip(self._ids[: self._size].tolist(), range(self._size), strict=True))

    def count(self, token_id: int) -> None:
        """Note one more output token."""
        index = self._index.get(token_id)
        if index is None:
            index = self._size
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._index[token_id] = index
            self._ids[index] = token_id
            self._size = index + 1
        self._counts[index] += 1.0

    def apply(self, row: NDArray[np.float32]) -> None:
        """Change the logits `row` [vocab] in place. A finite logit stays finite, -inf stays -inf."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        before = row[ids]
        with np.errstate(over="ignore"):
            after = np.where(before > 0, before / self._repetition, before * self._repetition)
            after -= self._presence * (counts > 0) + self._frequency * counts
        row[ids] = np.where(np.isfinite(before), np.clip(after, -MAX_LOGIT, MAX_LOGIT), before)
