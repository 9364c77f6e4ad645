"""Register the hooks of the emulated CUDA before torch asks for them, which is once, while torch is imported."""

from __future__ import annotations

import ctypes
import sys

from emulation import setting
from emulation.build import build, torch_folder

DEVICES = setting("DEVICES", 2)
PROTECT = setting("PROTECT", 1)
LIMIT = setting("LIMIT", 0)


def register() -> None:
    """Load torch's libraries and the extension, and let the extension install itself."""
    if "torch" in sys.modules:
        raise RuntimeError("the emulated CUDA must be there before torch is imported")
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    extension = ctypes.CDLL(str(build("cuda")), mode=ctypes.RTLD_GLOBAL)
    extension.emu_install(DEVICES, PROTECT, ctypes.c_ulong(LIMIT))
