"""What the machine code of a step is specialised for.

Owns nothing: frozen data. Runs in the worker process.
"""

import msgspec


class StepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model's share in the machine code: anything else about it is in the operation records."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    kinds: tuple[int, ...]  # WeightKind of the matrices, ascending
    table_kinds: tuple[int, ...]  # those of embedding tables
