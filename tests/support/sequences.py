"""Sequences for tests below the engine."""

import itertools
from collections.abc import Iterable
from typing import Any

from ds4.generation import GenerationRequest
from workers.sequence import Sequence, token_array

_numbers = itertools.count()


def make_sequence(
    prompt: Iterable[int],
    max_tokens: int = 16,
    *,
    front_end: int = 0,
    context: int = 1 << 20,
    **fields: Any,
) -> Sequence:
    """A waiting sequence that arrived after all made before it."""
    number = next(_numbers)
    return Sequence(
        request_id=number,
        slot=number,
        front_end=front_end,
        arrival=number,
        request=GenerationRequest(max_tokens=max_tokens, **fields),
        prompt=token_array(prompt),
        max_context_tokens=context,
    )
