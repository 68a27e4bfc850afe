"""The tests of tests/gpu where there is no GPU: skipped, or an error where one was promised; some are rehearsed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import problem
from tests.workers.kernels.rig import needs_compiler

ROOT = Path(__file__).parents[1]


def collect(promise: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DS4_TEST_GPU": promise}  # noqa: TID251 - how the tests are promised a GPU
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not problem(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("promise", "code", "said"),
    [("", pytest.ExitCode.OK, "no GPU: "), ("1", pytest.ExitCode.USAGE_ERROR, "DS4_TEST_GPU promises a GPU")],
)
def test_a_missing_gpu_is_a_skip_or_an_error(promise: str, code: pytest.ExitCode, said: str) -> None:
    done = collect(promise, "tests/gpu/test_dense.py")
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


@needs_compiler
def test_a_gpu_could_pass_them() -> None:
    """What needs the emulator's strictness, or quietly runs on it, would else show on a GPU first."""
    done = collect("stand-in", "tests/gpu/test_catalogue_rows.py", "tests/gpu/test_dense.py")
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert "skipped" not in done.stdout
