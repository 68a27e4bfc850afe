"""The `llama` architecture: Llama 1 to 3, SmolLM, Mistral and everything converted under that name.

Owns: nothing; builds a frozen Program. Runs in: the worker, at load. Source: Touvron et al.,
arXiv 2302.13971 and 2307.09288; the `rope_freqs` tensor is Llama 3.1's frequency scaling.
GGUF permutes q and k so that RoPE pairs are adjacent.
"""

import numpy as np
from numpy.typing import NDArray

from ds4.model_file import ModelFile
from workers.model.config import DecoderConfig, read_config
from workers.model.program import (
    Attention,
    DownMatmul,
    Embed,
    GateUpMatmul,
    Logits,
    Norm,
    Operation,
    OutputMatmul,
    Program,
    QkvMatmul,
    RopeAppend,
)
from workers.model.weights import Weights
from workers.quant.dequantise import dequantise


def _frequencies(model: ModelFile, weights: Weights, config: DecoderConfig) -> NDArray[np.float32]:
    """The RoPE frequencies, divided by the file's own factors where it has any."""
    if not weights.has("rope_freqs.weight"):
        return config.inverse_frequencies
    tensor = weights.take_vector("rope_freqs.weight", config.rotary_size // 2)
    factors = dequantise(tensor.data, tensor.ggml_type, tensor.shape)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise model.fault("rope_freqs.weight holds factors that are not positive numbers")
    return config.inverse_frequencies / factors


def _layer(
    weights: Weights, config: DecoderConfig, layer: int, frequencies: NDArray[np.float32]
) -> list[Operation]:
    sizes = config.dimensions
    hidden, ffn = sizes.hidden_size, sizes.ffn_size
    queries, keys = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    prefix = f"blk.{layer}."
    return [
        Norm(weight=weights.take_vector(prefix + "attn_norm.weight", hidden), eps=config.norm_eps),
        QkvMatmul(
            q=weights.take(prefix + "attn_q.weight", (queries, hidden)),
            k=weights.take(prefix + "attn_k.weight", (keys, hidden)),
            v=weights.take(prefix + "attn_v.weight", (keys, hidden)),
            q_bias=weights.optional_vector(prefix + "attn_q.bias", queries),
            k_bias=weights.optional_vector(prefix + "attn_k.bias", keys),
            v_bias=weights.optional_vector(prefix + "attn_v.bias", keys),
        ),
        RopeAppend(
            layer=layer,
            inverse_frequencies=frequencies,
            interleaved=True,
            magnitude=config.rope_magnitude,
        ),
        Attention(layer=layer, scale=config.attention_scale),
        OutputMatmul(weight=weights.take(prefix + "attn_output.weight", (hidden, queries))),
        Norm(weight=weights.take_vector(prefix + "ffn_norm.weight", hidden), eps=config.norm_eps),
        GateUpMatmul(
            gate=weights.take(prefix + "ffn_gate.weight", (ffn, hidden)),
            up=weights.take(prefix + "ffn_up.weight", (ffn, hidden)),
        ),
        DownMatmul(weight=weights.take(prefix + "ffn_down.weight", (hidden, ffn))),
    ]


def build(model: ModelFile) -> Program:
    """The program of a llama file. Raises ModelFileError on missing, left-over or misshapen tensors."""
    config = read_config(model)
    weights = Weights(model)
    sizes = config.dimensions
    table = weights.take("token_embd.weight", (sizes.vocab_size, sizes.hidden_size))
    # Without an output tensor the embedding table is the head as well.
    head = (
        weights.take("output.weight", (sizes.vocab_size, sizes.hidden_size))
        if weights.has("output.weight")
        else table
    )
    frequencies = _frequencies(model, weights, config)
    operations: list[Operation] = [Embed(table=table)]
    for layer in range(sizes.num_layers):
        operations += _layer(weights, config, layer, frequencies)
    operations.append(
        Logits(
            norm_weight=weights.take_vector("output_norm.weight", sizes.hidden_size),
            eps=config.norm_eps,
            weight=head,
        )
    )
    weights.finish()
    return Program(architecture=model.architecture, dimensions=sizes, operations=tuple(operations))
