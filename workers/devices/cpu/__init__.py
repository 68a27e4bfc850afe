"""The CPU engine: a whole step in one machine-code function made by Numba, on every thread.

`device.py` is the only module that other packages import. Numba itself is imported only when the
machine code has to be made (`build.py` and the modules that it imports); later starts load the
cached object file.
"""
