"""How far a device's logits lie from the model's: KL against float32, beside llama.cpp's own figure.

Runs by hand, like make_greedy.py, which it borrows from:

    python -m tests.vectors.measure_kl MODEL.gguf TEXT.txt ... --device cpu --positions 2040

Truth is llama.cpp on the same weights widened to float32, with a float32 KV cache; both quantised engines
keep a float16 one. Positions of one text vary far more than engines do, so the two are compared position by
position: the mean difference, and its 95 % interval by bootstrap over runs of neighbouring positions (which
share their past). An interval that holds 0 shows no difference.
"""

import argparse
import importlib
import tempfile
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

from ds4.model_file import ModelFile
from tests.support.device_driver import DeviceDriver, small_limits
from tests.vectors.make_greedy import open_peer, widen
from workers.devices.interface import PAGE_TOKENS, Limits
from workers.devices.reference.device import ReferenceDevice
from workers.model.registry import load_program

WINDOW: Final = 255
RUN: Final = 15  # neighbouring positions that the bootstrap draws together

Logits = NDArray[np.float32]


def _peer_logits(peer: Any, windows: list[list[int]]) -> list[Logits]:
    out = []
    for window in windows:
        peer.reset()
        peer.eval(window)
        out.append(np.array(peer.scores[: len(window)], np.float32))
    return out


def _device_logits(device: Any, limits: Limits, windows: list[list[int]]) -> list[Logits]:
    driver, out = DeviceDriver(device, limits), []
    for window in windows:
        driver.score(window, len(window))
        out.append(np.array(device.logits(), np.float32))
    return out


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


def _report(name: str, truth: list[Logits], other: list[Logits]) -> NDArray[np.float64]:
    """Print the divergence from `truth`; returns it, [positions]."""
    divergences, same = [], []
    for true_logits, logits in zip(truth, other, strict=True):
        p, q = _log_softmax(true_logits), _log_softmax(logits)
        divergences.append((np.exp(p) * (p - q)).sum(axis=1))
        same.append(true_logits.argmax(axis=1) == logits.argmax(axis=1))
    kl, top = np.concatenate(divergences), np.concatenate(same)
    print(
        f"{name}: KL {kl.mean():.3g}, largest {kl.max():.3g}, same best token {top.mean():.2%} of {len(kl)}"
    )
    return kl


def _compare(ours: NDArray[np.float64], peers: NDArray[np.float64]) -> None:
    """Print our mean divergence less the peer's, with its interval."""
    differences = ours - peers
    runs = [differences[start : start + RUN].mean() for start in range(0, len(differences) - RUN + 1, RUN)]
    drawn = np.random.default_rng(0).integers(0, len(runs), (10_000, len(runs)))
    low, high = np.quantile(np.array(runs)[drawn].mean(axis=1), (0.025, 0.975))
    print(f"ours less llama.cpp's: {differences.mean():+.2g}, 95 % within {low:+.2g} .. {high:+.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--device", choices=("reference", "cpu"), default="reference")
    parser.add_argument("--positions", type=int, default=2040, help="of each text")
    arguments = parser.parse_args()
    quantised = open_peer(arguments.model, kv_type=gguf.GGMLQuantizationType.F16, logits_all=True)
    windows = []
    for text in arguments.texts:
        ids = quantised.tokenize(text.read_bytes(), add_bos=False, special=False)[: arguments.positions]
        windows += [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    peer = _peer_logits(quantised, windows)
    with tempfile.TemporaryDirectory() as folder:
        truth = _peer_logits(
            open_peer(widen(arguments.model, Path(folder) / "f32.gguf"), logits_all=True), windows
        )
    peers = _report("llama.cpp, file as it is", truth, peer)
    limits = small_limits(
        max_rows=WINDOW + 1, max_seats=WINDOW + 1, max_context_tokens=-(-WINDOW // PAGE_TOKENS) * PAGE_TOKENS
    )
    program = load_program(ModelFile.open(arguments.model))
    if arguments.device == "reference":
        device: Any = ReferenceDevice(program, limits)
    else:
        device = importlib.import_module("workers.devices.cpu.device").CpuDevice(program, limits, threads=1)
    ours = _report(f"our {device.name} device", truth, _device_logits(device, limits, windows))
    _compare(ours, peers)


if __name__ == "__main__":
    main()
