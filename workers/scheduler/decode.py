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


def growing(rows: Iterable[Sequence], cache: PrefixCache) -> list[Sequence]:
    """Those of `rows` whose next position lies past their last page."""
    size = cache.page_tokens
    return [sequence for sequence in rows if sequence.num_scheduled >= len(sequence.pages) * size]
