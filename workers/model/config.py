"""Hyper-parameters of a decoder with rotary positions, checked as they are read from the metadata.

Owns: `DecoderConfig` and the RoPE frequencies. Runs in: the worker, at load. Sources: GGUF's key names
(docs/gguf.md); linear scaling and YaRN (Peng et al., arXiv 2309.00071) as llama.cpp applies them.
"""

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ds4.model_file import ModelFile
from workers.model.program import Dimensions

MAX_LAYERS: Final = 4096
MAX_SIZE: Final = 1 << 20  # of any one dimension but the vocabulary
MAX_VOCAB: Final = 1 << 24
_MAX_ANGLE: Final = 1e6  # radians from one position to the next; a sound model has at most 1
_MAX_MAGNITUDE: Final = 1e6


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the llama family's architectures have in common."""

    dimensions: Dimensions
    norm_eps: float
    attention_scale: float
    rotary_size: int
    inverse_frequencies: NDArray[np.float32]  # [rotary_size / 2], linear and YaRN scaling applied
    rope_magnitude: float


def _yarn_frequencies(
    model: ModelFile, inverse: NDArray[np.float64], base: float, factor: float
) -> NDArray[np.float64]:
    """Slow dimensions interpolated, fast ones left alone, a linear ramp between the two."""
    rotary_size = 2 * len(inverse)
    trained = model.get_int(
        model.key("rope.scaling.original_context_length"), model.max_context_tokens, low=1
    )
    strength = model.get_float(model.key("rope.scaling.yarn_ext_factor"), 1.0)

    def dimension(rotations: float) -> float:
        """Index of the pair that turns `rotations` times over the trained context, as a real number."""
        if rotations <= 0 or base <= 1:
            raise model.fault("the YaRN parameters are out of range")
        return rotary_size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(0, math.floor(dimension(model.get_float(model.key("rope.scaling.yarn_beta_fast"), 32.0))))
    high = min(
        rotary_size - 1,
        math.ceil(dimension(model.get_float(model.key("rope.scaling.yarn_beta_slow"), 1.0))),
    )
    ramp = np.clip((np.arange(len(inverse)) - low) / max(0.001, high - low), 0, 1)
    extrapolated = (1 - ramp) * strength
    return inverse / factor * (1 - extrapolated) + inverse * extrapolated


def _rope(model: ModelFile, rotary_size: int) -> tuple[NDArray[np.float32], float]:
    """Inverse frequencies and the magnitude of the rotation. Raises ModelFileError on unknown scaling."""
    base = model.get_float(model.key("rope.freq_base"), 10000.0)
    if base <= 0:
        raise model.fault(f"the RoPE base is {base}")
    inverse = base ** (-np.arange(0, rotary_size, 2, dtype=np.float64) / rotary_size)
    kind = model.get_str(model.key("rope.scaling.type"), "linear")
    legacy = model.get_float(model.key("rope.scale_linear"), 1.0)
    factor = model.get_float(model.key("rope.scaling.factor"), legacy) or 1.0
    if factor <= 0:
        raise model.fault(f"the RoPE scaling factor is {factor}")
    if model.get_float(model.key("rope.scaling.yarn_log_multiplier"), 0.0) != 0.0:
        raise model.fault("RoPE scaling with a YaRN log multiplier is not supported")
    magnitude = model.get_float(model.key("rope.scaling.attn_factor"), 1.0)
    if kind == "none":
        pass
    elif kind == "linear":
        inverse = inverse / factor
    elif kind == "yarn":
        inverse = _yarn_frequencies(model, inverse, base, factor)
        magnitude *= 1 + 0.1 * math.log(factor)
    else:
        raise model.fault(f"RoPE scaling of type {kind!r} is not supported; none, linear and yarn are")
    if not (np.abs(inverse) <= _MAX_ANGLE).all() or not abs(magnitude) <= _MAX_MAGNITUDE:
        raise model.fault(f"the RoPE parameters are out of range (base {base}, factor {factor})")
    return inverse.astype(np.float32), magnitude


def read_config(model: ModelFile) -> DecoderConfig:
    """The hyper-parameters of `model`. Raises ModelFileError naming the key that is missing or wrong."""

    def size(suffix: str, default: int | None = None, high: int = MAX_SIZE) -> int:
        if default is None:
            return model.get_int(model.key(suffix), low=1, high=high)
        return model.get_int(model.key(suffix), default, low=1, high=high)

    if model.get_int(model.key("expert_count"), 0):
        raise model.fault("a mixture of experts, which is not supported yet")
    hidden_size, num_heads = size("embedding_length"), size("attention.head_count")
    num_kv_heads = size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise model.fault(f"{num_heads} query heads do not divide into {num_kv_heads} key-value heads")
    if hidden_size % num_heads and model.key("attention.key_length") not in model.metadata:
        raise model.fault(f"{num_heads} heads do not divide a hidden size of {hidden_size}")
    head_size = size("attention.key_length", max(1, hidden_size // num_heads))
    if size("attention.value_length", head_size) != head_size:
        raise model.fault("keys and values of different sizes are not supported")
    rotary_size = size("rope.dimension_count", head_size)
    if rotary_size % 2 or rotary_size > head_size:
        raise model.fault(f"{rotary_size} rotary dimensions do not fit a head of {head_size}")
    norm_eps = model.get_float(model.key("attention.layer_norm_rms_epsilon"))
    if norm_eps <= 0:
        raise model.fault(f"the norm's epsilon is {norm_eps}")
    inverse_frequencies, magnitude = _rope(model, rotary_size)
    vocab_size = model.vocab_size
    if vocab_size > MAX_VOCAB:
        raise model.fault(f"a vocabulary of {vocab_size}; the limit is {MAX_VOCAB}")
    return DecoderConfig(
        dimensions=Dimensions(
            num_layers=size("block_count", high=MAX_LAYERS),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            ffn_size=size("feed_forward_length"),
            vocab_size=vocab_size,
            max_context_tokens=model.max_context_tokens,
        ),
        norm_eps=norm_eps,
        attention_scale=head_size**-0.5,
        rotary_size=rotary_size,
        inverse_frequencies=inverse_frequencies,
        rope_magnitude=magnitude,
    )
