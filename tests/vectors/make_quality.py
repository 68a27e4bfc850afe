"""Regenerate quality_smollm2.json: what float32 arithmetic expects at every position of a text.

Runs by hand (half a minute of the reference device, which CI then need not spend on the whole model):

    python -m tests.vectors.make_quality MODEL.gguf tests/vectors/quality_smollm2.json

Of each position the NUM_TOP likeliest next tokens and their log-probabilities: the rest together is one
more outcome. Divergence over so few outcomes is a little less than over all, never more.
"""

import argparse
import json
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ds4.model_file import ModelFile
from ds4.text.tokenizer import Tokenizer
from tests.support.device_driver import DeviceDriver, small_limits
from workers.devices.reference.device import ReferenceDevice
from workers.model.registry import load_program

NUM_TOP: Final = 24
CONTEXT: Final = 256
TEXT: Final = """The lighthouse stood at the end of a long spit of sand, and for most of the year nobody came
near it. In summer there were walkers, and once a week a boat brought bread, oil and the newspapers of
the week before. The keeper read them in the order in which they had been printed, one each morning, so
that his own calendar ran seven days behind that of the mainland. He did not mind. What happened there,
he said, would not have been altered by his hearing of it sooner. He kept a garden in the lee of the
tower, cabbages mostly and a row of beans, and he knew every bird by the hour of its coming. When the fog
closed in he lit the lamp, wound the clockwork that turned it, and sat through the night with a book on
his knees, listening. Ships answered the bell with their horns, far out and then further, until at last
there was only the water again, and the slow click of the gear above his head."""


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of each row."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    model = ModelFile.open(arguments.model)
    ids = Tokenizer.from_model(model).encode(TEXT, add_special=False, parse_special=False)
    limits = small_limits(max_rows=CONTEXT, max_seats=CONTEXT, max_context_tokens=CONTEXT)
    device = ReferenceDevice(load_program(model), limits)
    DeviceDriver(device, limits).score(ids, len(ids))
    logs = log_softmax(device.logits())
    best = np.argsort(-logs, axis=1)[:, :NUM_TOP]
    values = np.take_along_axis(logs, best, axis=1).round(5)
    positions = [
        {"id": token, "best": ids_of, "log_probabilities": values_of}
        for token, ids_of, values_of in zip(ids, best.tolist(), values.tolist(), strict=True)
    ]
    lines = ",\n".join(json.dumps(position, separators=(",", ":")) for position in positions)
    arguments.output.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
