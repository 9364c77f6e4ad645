"""Run sections of the checks by name, print a line for each check, and write what was found as JSON.

The last line sums up; the exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

DEFAULT = ("device", "bitwise", "resume", "waits", "memory", "speed")
FULL = (*DEFAULT, "graphs", "saves", "out_of_memory", "compiled", "copies", "ranks")
NEEDED = ("torch", "numpy", "safetensors", "tqdm")
PEERS = ("lightning", "transformers", "accelerate")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=".ci/gpu", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"which to run, of {', '.join(FULL)}")
    parser.add_argument("--full", action="store_true", help="all sections, not only the first six")
    parser.add_argument("--output", type=Path, help="where the JSON goes; by default $OUT/gpu.json, else gpu.json")
    parser.add_argument("--commit", default="unknown", help="the commit that is checked, for the JSON")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.sections if name not in FULL]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(FULL)}")
    return arguments


def missing_packages() -> list[str]:
    """Return the packages that zae needs and this Python lacks."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    found = {}
    for name in (*NEEDED, *PEERS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def written_to(arguments: argparse.Namespace) -> Path:
    """Return the path of the JSON."""
    return arguments.output or Path(os.environ.get("OUT", ".")) / "gpu.json"


def main() -> int:
    arguments = parsed()
    missing = missing_packages()
    if missing:
        sys.stderr.write(f"zae needs {', '.join(missing)}, which {sys.executable} does not have\n")
        return 2
    # The results of matrix products are the same twice only with this; it is read when the library is loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("no GPU is at hand, so nothing was checked\n")
        return 2
    from gpu.report import Report
    from gpu.settings import IS_EMULATED, SMALL

    report = Report()
    names = arguments.sections or (FULL if arguments.full else DEFAULT)
    path = written_to(arguments)
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "is_emulated": IS_EMULATED,
        "is_small": SMALL,
        "commit": arguments.commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        report.run(name, lambda report, name=name: importlib.import_module(f"gpu.{name}").run(report))
        # After each section: what was found so far is not lost where the time runs out.
        path.write_text(json.dumps({**about, "seconds": report.seconds, "checks": report.checks}, indent=1) + "\n")
    sys.stdout.write(f"{path} is written\n{report.summary()}\n")
    return 1 if report.failed() else 0


if __name__ == "__main__":
    raise SystemExit(main())
