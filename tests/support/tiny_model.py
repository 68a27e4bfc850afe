"""A tiny random llama in a real GGUF file, for every test that needs a model but not a good one.

Owns: nothing; a function of its arguments (same seed, same bytes). Runs in: tests. The file is written
by the gguf package, so that our own reader never reads only what we wrote. The vocabulary is a
working byte-level BPE: 3 control tokens, 256 byte tokens, and one token for each merge.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import msgspec
import numpy as np
from numpy.typing import NDArray

END_OF_TEXT: Final = 0
IM_START: Final = 1
IM_END: Final = 2
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Each pair joins tokens that exist by then; "Ġ" is the byte-level spelling of a space.
MERGES: Final = (
    "h e",
    "i n",
    "e r",
    "a n",
    "o n",
    "r e",
    "Ġ t",
    "Ġt he",
    "Ġ a",
    "Ġ s",
    "Ġ w",
    "in g",
    "an d",
    "Ġa nd",
    "o u",
    "l l",
    "he ll",
    "hell o",
    "o r",
    "Ġw or",
    "l d",
    "Ġwor ld",
)


class TinyShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the model; every row length must be a multiple of the weight type's block."""

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    ffn_size: int = 128
    max_context_tokens: int = 512
    tied_head: bool = False
    biases: bool = False


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's bijection)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


def vocabulary() -> list[str]:
    """Every token's text, in the order of ids."""
    return [*SPECIAL_TOKENS, *byte_symbols(), *(merge.replace(" ", "") for merge in MERGES)]


def _add_tokenizer(writer: Any, chat_template: str, extra_controls: Sequence[str], *, add_bos: bool) -> None:
    tokens = vocabulary()
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    num_special = len(SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    types = [control] * num_special + [normal] * (len(tokens) - num_special)
    writer.add_token_list([*tokens, *extra_controls])
    writer.add_token_types(types + [control] * len(extra_controls))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(chat_template)


def _add_weights(writer: Any, shape: TinyShape, quant: str, seed: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    weight_type = gguf.GGMLQuantizationType[quant]

    def matrix(name: str, outputs: int, inputs: int) -> None:
        values = rng.normal(0, 1.6 / np.sqrt(inputs), (outputs, inputs)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, weight_type), raw_dtype=weight_type)

    def vector(name: str, values: NDArray[np.float64]) -> None:
        writer.add_tensor(name, values.astype(np.float32))

    hidden, ffn = shape.hidden_size, shape.ffn_size
    queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    matrix("token_embd.weight", vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"blk.{layer}."
        vector(prefix + "attn_norm.weight", rng.uniform(0.5, 1.5, hidden))
        for part, outputs in (("q", queries), ("k", keys), ("v", keys)):
            matrix(f"{prefix}attn_{part}.weight", outputs, hidden)
            if shape.biases:
                vector(f"{prefix}attn_{part}.bias", rng.normal(0, 0.5, outputs))
        matrix(prefix + "attn_output.weight", hidden, queries)
        vector(prefix + "ffn_norm.weight", rng.uniform(0.5, 1.5, hidden))
        matrix(prefix + "ffn_gate.weight", ffn, hidden)
        matrix(prefix + "ffn_up.weight", ffn, hidden)
        matrix(prefix + "ffn_down.weight", hidden, ffn)
    vector("output_norm.weight", rng.uniform(0.5, 1.5, hidden))
    if not shape.tied_head:
        matrix("output.weight", vocab_size, hidden)


def write_tiny_model(
    path: Path,
    *,
    quant: str = "Q4_1",
    seed: int = 0,
    shape: TinyShape | None = None,
    architecture: str = "llama",
    extra_uint32: dict[str, int] | None = None,
    extra_float32: dict[str, float] | None = None,
    extra_string: dict[str, str] | None = None,
    extra_tensors: dict[str, NDArray[np.float32]] | None = None,
    chat_template: str = CHAT_TEMPLATE,
    extra_controls: Sequence[str] = (),
    add_bos: bool = False,
) -> Path:
    """Write the model to `path` and return it. `extra_*` add whole keys and tensors, e.g. for RoPE scaling;
    `extra_controls` are control tokens after all others.

    `quant` names a GGML type that the gguf package can quantise to and whose block divides the rows:
    F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0; with rows of 256 also TQ1_0 and TQ2_0.
    """
    shape = shape or TinyShape()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny Random")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_context_tokens)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab_size = len(vocabulary()) + len(extra_controls)
    writer.add_vocab_size(vocab_size)
    for key, whole in (extra_uint32 or {}).items():
        writer.add_uint32(key, whole)
    for key, number in (extra_float32 or {}).items():
        writer.add_float32(key, number)
    for key, text in (extra_string or {}).items():
        writer.add_string(key, text)
    _add_tokenizer(writer, chat_template, extra_controls, add_bos=add_bos)
    _add_weights(writer, shape, quant, seed, vocab_size)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
