"""Large prompt chunks through cuBLAS."""

from tests.gpu.again import take
from tests.workers.devices.cuda import test_dense

take(
    test_dense,
    globals(),
    without=(
        "test_copies_that_are_kept_give_the_same_bits_and_are_made_once",
        "test_a_gpu_without_the_library_uses_its_own_kernels",
        "test_what_is_bfloat16_already_is_neither_copied_nor_brought_to_it",
    ),
)
