"""CUDA kernels on the CPU, for tests: the same sources through the same launch call."""
