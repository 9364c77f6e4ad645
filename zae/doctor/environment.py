"""Look at this machine: versions, devices, and what of its disk and limits would break a run.

Nothing is changed, but for a file that is written in the folder and removed.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import zae
from zae.display.text import format_size
from zae.errors import printable

__all__ = ["Finding", "examine", "table_of"]

_LEAST = 10**9  # Bytes of a disk; a checkpoint of a middling model.
_LEAST_SHARED = 256 << 20  # Bytes of shared memory; a container has 64 MB by default.
_LEAST_FILES = 1024
_VARIABLES = ("CUBLAS_", "CUDA_", "GLOO_", "MASTER_", "MKL_", "NCCL_", "NVIDIA_TF32", "OMP_", "PYTORCH_", "TORCH")
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TMPDIR")


class Finding(NamedTuple):
    """What is wrong, and what to do."""

    found: str
    remedy: str


def examine(folder: Path) -> dict[str, Any]:
    """Run all checks, for runs that are started in a folder."""
    facts: dict[str, str] = {}
    findings = [each for check in (_torch, _disk, _limits) for each in check(facts, folder)]
    names = [name for name in sorted(os.environ) if name.startswith(_VARIABLES) or name in _OF_RANKS]
    return {
        "healthy": not findings,
        "facts": facts,
        "variables": {name: os.environ[name] for name in names},
        "findings": [each._asdict() for each in findings],
    }


def table_of(report: Mapping[str, Any]) -> str:
    """Format the report for a terminal."""
    rows = [*report["facts"].items(), *report["variables"].items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows] + [""]
    for each in report["findings"]:
        lines += [f"FAULT: {each['found']}", f"-> {each['remedy']}"]
    lines += [] if report["findings"] else ["nothing is wrong"]
    return "\n".join(printable(line, kept="") for line in lines) + "\n"


def _torch(facts: dict[str, str], folder: Path) -> Iterator[Finding]:
    """Describe the versions and the devices, and compute on each device once."""
    import torch

    facts["python"] = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    facts["zae"] = f"{zae.__version__} in {Path(__file__).parents[2]}"
    build = torch.version.cuda or getattr(torch.version, "hip", None)
    facts["torch"] = f"{torch.__version__}, {f'built for CUDA {build}' if build else 'without CUDA'}"
    facts["processors"] = f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    said = f": {str(caught[0].message).splitlines()[0]}" if caught else ""
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if has_driver and not build:
        yield Finding(
            "there is an NVIDIA driver, and this torch is built without CUDA",
            "install torch for CUDA: https://pytorch.org/get-started/locally",
        )
    elif has_driver and not count:
        yield Finding(
            f"torch for CUDA {build} finds no device{said}",
            f"look at CUDA_VISIBLE_DEVICES, update the driver to one for CUDA {build}, or install another torch",
        )
    for index in range(count):
        facts[f"cuda:{index}"] = torch.cuda.get_device_name(index)
        try:
            torch.ones(2, device=f"cuda:{index}").sum().item()
        except Exception as error:
            yield Finding(
                f"cuda:{index} does not compute: {str(error).splitlines()[0]}",
                "install a torch that is built for it, or leave it out: CUDA_VISIBLE_DEVICES",
            )


def _disk(facts: dict[str, str], folder: Path) -> Iterator[Finding]:
    """Write a file as checkpoints are written, and look at what is free."""
    yield from _writing(folder)
    space = "free some space, or start elsewhere"
    memory = "start the container with --shm-size=1g, or loaders with num_workers=0: workers use it"
    for what, place, least, remedy in (
        ("disk", folder, _LEAST, space),
        ("shared memory", Path("/dev/shm"), _LEAST_SHARED, memory),
    ):
        if place.is_dir():
            free = shutil.disk_usage(place).free
            facts[what] = f"{format_size(free)} free in {place}"
            if free < least:
                yield Finding(f"{format_size(free)} free in {place}, and {format_size(least)} are advised", remedy)


def _writing(folder: Path) -> Iterator[Finding]:
    """Write, sync, rename over another file, and remove."""
    doing = "write to it"
    try:
        with tempfile.TemporaryDirectory(prefix=".zae-doctor-", dir=folder) as made:
            first, second = Path(made, "first"), Path(made, "second")
            second.write_bytes(b"old")
            with open(first, "wb") as file:
                file.write(b"new" * 100_000)
                file.flush()
                doing = "sync a file (fsync), so that a checkpoint may be lost with the power"
                os.fsync(file.fileno())
            doing = "rename a file over another one, so that checkpoints cannot be replaced"
            os.replace(first, second)
            if first.exists() or second.stat().st_size != 300_000:
                raise OSError(None, "the file is not as it was written")
            doing = "remove a folder"
    except OSError as error:
        yield Finding(
            f"{folder}: a process cannot {doing} ({error.strerror or error})",
            "start in another folder, or give a save_path on another disk",
        )


def _limits(facts: dict[str, str], folder: Path) -> Iterator[Finding]:
    """Look at the limits of this process."""
    try:
        import resource
    except ImportError:  # Windows has none.
        return
    files, size = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE))
    unlimited = resource.RLIM_INFINITY
    facts["open files"] = "unlimited" if files == unlimited else str(files)
    if files != unlimited and files < _LEAST_FILES:
        yield Finding(
            f"a process may open {files} files, and {_LEAST_FILES} are advised: workers share batches as files",
            "ulimit -n 4096",
        )
    if size != unlimited:
        yield Finding(
            f"a file may have {format_size(size)} at most: a larger checkpoint is not saved", "ulimit -f unlimited"
        )
