"""Regenerate greedy_smollm2.json from llama.cpp, through the llama-cpp-python package.

Runs by hand, never in CI: it needs `pip install llama-cpp-python` and the model file.

    python -m tests.vectors.make_greedy MODEL.gguf tests/vectors/greedy_smollm2.json

The model's weights are widened to float32 first (`widen`), and the peer's KV cache is float32: on a
quantised file llama.cpp rounds activations to 8 bits, so its greedy text differs by design.
`ignore_eos` is not used, since it biases the end tokens; generation simply runs on past them.
"""

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

NUM_GENERATED: Final = 64
NUM_TOP_LOGITS: Final = 8
SPREAD_IDS: Final = (0, 1, 2, 17, 1000, 12345, 30000, 49151)
RAW: Final = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "Water boils at a temperature of",
    "In 1969, the first humans",
    "Ingredients: 2 eggs, 200 g flour, 1 pinch of salt.\n\nMethod:",
    "Émile naïvely ordered a café crème in Zürich – 東京では",
)
CHAT: Final = (
    "What is gravity?",
    "Write a short poem about autumn leaves.",
    "Explain in two sentences why the sky is blue.",
    "List three healthy breakfast ideas.",
    "Translate 'good morning' to French, Spanish and German.",
    "How do I reverse a list in Python?",
)


def widen(source: Path, target: Path) -> Path:
    """A copy of the model with every tensor in float32, written with the gguf package."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for key, field in reader.fields.items():
        if key.startswith(skipped):
            continue
        item_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=item_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(tuple(int(n) for n in tensor.shape[::-1])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def open_peer(
    path: Path, kv_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **options: Any
) -> Any:
    """The peer on `path`, on one thread."""
    import llama_cpp

    return llama_cpp.Llama(
        str(path), n_ctx=1024, n_threads=1, n_threads_batch=1, type_k=int(kv_type), type_v=int(kv_type),
        verbose=False, **options,
    )  # fmt: skip


def last_logits(peer: Any) -> NDArray[np.float32]:
    """Logits [vocab] of the token evaluated last."""
    return np.ctypeslib.as_array(peer._ctx.get_logits_ith(-1), (peer.n_vocab(),)).copy()


def _greedy(peer: Any, name: str, text: str) -> dict[str, Any]:
    prompt = peer.tokenize(text.encode(), add_bos=False, special=True)
    peer.reset()
    peer.eval(prompt)
    first = last_logits(peer)
    top = np.argsort(-first, kind="stable")[:NUM_TOP_LOGITS]
    shown = sorted({*top.tolist(), *SPREAD_IDS})
    generated, margins, logits = [], [], first
    for _ in range(NUM_GENERATED):
        best = np.sort(logits)[-2:]
        margins.append(float(best[1] - best[0]))
        generated.append(int(logits.argmax()))
        peer.eval(generated[-1:])
        logits = last_logits(peer)
    return {
        "name": name,
        "prompt_ids": prompt,
        "greedy_ids": generated,
        "smallest_margin": round(min(margins), 5),
        "first_logits": {str(token): round(float(first[token]), 4) for token in shown},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    texts = [(f"raw {index}", text) for index, text in enumerate(RAW)]
    texts += [
        (
            f"chat {index}",
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
            f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
        )
        for index, text in enumerate(CHAT)
    ]
    with tempfile.TemporaryDirectory() as folder:
        peer = open_peer(widen(arguments.model, Path(folder) / "f32.gguf"))
        cases = [_greedy(peer, name, text) for name, text in texts]
    digest = hashlib.sha256(arguments.model.read_bytes()).hexdigest()
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)  # one case a line
    arguments.output.write_text(
        f'{{"made_by": "tests/vectors/make_greedy.py", "model_sha256": "{digest}", "cases": [\n{rows}\n]}}\n'
    )


if __name__ == "__main__":
    main()
