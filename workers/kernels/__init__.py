"""CUDA sources and what Python must know of them: entry points, parameters, launch shapes.

Owns: `*.cu`, `*.cuh` and their names. Runs in: the worker, below every device; imports no GPU library.
`sources` reads them, `catalogue` says which kernel does what with which grid.
"""
