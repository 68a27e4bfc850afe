"""Drawing one token per row from logits: parameters per seat, one file per feature.

Runs in the worker, inside a device. `interface` says what goes in and out, `sampler.HostSampler` is
the NumPy implementation that the reference and CPU devices share and the oracle of every other.
"""
