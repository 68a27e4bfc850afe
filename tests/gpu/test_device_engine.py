"""The engine one step ahead of the GPU."""

from tests.gpu.again import take
from tests.workers.devices.cuda import test_device_engine

take(test_device_engine, globals())
