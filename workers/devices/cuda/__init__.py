"""The CUDA engine: a program becomes a sequence of launches of our own kernels."""
