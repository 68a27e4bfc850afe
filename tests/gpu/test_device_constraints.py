"""Constrained rows on the GPU."""

from tests.gpu.again import take
from tests.workers.devices.cuda import test_device_constraints

take(test_device_constraints, globals())
