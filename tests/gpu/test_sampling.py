"""The sampling kernels on the GPU, against the host's sampler."""

from tests.gpu.again import take
from tests.workers.devices.cuda import test_sampling

take(
    test_sampling,
    globals(),
    without=("test_the_order_of_threads_changes_nothing", "test_its_memory_is_what_it_says"),
)
