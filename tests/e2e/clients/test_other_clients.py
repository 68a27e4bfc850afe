"""Clients that have an environment of their own, against a real server: litellm, LangChain, npm's.

DS4_TEST_CLIENTS names a folder with `venv` (from requirements.txt) and `node_modules` (from package.json);
`make clients` makes it.
"""

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.support.server import DEADLINE_S, Server

_HERE: Final = Path(__file__).parent
_INSTALLED: Final = Path(os.environ.get("DS4_TEST_CLIENTS", "")).absolute()  # noqa: TID251 - where test data is, no setting
_PYTHON: Final = _INSTALLED / "venv" / "bin" / "python"
# litellm looks for prices elsewhere, langsmith for somebody to tell.
_QUIET: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (_INSTALLED / "node_modules").is_dir() or not _PYTHON.exists(),
        reason="DS4_TEST_CLIENTS names no folder with the clients; `make clients` makes one",
    ),
]


def _run(command: list[str], program: Path) -> None:
    done = subprocess.run(
        command,
        input=program.read_text("utf-8"),
        capture_output=True,
        encoding="utf-8",
        timeout=3 * DEADLINE_S,
        cwd=_INSTALLED,
        env={**os.environ, **_QUIET},  # noqa: TID251 - the children need the rest of it
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("client", ["litellm", "langchain"])
def test_a_python_client_is_served(client: str, tiny_server: Server) -> None:
    _run([str(_PYTHON), "-", tiny_server.url], _HERE / f"program_{client}.py")


@pytest.mark.parametrize("client", ["openai", "ai_sdk"])
def test_a_node_client_is_served(client: str, tiny_server: Server) -> None:
    _run(["node", "--input-type=module", "-", tiny_server.url], _HERE / f"program_{client}.mjs")
