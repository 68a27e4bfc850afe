"""A llama GGUF of a real model's shape with random weights, written as fast as the disk takes it.

Owns: nothing; a function of its arguments. Runs in: benchmarks and their tests. Source: the block layouts
of ggml-common.h; the Q4_K_M mix is llama.cpp's (llama-quant.cpp). Speed depends on sizes and types,
not on values, so a tensor is one small pool of random blocks repeated. Scales are chosen so that
weights have a standard deviation of about 0.02 and nothing overflows. One tensor is in memory at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import gguf
import msgspec
import numpy as np
from numpy.typing import NDArray

Mix = Literal["Q4_K_M", "Q8_0", "Q4_1"]
_POOL_BLOCKS: Final = 4096
_TYPES: Final = gguf.GGMLQuantizationType
# Byte offset and value of each float16 scale in a block whose other bytes are random.
_SCALES: Final = {
    _TYPES.Q4_K: ((0, 7.5e-5), (2, 5.6e-4)),  # d, dmin
    _TYPES.Q6_K: ((208, 1.5e-5),),
    _TYPES.Q8_0: ((0, 2.7e-4),),
    _TYPES.Q4_1: ((0, 4e-3), (2, -0.03)),
}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Llama-3.1-8B unless told otherwise."""

    num_layers: int = 32
    hidden_size: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    ffn_size: int = 14336
    vocab_size: int = 128256
    max_context_tokens: int = 8192


def _layer_gets_more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _tensors(shape: ModelShape, mix: Mix) -> Iterator[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    """Name, shape and type of every tensor, in file order."""
    base = _TYPES.Q4_K if mix == "Q4_K_M" else _TYPES[mix]
    hidden, ffn = shape.hidden_size, shape.ffn_size
    queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    yield "token_embd.weight", (shape.vocab_size, hidden), base
    for layer in range(shape.num_layers):
        prefix = f"blk.{layer}."
        better = base
        if mix == "Q4_K_M" and _layer_gets_more_bits(layer, shape.num_layers):
            better = _TYPES.Q6_K
        yield prefix + "attn_norm.weight", (hidden,), _TYPES.F32
        yield prefix + "attn_q.weight", (queries, hidden), base
        yield prefix + "attn_k.weight", (keys, hidden), base
        yield prefix + "attn_v.weight", (keys, hidden), better
        yield prefix + "attn_output.weight", (hidden, queries), base
        yield prefix + "ffn_norm.weight", (hidden,), _TYPES.F32
        yield prefix + "ffn_gate.weight", (ffn, hidden), base
        yield prefix + "ffn_up.weight", (ffn, hidden), base
        yield prefix + "ffn_down.weight", (hidden, ffn), better
    yield "output_norm.weight", (hidden,), _TYPES.F32
    yield "output.weight", (shape.vocab_size, hidden), _TYPES.Q6_K if mix == "Q4_K_M" else base


def _pool(kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random blocks with sane scales, [_POOL_BLOCKS, block bytes] uint8."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (_POOL_BLOCKS, num_bytes), np.uint8)
    for offset, value in _SCALES[kind]:
        scales = (value * rng.uniform(0.7, 1.3, _POOL_BLOCKS)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


def write_shaped_model(
    path: Path, *, shape: ModelShape | None = None, mix: Mix = "Q4_K_M", seed: int = 0
) -> Path:
    """Write the model to `path` and return it. It has no vocabulary, only its size: it is never fed text."""
    shape = shape or ModelShape()
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"random {mix}")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_context_tokens)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    tensors = list(_tensors(shape, mix))
    for name, dims, kind in tensors:
        if kind == _TYPES.F32:
            writer.add_tensor_info(name, dims, np.dtype(np.float32), 4 * int(np.prod(dims)))
        else:
            stored = gguf.quant_shape_to_byte_shape(dims, kind)
            writer.add_tensor_info(
                name, stored, np.dtype(np.uint8), int(np.prod(stored, dtype=np.int64)), raw_dtype=kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools: dict[gguf.GGMLQuantizationType, NDArray[np.uint8]] = {}
    for _, dims, kind in tensors:
        if kind == _TYPES.F32:
            writer.write_tensor_data(rng.uniform(0.8, 1.2, dims).astype(np.float32))
            continue
        if kind not in pools:
            pools[kind] = _pool(kind, rng)
        writer.write_tensor_data(np.resize(pools[kind], gguf.quant_shape_to_byte_shape(dims, kind)))
    writer.close()
    return path
