"""GGUF architecture name to the module that builds its program.

Owns: the list of architectures we run. Runs in: the worker, at load.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from ds4.model_file import ModelFile
from workers.model import llama
from workers.model.program import Program

ARCHITECTURES: Final[Mapping[str, Callable[[ModelFile], Program]]] = MappingProxyType({"llama": llama.build})


def load_program(model: ModelFile) -> Program:
    """The program of `model`. Raises ModelFileError for an unknown architecture or a broken file."""
    build = ARCHITECTURES.get(model.architecture)
    if build is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise model.fault(f"the architecture {model.architecture!r} is not supported; known: {known}")
    return build(model)
