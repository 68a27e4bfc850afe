"""Models and servers that several end-to-end tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, serving
from tests.support.tiny_model import TinyShape, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a context long enough for streams that last."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_model(path, shape=TinyShape(max_context_tokens=16_384))


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path) -> Iterator[Server]:
    """A server that tests of one module share and leave as they found it."""
    with serving(tiny_model, "--front-ends", "2", "--device", "reference") as server:
        yield server
