"""The worker with the emulator in the GPU's place: `python -m tests.support.emulated_worker [flags]`.

Runs in: tests. The product offers no emulator as a device; here the one function that opens the GPU is
replaced before the real worker starts, and everything else is the product's.
"""

import sys

from workers.devices.cuda import opening
from workers.devices.emulator.backend import EmulatorBackend
from workers.main import main

if __name__ == "__main__":
    opening.open_gpu = EmulatorBackend
    sys.exit(main([*sys.argv[1:], "--device", "cuda"]))
