"""Pytest plugin: the emulator compiles kernels with counters. See `coverage`.

Owns: nothing. Runs in: the pytest process that `coverage` starts, before any test.
"""

from workers.devices.emulator import compiler


def pytest_configure() -> None:
    """Change the flags; the cache folder is a fresh one, so nothing compiled without them is found."""
    compiler.FLAGS += ("--coverage",)
