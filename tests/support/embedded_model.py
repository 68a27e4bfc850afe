"""The real embedded model for tests, from the user's cache; never downloaded by a test.

Runs in: tests. `make test` fetches the model first; without it the tests that need it are skipped
and say so.
"""

from pathlib import Path

import pytest

from ds4.config import DEFAULT_MODEL
from ds4.models import find_cached


def embedded_model() -> Path:
    """The file's path; skips the calling test where it has not been fetched."""
    path = find_cached(DEFAULT_MODEL)
    if path is None:
        pytest.skip(f"the model {DEFAULT_MODEL} has not been fetched; `make test` fetches it")
    return path
