"""How queries and pages are grouped for attention, and the scratch memory that a group needs.

Owns nothing: sizes that the kernels (LLVM) and the buffers (NumPy) share. Runs in the worker process.
"""

from typing import Final

import msgspec

from workers.devices.cpu.target import Target
from workers.devices.interface import PAGE_TOKENS

HEAD_UNIT: Final = 16  # head sizes are multiples of it: kernels work on whole vectors
CHUNK_PAGES: Final = 32  # whose scores are held at once
RUN_PAGES: Final = 64  # a power of two; whose keys (or values) of one head lie in a row
CHUNK_KEYS: Final = CHUNK_PAGES * PAGE_TOKENS
SCORES_BYTES: Final = 4 * CHUNK_KEYS + 64  # of one query; one line more than a power of two: other cache sets


class QueryGroup(msgspec.Struct, frozen=True, kw_only=True):
    """How many queries one call of the kernel takes: `num_rows` rows of `num_heads` heads."""

    num_rows: int
    num_heads: int
    head_size: int

    @property
    def num_queries(self) -> int:
        """Queries in flight."""
        return self.num_rows * self.num_heads

    @property
    def scratch_bytes(self) -> int:
        """Scores of a chunk, then the largest score and the sum of each query, the scales of values, the output."""
        return self.output_offset + 4 * self.num_queries * self.head_size

    @property
    def state_offset(self) -> int:
        """Where the running maximum and sum of each query lie in the scratch."""
        return SCORES_BYTES * self.num_queries

    @property
    def value_scales_offset(self) -> int:
        """Where the scales of a chunk's values lie in the scratch."""
        return self.state_offset + 64 * self.num_queries

    @property
    def output_offset(self) -> int:
        """Where the outputs lie in the scratch."""
        return self.value_scales_offset + 4 * CHUNK_KEYS


def group_sizes(target: Target, heads_a_kv_head: int, head_size: int) -> tuple[QueryGroup, QueryGroup]:
    """The group for runs of prompt rows, and the one for a single row, with the same number of heads."""
    limit = 16 if target.has_wide_registers else 4
    heads = max(n for n in range(1, limit + 1) if heads_a_kv_head % n == 0)
    rows = max(1, min(4, limit // heads))
    return (
        QueryGroup(num_rows=rows, num_heads=heads, head_size=head_size),
        QueryGroup(num_rows=1, num_heads=heads, head_size=head_size),
    )


def page_scales_offset(head_size: int) -> int:
    """Where the float32 scales of a page's keys (or values) of one head begin."""
    return 2 * head_size * PAGE_TOKENS


def page_bytes(head_size: int) -> int:
    """Bytes of one head's keys, or of its values, in a page."""
    return page_scales_offset(head_size) + 4 * PAGE_TOKENS
