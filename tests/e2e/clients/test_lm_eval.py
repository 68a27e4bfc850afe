"""lm-eval's `local-completions` against a real server: its figures are those of the reference device.

DS4_TEST_LM_EVAL names a Python that has `lm_eval[api]`, which is too heavy for the other clients' environment.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from ds4.model_file import ModelFile
from ds4.text.tokenizer import Tokenizer
from tests.support.device_driver import DeviceDriver, small_limits
from tests.support.server import DEADLINE_S, Server
from workers.devices.reference.device import ReferenceDevice
from workers.model.registry import load_program

_PYTHON: Final = Path(os.environ.get("DS4_TEST_LM_EVAL", ""))  # noqa: TID251 - where test data is, no setting
_MAX_TOKENS: Final = 128

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not _PYTHON.is_file(), reason="DS4_TEST_LM_EVAL names no Python with lm_eval"),
]

_QUESTIONS: Final[list[dict[str, Any]]] = [
    {
        "question": "The capital of France is",
        "choices": ["Paris", "London", "a very large fish"],
        "answer": 0,
    },
    {"question": "Water is made of hydrogen and", "choices": ["gold", "oxygen"], "answer": 1},
    {"question": "Zwölf Boxkämpfer jagen", "choices": ["Viktor über den Deich", "nobody", "é"], "answer": 0},
    {"question": "2 + 2 =", "choices": ["3", "4", "5", "22"], "answer": 1},
]
_CHOICE: Final = """task: ds4_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
_LIKELIHOOD: Final = """task: ds4_likelihood
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{choices[0]}}}}, and this goes on: {{{{question}}}}"
metric_list: [{{metric: acc}}]
"""


def _evaluated(url: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of both tasks as lm-eval logs them."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in _QUESTIONS))
    for name, task in (("choice", _CHOICE), ("likelihood", _LIKELIHOOD)):
        (folder / f"{name}.yaml").write_text(task.format(data=data))
    arguments = (
        f"base_url={url}/v1/completions,model=m,num_concurrent=4,max_retries=1,max_length={_MAX_TOKENS}"
    )
    command = [str(_PYTHON), "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "ds4_choice,ds4_likelihood", "--include_path", str(folder), "--log_samples"]
    done = subprocess.run(
        [*command, "--output_path", str(folder / "out")],
        capture_output=True,
        encoding="utf-8",
        timeout=3 * DEADLINE_S,
        cwd=folder,
        # What is cached of data sets stays in the test's folder, and nothing is looked for elsewhere.
        env={**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"},  # noqa: TID251 - the child's
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    samples: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("out/**/samples_*.jsonl")):
        name = "choice" if "ds4_choice" in path.name else "likelihood"
        samples[name] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return samples


class _Reference:
    """Log-likelihoods straight from the logits of the reference device."""

    def __init__(self, model: Path) -> None:
        file = ModelFile.open(model)
        self._tokenizer = Tokenizer.from_model(file)
        limits = small_limits(
            max_rows=_MAX_TOKENS, max_seats=_MAX_TOKENS, max_context_tokens=_MAX_TOKENS, spare_pages=0
        )
        self._device = ReferenceDevice(load_program(file), limits)
        self._driver = DeviceDriver(self._device, limits)

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """The sum over the continuation's tokens, and whether each is the likeliest."""
        spaces = len(context) - len(context.rstrip())  # lm-eval moves them to the continuation
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole = self._tokenizer.encode(context + continuation, add_special=False, parse_special=True)
        start = len(self._tokenizer.encode(context, add_special=False, parse_special=True))
        self._driver.score(whole, len(whole))
        logits = np.array(self._device.logits(), np.float64)[start - 1 : -1]
        logits -= logits.max(axis=1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        ids = np.array(whole[start:])
        return float(logprobs[np.arange(len(ids)), ids].sum()), bool((logits.argmax(axis=1) == ids).all())


def compared(url: str, model: Path, folder: Path) -> tuple[int, float]:
    """How many log-likelihoods lm-eval had, and how far the farthest is from the reference's."""
    reference, differences = _Reference(model), []
    samples = _evaluated(url, folder)
    assert {name: len(each) for name, each in samples.items()} == dict.fromkeys(samples, len(_QUESTIONS))
    assert samples.keys() == {"choice", "likelihood"}
    for sample in [*samples["choice"], *samples["likelihood"]]:
        requests = sample["arguments"]
        pairs = requests.values() if isinstance(requests, dict) else requests
        expected = []
        for pair in pairs:
            context, continuation = pair.values() if isinstance(pair, dict) else pair
            expected.append(reference.loglikelihood(context, continuation))
        found = [(float(value), str(greedy) == "True") for value, greedy in sample["filtered_resps"]]
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        differences += [abs(value - other) for (value, _), (other, _) in zip(found, expected, strict=True)]
        if "acc" in sample and "choices" in sample["doc"] and len(found) > 1:
            best = max(range(len(expected)), key=lambda index: expected[index][0])
            assert sample["acc"] == float(best == sample["doc"]["answer"])
    return len(differences), max(differences)


def test_log_likelihoods_are_those_of_the_reference_device(
    tiny_server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    num_compared, largest = compared(tiny_server.url, tiny_model, tmp_path)
    assert num_compared == sum(len(each["choices"]) for each in _QUESTIONS) + len(_QUESTIONS)
    assert largest < 1e-3
