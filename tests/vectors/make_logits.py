"""Regenerate logits_tiny.json: llama.cpp's logits on tiny models, one for each variant of the llama program.

Runs by hand, like make_greedy.py:

    python -m tests.vectors.make_logits tests/vectors/logits_tiny.json
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.support.tiny_model import TinyShape, vocabulary, write_tiny_model
from tests.vectors.make_greedy import last_logits, open_peer

NUM_TOKENS: Final = 200
SHOWN_IDS: Final = tuple(range(0, len(vocabulary()), 9))


def _yarn(factor: float, trained: int, **more: float) -> dict[str, Any]:
    return {
        "extra_string": {"llama.rope.scaling.type": "yarn"},
        "extra_float32": {
            "llama.rope.scaling.factor": factor,
            **{f"llama.rope.scaling.{key}": value for key, value in more.items()},
        },
        "extra_uint32": {"llama.rope.scaling.original_context_length": trained},
    }


# Arguments of write_tiny_model beside `quant`.
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "biases": {"shape": TinyShape(biases=True)},
    "tied head, all heads apart": {"shape": TinyShape(tied_head=True, num_kv_heads=4)},
    "heads wider than the model": {"shape": TinyShape(head_size=32)},
    "linear scaling": {"extra_float32": {"llama.rope.scaling.factor": 4.0}},
    "yarn": _yarn(4.0, 128),
    "yarn with its own parameters": _yarn(8.0, 64, attn_factor=1.3, yarn_beta_fast=16.0),
    "rope factors": {"extra_tensors": {"rope_freqs.weight": np.linspace(1, 8, 8).astype(np.float32)}},
}


def prompt() -> list[int]:
    """The ids that every variant is asked about."""
    ids: list[int] = np.random.default_rng(0).integers(3, len(vocabulary()), NUM_TOKENS).tolist()
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, options in VARIANTS.items():
            peer = open_peer(write_tiny_model(Path(folder) / "tiny.gguf", quant="F32", **options))
            peer.eval(prompt())
            shown = [round(float(last_logits(peer)[token]), 4) for token in SHOWN_IDS]
            rows.append(f"{json.dumps(name)}: {json.dumps(shown, separators=(',', ':'))}")
    arguments.output.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
