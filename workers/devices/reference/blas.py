"""The number of threads of NumPy's BLAS, which NumPy itself cannot set.

Owns: nothing; the setting is the whole process's. Runs in: the worker, at load. Source: OpenBLAS's
`openblas_set_num_threads` under the name that NumPy's wheels give it.
"""

import ctypes
from pathlib import Path
from typing import Final

import numpy as np

_SYMBOL: Final = "scipy_openblas_set_num_threads64_"


def set_threads(count: int) -> bool:
    """Use `count` threads from now on; False where NumPy was built with another BLAS (nothing changes)."""
    folder = Path(np.__file__).parents[1] / "numpy.libs"
    for library in sorted(folder.glob("libscipy_openblas*")):
        try:
            function = getattr(ctypes.CDLL(str(library)), _SYMBOL)
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [ctypes.c_int], None
        function(count)
        return True
    return False
