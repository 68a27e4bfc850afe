"""A model as data: a flat list of fused operations that every device executes alike.

Built once at load by `workers/model/<architecture>.py`; frozen. The operations read and write six
buffers that are named by their role and sized by the device for its largest step:

    hidden  [rows, hidden_size]             the residual stream
    normed  [rows, hidden_size]             what the next matmul reads
    qkv     [rows, (heads + 2 kv) * head]   queries, keys, values
    attn    [rows, heads * head]            attention output
    act     [rows, ffn_size]                activated feed-forward values
    logits  [samples, vocab_size]           of the sampled rows only

Weights are [outputs, inputs] as GGUF stores them (a matmul is `x @ W.T`) and stay quantised as in
the file; each device repacks them once at load. Unusual architectures add operation kinds here.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One weight: `data` is uint8, the raw GGUF blocks of `shape` (row-major, [outputs, inputs] or
    [n]) in GGML type `ggml_type` (gguf.GGMLQuantizationType value); a read-only view of the mapped file.
    """

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class Dimensions(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes every buffer is derived from."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    max_context_tokens: int  # what the model was trained for


class Embed(msgspec.Struct, frozen=True, kw_only=True):
    """hidden = table[token] * scale."""

    table: Tensor
    scale: float = 1.0


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """normed = hidden / sqrt(mean(hidden^2) + eps) * weight."""

    weight: Tensor
    eps: float


class QkvMatmul(msgspec.Struct, frozen=True, kw_only=True):
    """qkv = normed @ [q; k; v].T (+ biases, each F32 [outputs], where the architecture has them)."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None


class RopeAppend(msgspec.Struct, frozen=True, kw_only=True):
    """Rotate q and k by position, append k and v to the sequence's pages of `layer`.

    `inverse_frequencies` [rotary_size / 2] float32, scaling factors already applied; dimensions past
    rotary_size pass unrotated. `interleaved`: pairs are (2i, 2i+1), else (i, i + rotary_size / 2).
    `magnitude` multiplies cos and sin (YaRN).
    """

    layer: int
    inverse_frequencies: NDArray[np.float32]
    interleaved: bool
    magnitude: float = 1.0


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """attn = softmax(scale * q @ K.T, causal) @ V over the sequence's pages of `layer`, grouped queries."""

    layer: int
    scale: float


class OutputMatmul(msgspec.Struct, frozen=True, kw_only=True):
    """hidden += attn @ weight.T."""

    weight: Tensor


class GateUpMatmul(msgspec.Struct, frozen=True, kw_only=True):
    """act = activation(normed @ gate.T) * (normed @ up.T)."""

    gate: Tensor
    up: Tensor
    activation: Literal["silu"] = "silu"


class DownMatmul(msgspec.Struct, frozen=True, kw_only=True):
    """hidden += act @ weight.T."""

    weight: Tensor


class Logits(msgspec.Struct, frozen=True, kw_only=True):
    """logits = rmsnorm(hidden of the sampled rows) @ weight.T."""

    norm_weight: Tensor
    eps: float
    weight: Tensor


Operation = (
    Embed | Norm | QkvMatmul | RopeAppend | Attention | OutputMatmul | GateUpMatmul | DownMatmul | Logits
)


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A whole model: its sizes and its operations in execution order."""

    architecture: str
    dimensions: Dimensions
    operations: tuple[Operation, ...]

    def tensors(self) -> Iterator[Tensor]:
        """The weights of every operation; a tensor that two use comes twice."""
        for operation in self.operations:
            for field in operation.__struct_fields__:
                value = getattr(operation, field)
                if isinstance(value, Tensor):
                    yield value
