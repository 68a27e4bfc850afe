"""The decode part of a step: one row for every running sequence that has its next token to compute.

Runs in the worker, pure Python. Decode rows come before everything else, so that running streams
keep their pace whatever is waiting.
"""

from collections.abc import Collection, Iterable

from workers.kvcache.prefix import PrefixCache
from workers.sequence import Sequence


def decode_rows(running: Iterable[Sequence], paused: Collection[int]) -> list[Sequence]:
    """The sequences that get a decode row. `paused` are slots that may not get a token now."""
    return [
        sequence
        for sequence in running
        if sequence.is_decoding and not sequence.is_full and sequence.slot not in paused
    ]


def growing(rows: Iterable[Sequence], cache: PrefixCache) -> list[Sequence]:
    """Those of `rows` whose next position lies past their last page."""
    size = cache.page_tokens
    return [sequence for sequence in rows if sequence.num_scheduled >= len(sequence.pages) * size]
