"""The decode part of a step: one row for every running sequence that has its next token to compute.

Runs in the worker, pure Python. Decode rows come before everything else, so that running streams
keep their pace whatever is waiting.
"""

from collections.abc import Collection, Iterable

from workers.kvcache.prefix import PrefixCache
from workers.sequence import Sequence


def split_running(
    running: Iterable[Sequence], paused: Collection[int]
) -> tuple[list[Sequence], list[Sequence]]:
    """The sequences that get a decode row, and those in prefill. `paused` slots may get no token now."""
    rows, prompts = [], []
    for sequence in running:
        if sequence.is_full:
            continue
        if not sequence.is_decoding:
            prompts.append(sequence)
        elif sequence.slot not in paused:
            rows.append(sequence)
    return rows, prompts


def growing(running: Iterable[Sequence], cache: PrefixCache) -> list[tuple[Sequence, int]]:
    """Those of `running` that have tokens past their last page, and how many pages they lack.

    Decoding brings one token at a time, a grammar may bring many.
    """
    size = cache.page_tokens
    return [
        (sequence, cache.pages_for(sequence.num_total) - len(sequence.pages))
        for sequence in running
        if sequence.num_total > len(sequence.pages) * size
    ]
