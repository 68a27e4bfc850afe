"""Checking a launch's arguments against the kernel's declared parameters.

Owns: the conversion, shared by every backend. Runs in: the worker, once per launch (never per token in
a captured graph). Source: this project. CUDA itself checks nothing: a Python float passed for a
`float` would arrive as half of a double.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from workers.devices.cuda.backend import Argument, DeviceArray, Kernel
from workers.kernels.sources import ParameterKind, parameters

Cell = DeviceArray | np.generic | None
_SCALARS: Final[dict[ParameterKind, type[np.int32] | type[np.uint32] | type[np.uint64]]] = {
    ParameterKind.INT32: np.int32,
    ParameterKind.UINT32: np.uint32,
    ParameterKind.UINT64: np.uint64,
}


def convert(kernel: Kernel, arguments: Sequence[Argument]) -> list[Cell]:
    """The arguments as typed scalars and arrays. Raises TypeError naming the first that does not match."""
    declared = parameters(kernel.source).get(kernel.entry)
    if declared is None:
        raise TypeError(f"{kernel.source} has no kernel {kernel.entry}")
    if len(declared) != len(arguments):
        raise TypeError(f"{kernel.entry} has {len(declared)} parameters, {len(arguments)} were given")
    cells: list[Cell] = []
    for index, (kind, value) in enumerate(zip(declared, arguments, strict=True)):
        if kind is ParameterKind.POINTER:
            if value is not None and not hasattr(value, "part"):
                raise TypeError(
                    f"{kernel.entry}: argument {index} must be a device array, not {type(value).__name__}"
                )
            cells.append(value)  # type: ignore[arg-type]
        elif kind is ParameterKind.FLOAT32:
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"{kernel.entry}: argument {index} must be a number, not {value!r}")
            cells.append(np.float32(value))
        else:
            scalar = _SCALARS[kind]
            limits = np.iinfo(scalar)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not whole or not limits.min <= value <= limits.max:  # type: ignore[operator]
                raise TypeError(f"{kernel.entry}: argument {index} = {value!r} is no {limits.dtype}")
            cells.append(scalar(value))  # type: ignore[arg-type]
    return cells
