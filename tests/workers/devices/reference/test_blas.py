"""The number of BLAS threads."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from workers.devices.reference.blas import set_threads


def test_the_number_of_threads_is_set_where_numpy_brings_openblas() -> None:
    libraries = sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas*"))
    if not libraries:
        assert not set_threads(1)
        pytest.skip("this NumPy brings no OpenBLAS")
    threads = ctypes.CDLL(str(libraries[0])).scipy_openblas_get_num_threads64_
    before = threads()
    try:
        assert set_threads(1)
        assert threads() == 1
    finally:
        set_threads(before)
