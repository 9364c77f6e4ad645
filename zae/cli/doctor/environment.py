"""Look for what would break or change a run on this machine: packages, devices, variables of ranks, disk, limits.

Each check yields what it has found, with a remedy. A fault breaks a run, or is certainly not meant; a note may
be meant. Nothing is changed, but for a file that is written in the folder and removed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from zae.display.text import format_size
from zae.errors import did_you_mean, printable

__all__ = ["Finding", "examine", "table_of"]

_LEAST = 10**9  # Bytes of a disk; a checkpoint of a middling model.
_LEAST_SHARED = 256 << 20  # Bytes of shared memory; a container has 64 MB by default.
_LEAST_FILES = 1024


class Finding(NamedTuple):
    """What is wrong, and what to do; a note is not certainly wrong."""

    check: str
    found: str
    remedy: str
    is_fault: bool = True


_MEANINGS = {
    "CUBLAS_WORKSPACE_CONFIG": "with :4096:8 or :16:8 cuBLAS computes the same bits in each run",
    "CUDA_DEVICE_ORDER": "the order of the devices",
    "CUDA_LAUNCH_BLOCKING": "waits for each kernel",
    "CUDA_VISIBLE_DEVICES": "the devices that torch sees",
    "GLOO_SOCKET_IFNAME": "the network interface of ranks on the CPU",
    "LOCAL_RANK": "the number of this process on its host, set by torchrun",
    "LOCAL_WORLD_SIZE": "the processes of this host, set by torchrun",
    "MASTER_ADDR": "the host where the ranks meet",
    "MASTER_PORT": "the port where the ranks meet",
    "MKL_NUM_THREADS": "threads of MKL in each process",
    "NCCL_ASYNC_ERROR_HANDLING": "the former name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "the former name of TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DEBUG": "what NCCL prints",
    "NCCL_IB_DISABLE": "no InfiniBand between hosts",
    "NCCL_P2P_DISABLE": "no direct transfer between devices",
    "NCCL_SHM_DISABLE": "no shared memory between processes",
    "NCCL_SOCKET_IFNAME": "the network interfaces of ranks on devices",
    "NO_COLOR": "no colours in a terminal",
    "NVIDIA_TF32_OVERRIDE": "0 forbids TF32 in all libraries, whatever the script says",
    "OMP_NUM_THREADS": "threads of each process",
    "PYTHONOPTIMIZE": "leaves out assert statements",
    "PYTORCH_ALLOC_CONF": "how torch allocates memory of a device",
    "PYTORCH_CUDA_ALLOC_CONF": "how torch allocates memory of a device",
    "RANK": "the number of this process, set by torchrun",
    "TMPDIR": "where temporary files are",
    "TOKENIZERS_PARALLELISM": "threads of Hugging Face's tokenizers",
    "TORCHDYNAMO_DISABLE": "torch.compile compiles nothing",
    "TORCH_DISTRIBUTED_DEBUG": "checks of collective calls",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "torch.load executes what is in a file",
    "TORCH_LOGS": "what torch.compile prints",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "ends a process whose collective call failed",
    "TORCH_NCCL_BLOCKING_WAIT": "waits for collective calls of NCCL, with a time limit",
    "WANDB_MODE": "whether W&B sends records to its server",
    "WORLD_SIZE": "how many processes train, set by torchrun",
}
"""What is shown where it is set; a name that is nearly one of these is a misspelt one."""

_COUNT = r"\d+", "a whole number"
_VALUES = {
    "CUBLAS_WORKSPACE_CONFIG": (r"(:\d+:\d+)+", ":4096:8 or :16:8"),
    "CUDA_DEVICE_ORDER": (r"FASTEST_FIRST|PCI_BUS_ID", "PCI_BUS_ID or FASTEST_FIRST"),
    "LOCAL_RANK": _COUNT,
    "MASTER_PORT": _COUNT,
    "MKL_NUM_THREADS": (r"[1-9]\d*", "a number of threads"),
    "NCCL_DEBUG": (r"(?i)version|warn|info|trace|abort", "WARN or INFO"),
    "OMP_NUM_THREADS": (r"[1-9]\d*(,[1-9]\d*)*", "a number of threads"),
    "RANK": _COUNT,
    "TORCH_DISTRIBUTED_DEBUG": (r"OFF|INFO|DETAIL", "OFF, INFO or DETAIL; with anything else torch is not imported"),
    "WANDB_MODE": (r"online|offline|disabled|shared|dryrun", "online, offline or disabled"),
    "WORLD_SIZE": (r"[1-9]\d*", "a number of processes"),
}
"""What the value of a variable has to be."""


def examine(folder: Path) -> dict[str, Any]:
    """Run all checks, for runs that are started in a folder; healthy is one without a fault."""
    facts: dict[str, str] = {}
    findings = [each for check in _CHECKS for each in check(facts, folder)]
    shown = {name: f"{os.environ[name]} ({text})" for name, text in _MEANINGS.items() if name in os.environ}
    found = [each._asdict() for each in sorted(findings, key=lambda each: not each.is_fault)]
    return {"healthy": not any(each.is_fault for each in findings), "facts": facts, "variables": shown,
            "findings": found}  # fmt: skip


def table_of(report: Mapping[str, Any]) -> str:
    """Format the report for a terminal."""
    rows = [*report["facts"].items(), *report["variables"].items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows] + [""]
    for each in report["findings"]:
        lines += [f"{'FAULT' if each['is_fault'] else 'note'}: {each['found']}", f"-> {each['remedy']}"]
    lines += [] if report["findings"] else ["nothing is wrong"]
    return "\n".join(printable(line, kept="") for line in lines) + "\n"


# ---------------------------------------------------------------------------------------------------------- packages


def _packages(facts: dict[str, str], folder: Path) -> Iterator[Finding]:
    """Compare the installed packages with what zae requires, and what its extras need."""
    facts["python"] = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    try:
        distribution = metadata.distribution("zae")
    except metadata.PackageNotFoundError:
        yield Finding("packages", "zae is not installed, only its folder is on the path", "pip install -e FOLDER")
        return
    facts["zae"] = f"{distribution.version} in {Path(__file__).parents[2]}"
    needed = distribution.metadata["Requires-Python"] or ""
    if not _satisfies(platform.python_version(), needed):
        yield Finding("packages", f"Python {platform.python_version()} is too old", f"install Python {needed}")
    extras: dict[str, list[str]] = {}
    for line in distribution.requires or []:
        requirement, _, marker = line.partition(";")
        name, limits = re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*\(?([^)]*)\)?\s*", requirement).groups()  # type: ignore[union-attr]
        extra = "".join(re.findall(r'extra == "(\w+)"', marker))
        if name == "zae" or extra in ("bench", "dev", "docs", "examples", "test"):
            continue
        version = _version(name)
        if extra:
            extras.setdefault(extra, []).append(version or "not installed")
        if version is None and not extra:
            yield Finding("packages", f"{name} is not installed", f'pip install "{name}{limits}"')
        elif version is not None and not _satisfies(version, limits):
            why = f"zae[{extra}] needs" if extra else "zae needs"
            yield Finding("packages", f"{name} {version} is installed, and {why} {name}{limits}",
                          f'pip install "{name}{limits}"')  # fmt: skip
    facts["extras"] = ", ".join(f"{name} {' '.join(versions)}" for name, versions in extras.items())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(version: str, limits: str) -> bool:
    """Return whether a version is within limits such as ``>=2.6,<3``; only the numbers of a version count."""
    compare: dict[str, Callable[[Any, Any], bool]] = {
        ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b, "<": lambda a, b: a < b,
    }  # fmt: skip

    def numbers(text: str) -> list[int]:
        release = re.match(r"\d+(\.\d+)*", text.strip())
        return [*map(int, release[0].split(".")), 0, 0, 0][:4] if release else [0] * 4

    parts = re.findall(r"(>=|<=|==|!=|>|<)\s*([\w.]+)", limits)
    return all(compare[sign](numbers(version), numbers(limit)) for sign, limit in parts)


def _shadows(facts: dict[str, str], folder: Path) -> Iterator[Finding]:
    """Find files in the folder that a script there would import in the place of a package."""
    for name in sorted(_shadowing(folder)):
        yield Finding("packages", f"{folder / name} is imported in the place of {name.removesuffix('.py')!r} by "
                      "scripts in this folder", "rename it")  # fmt: skip


def _shadowing(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        known = {"torch", "numpy", "safetensors", "tqdm", *sys.stdlib_module_names} - {"this"}
        found = [each for each in folder.iterdir() if each.name.removesuffix(".py") in known]
        return [each.name for each in found if each.suffix == ".py" or (each / "__init__.py").is_file()]
    return []


# ----------------------------------------------------------------------------------------------- torch and its devices


def _torch(facts: dict[str, str], folder: Path) -> Iterator[Finding]:
    """Import torch, and compare its build with the devices and the driver."""
    if {"torch", "torch.py"} & set(_shadowing(folder)):
        return
    listed = _version("torch")
    try:
        import torch
    except Exception as error:
        text = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        yield Finding("torch", f"import torch fails: {text[0]}", "mend what it says, or install torch again")
        return
    version, build = str(torch.__version__), torch.version.cuda or getattr(torch.version, "hip", None)
    facts["torch"] = f"{version}, {f'built for CUDA {build}' if build else 'without CUDA'}"
    if listed is not None and listed.partition("+")[0] != version.partition("+")[0]:
        yield Finding("torch", f"pip lists torch {listed}, and {version} is imported, from {torch.__file__}",
                      "pip uninstall torch until none is left, and install it once")  # fmt: skip
    facts["processors"] = f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"
    yield from _devices(facts, torch, build)


def _devices(facts: dict[str, str], torch: Any, build: str | None) -> Iterator[Finding]:
    """Compare the build of torch with the driver and with the devices that are asked for, and use each device once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    said = f": {str(caught[0].message).splitlines()[0]}" if caught else ""
    driver, visible = _driver(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if driver is not None:
        facts["driver"] = driver
    wanted = [each for each in (visible or "").split(",") if each.strip() not in ("", "-1")]
    if driver is not None and not build:
        yield Finding("torch", "there is an NVIDIA driver, and this torch is built without CUDA",
                      "install torch for CUDA: https://pytorch.org/get-started/locally")  # fmt: skip
    elif driver is not None and not count and visible not in ("", "-1"):
        yield Finding("torch", f"torch for CUDA {build} finds no device, and the NVIDIA driver is {driver}{said}",
                      f"update the driver to one for CUDA {build}, or install torch for an older CUDA")  # fmt: skip
    elif len(wanted) > count:
        yield Finding("torch", f"CUDA_VISIBLE_DEVICES={visible}, and torch finds {count} of these devices",
                      "name devices that nvidia-smi -L lists, or unset it", is_fault=bool(build))  # fmt: skip
    for index in range(count):
        facts[f"cuda:{index}"] = torch.cuda.get_device_name(index)
        try:
            torch.ones(2, device=f"cuda:{index}").sum().item()
        except Exception as error:
            yield Finding("torch", f"cuda:{index} does not compute: {str(error).splitlines()[0]}",
                          "install a torch that is built for it, or leave it out: CUDA_VISIBLE_DEVICES")  # fmt: skip


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None where there is none."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        return "".join(re.findall(r"Module\s.*?(\d+\.[\d.]+)", text)[:1]) or text.splitlines()[0]
    return None


# ------------------------------------------------------------------------------------------------------------- ranks


def _ranks(facts: dict[str, str], folder: Path) -> Iterator[Finding]:
    """Check the variables that torchrun sets."""
    get = os.environ.get
    rank, world, host, port = (get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    cure = "start the script with torchrun, which sets all of them, or unset it"
    if (rank is None) != (world is None):
        given, absent = ("RANK", "WORLD_SIZE") if world is None else ("WORLD_SIZE", "RANK")
        yield Finding("ranks", f"{given} is set, and {absent} is not: the run would be of one process", cure)
    elif rank is None and (host is not None or port is not None):
        names = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ)
        yield Finding("ranks", f"{names} without RANK and WORLD_SIZE: nothing but init_method='env://' uses that", cure,
                      is_fault=False)  # fmt: skip
    elif rank is not None and (host is None or port is None):
        yield Finding("ranks", "RANK and WORLD_SIZE are set, and MASTER_ADDR and MASTER_PORT are not both", cure)
    if (rank or "").isdigit() and (world or "").isdigit() and int(str(rank)) >= int(str(world)):
        yield Finding("ranks", f"RANK={rank}, and with WORLD_SIZE={world} ranks are 0 to {int(str(world)) - 1}", cure)


# --------------------------------------------------------------------------------------------------- disk and limits


def _disk(facts: dict[str, str], folder: Path) -> Iterator[Finding]:
    """Write a file as checkpoints are written, and look at what is free."""
    temporary = os.environ.get("TMPDIR")
    if temporary and not os.access(temporary, os.W_OK | os.X_OK):
        yield Finding("disk", f"TMPDIR={temporary} is not a folder that can be written to",
                      f"make it, or unset it; {tempfile.gettempdir()} is used")  # fmt: skip
    yield from _writing(folder)
    for place, least, what in ((folder, _LEAST, "disk"), (Path("/dev/shm"), _LEAST_SHARED, "shared memory")):
        if what == "disk" or place.is_dir():
            free = shutil.disk_usage(place).free
            facts[what] = f"{format_size(free)} free in {place}"
            if free < least:
                cure = "free some space, or start elsewhere"
                if what != "disk":
                    cure = "start the container with --shm-size=1g, or loaders with num_workers=0: workers use it"
                yield Finding(
                    "disk", f"{format_size(free)} free in {place}, and {format_size(least)} are advised", cure
                )


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
        yield Finding("disk", f"{folder}: a process cannot {doing} ({error.strerror or error})",
                      "start in another folder, or give a save_path on another disk")  # fmt: skip


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
        yield Finding("limits", f"a process may open {files} files, and {_LEAST_FILES} are advised: workers share "
                      "batches as files", "ulimit -n 4096")  # fmt: skip
    if size != unlimited:
        yield Finding("limits", f"a file may have {format_size(size)} at most: a larger checkpoint is not saved",
                      "ulimit -f unlimited", is_fault=size < _LEAST)  # fmt: skip


# --------------------------------------------------------------------------------------------------------- variables


def _variables(facts: dict[str, str], folder: Path) -> Iterator[Finding]:
    """Find values that are wrong, values with an effect, and names that are misspelt."""
    for name, (pattern, allowed) in _VALUES.items():
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(pattern, value):
            yield Finding("variables", f"{name}={value!r} is not understood", f"set it to {allowed}")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > (os.cpu_count() or 1):
        yield Finding("variables", f"OMP_NUM_THREADS={threads}, and there are {os.cpu_count()} processors",
                      "set it to fewer: threads that wait for each other are slower", is_fault=False)  # fmt: skip
    for name in sorted(os.environ.keys() - _MEANINGS.keys()):
        meant = did_you_mean(name, _MEANINGS, cutoff=0.88)[len("; did you mean '") : -2]
        if meant and len(name) > 5:
            yield Finding("variables", f"{name} is set, which is not read", f"write {meant}, or unset it")


_CHECKS: tuple[Callable[[dict[str, str], Path], Iterator[Finding]], ...] = (
    _packages, _shadows, _torch, _ranks, _disk, _limits, _variables,
)  # fmt: skip
