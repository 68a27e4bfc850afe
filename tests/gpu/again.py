"""Taking another module's tests, to run them with another backend.

Runs in: tests. The backend is chosen in one place, `tests.workers.kernels.rig.make_backend`; `conftest` replaces it.
"""

from types import ModuleType
from typing import Any


def take(module: ModuleType, into: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    """Bring the tests and fixtures of `module`, but not its marks, into the namespace `into`.

    `without` are tests about the emulator itself.
    """
    known = set(vars(module))
    assert set(without) <= known, "a test was renamed"
    for name, value in vars(module).items():
        is_fixture = type(value).__name__ == "FixtureFunctionDefinition"
        if (name.startswith("test_") or is_fixture) and name not in without:
            into[name] = value
