"""The tests of the CUDA kernels and of the device once more, on a GPU. Skipped with the reason without one."""
