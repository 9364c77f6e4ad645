"""Start the emulated device with Python, so that ranks, workers and killed children have it too."""

import os
import sys

if os.environ.get("ZAE_EMULATED_DEVICE"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    import emulation

    emulation.start(os.environ["ZAE_EMULATED_DEVICE"])
