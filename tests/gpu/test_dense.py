"""Large prompt chunks through cuBLAS."""

from tests.gpu.again import take
from tests.workers.devices.cuda import test_dense

take(test_dense, globals())
