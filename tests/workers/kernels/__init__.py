"""Tests of the CUDA kernels, run by the emulator (and by a GPU where one is at hand)."""
