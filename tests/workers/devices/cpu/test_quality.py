"""What 8-bit activations cost on the real model: divergence from float32 arithmetic on the same file.

The float32 side is a recording of the reference device (`tests/vectors/make_quality.py`), which has its own
tests on the whole model.
"""

import json
from pathlib import Path
from typing import Final

import numpy as np
import pytest

pytest.importorskip("numba", reason="the CPU engine needs numba")

from ds4.model_file import ModelFile
from tests.support.device_driver import DeviceDriver, small_limits
from tests.support.embedded_model import embedded_model
from tests.vectors.make_quality import CONTEXT, log_softmax
from workers.devices.cpu.device import CpuDevice
from workers.model.registry import load_program

VECTORS: Final = Path(__file__).parents[3] / "vectors" / "quality_smollm2.json"
# Measured: 0.0023 and 98.1 %. Weights or activations with one bit less would about quadruple the first.
MAX_DIVERGENCE, MIN_AGREEMENT = 0.0035, 0.95


def with_rest(logs: np.ndarray) -> np.ndarray:
    """Log-probabilities [n, k] and, as one more outcome, that of everything else."""
    rest = np.log(np.maximum(1 - np.exp(logs).sum(axis=1, keepdims=True), 1e-9))
    return np.concatenate([logs, rest], axis=1)


def test_the_distribution_is_as_close_to_float32_as_the_peers() -> None:
    positions = json.loads(VECTORS.read_text())
    ids = [position["id"] for position in positions]
    best = np.array([position["best"] for position in positions])
    limits = small_limits(max_rows=CONTEXT, max_seats=CONTEXT, max_context_tokens=CONTEXT)
    device = CpuDevice(load_program(ModelFile.open(embedded_model())), limits)
    DeviceDriver(device, limits).score(ids, len(ids))
    logits = device.logits()
    ours = with_rest(np.take_along_axis(log_softmax(logits), best, axis=1))
    truth = with_rest(np.array([position["log_probabilities"] for position in positions]))
    divergence = (np.exp(truth) * (truth - ours)).sum(axis=1).mean()
    assert divergence < MAX_DIVERGENCE
    assert (best[:, 0] == logits.argmax(axis=1)).mean() > MIN_AGREEMENT
    device.close()
