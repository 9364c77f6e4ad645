"""What lies in on_device/ needs a device: on a machine without one, a process with the emulated device runs it."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("ZAE_EMULATED_DEVICE") else ["on_device/*"]
