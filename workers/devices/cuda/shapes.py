"""Which models the kernels run, and which of their products are with float or quantised weights.

Owns: nothing; functions of a program's operations. Runs in: the worker, at load.
"""

from ds4.errors import ConfigError
from workers.devices.cuda.weights import pair_type, stored_type
from workers.kernels import catalogue
from workers.model.program import Dimensions, DownMatmul, GateUpMatmul, Operation, QkvMatmul
from workers.quant.repack import FLOAT_TYPES


def check_shape(sizes: Dimensions) -> None:
    """Raises ConfigError for a model that the kernels cannot run."""
    inputs = (sizes.hidden_size, sizes.num_heads * sizes.head_size, sizes.ffn_size)
    faults = []
    if sizes.head_size % 16 or sizes.head_size > 128:
        faults.append(f"heads of {sizes.head_size} (a multiple of 16 up to 128)")
    if any(size % 32 for size in inputs):
        faults.append(f"matrices with rows of {', '.join(map(str, inputs))} (multiples of 32)")
    if catalogue.chunk_rows(sizes.num_heads, sizes.num_kv_heads) == 0:
        faults.append(
            f"{sizes.num_heads} heads on {sizes.num_kv_heads} key-value heads (64 times as many at most)"
        )
    if faults:
        raise ConfigError(
            f"the GPU's kernels do not run {'; '.join(faults)}; use --device cpu or reference",
            setting="device",
        )


def has_decode_attention(sizes: Dimensions) -> bool:
    """Whether decode rows have a kernel of their own; else they are tiles of one row."""
    return sizes.num_heads // sizes.num_kv_heads <= catalogue.MAX_DECODE_GROUP


def rounds_activations(gate_up: GateUpMatmul, down: DownMatmul) -> bool:
    """Whether both products are with quantised weights, so that few rows stay int8 from one to the other."""
    return (
        pair_type(gate_up.gate, gate_up.up) not in FLOAT_TYPES and stored_type(down.weight) not in FLOAT_TYPES
    )


def read_matrices(reader: Operation) -> list[bool]:
    """Whether each matrix that reads a norm's output is a float one."""
    match reader:
        case QkvMatmul():
            return [stored_type(part) in FLOAT_TYPES for part in (reader.q, reader.k, reader.v)]
        case GateUpMatmul():
            return [pair_type(reader.gate, reader.up) in FLOAT_TYPES]
    raise AssertionError(f"nothing is known to read a norm before {type(reader).__name__}")
