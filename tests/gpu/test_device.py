"""The device on the GPU: against the reference, and the promises of the device seam."""

from tests.gpu.again import take
from tests.workers.devices.cuda import test_device

take(
    test_device,
    globals(),
    without=(
        "test_the_order_of_threads_changes_no_bit",
        "test_nothing_is_allocated_once_it_is_loaded",
        "test_the_memory_it_takes_is_what_was_planned",
        "test_a_shape_without_kernels_is_refused_by_name",
    ),
)
