"""Build the emulated device with the C++ compiler of the machine, once for each version of torch and of the source."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name("accelerator.cpp")
KINDS = ("cuda", "sim")
"""An emulated CUDA, and an accelerator that torch has no name for (its PrivateUse1)."""


def torch_folder() -> Path:
    """Return the folder of torch, without importing torch: the emulated CUDA has to be there before that."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def compiler() -> str | None:
    """Return the path of the C++ compiler, or None where the machine has none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build(kind: str) -> Path:
    """Return the extension of a kind, after building it if it is not in the cache (about 30 s)."""
    folder = _cache() / _key(kind)
    target = folder / f"emulated_{kind}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Two processes of a test run would build the same file.
        if not target.exists():
            _compile(kind, target)
    return target


def _cache() -> Path:
    """Return the folder of built extensions, outside of any virtual environment."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:  # An account without a home folder.
        home = Path("/var/tmp")
    return (home if os.access(home, os.W_OK) else Path("/var/tmp")) / "zae-emulated-device"


def _key(kind: str) -> str:
    """Name what a build depends on: torch, Python and the source."""
    parts = (
        importlib.metadata.version("torch"),
        sysconfig.get_config_var("SOABI"),
        SOURCE.read_text(),
        Path(__file__).read_text(),
    )
    return f"{kind}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}"


def _compile(kind: str, target: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError(
            "there is no C++ compiler (g++, or what CXX names), and the emulated device is built with one"
        )
    half = target.with_suffix(".half")
    headers = torch_folder() / "include"
    includes = [headers, headers / "torch/csrc/api/include", sysconfig.get_path("include")]
    flags = ["-shared", "-fPIC", "-std=c++20", "-O1", "-w", f"-DTORCH_EXTENSION_NAME=emulated_{kind}"]
    flags += ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    flags += ["-DEMU_CUDA"] if kind == "cuda" else []
    libraries = [f"-L{torch_folder() / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    command = [found, *flags, *(f"-isystem{folder}" for folder in includes), str(SOURCE), "-o", str(half), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulated device does not build with this torch:\n{done.stderr[-4000:]}")
    half.rename(target)


if __name__ == "__main__":
    for each in sys.argv[1:] or KINDS:
        print(build(each))
