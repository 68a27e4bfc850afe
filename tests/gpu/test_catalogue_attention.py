"""Kernels on the GPU, against the NumPy reference."""

from tests.gpu.again import take
from tests.workers.kernels import test_catalogue_attention

take(test_catalogue_attention, globals())
