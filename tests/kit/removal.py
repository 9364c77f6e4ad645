"""What can be removed of zae, what is built on what, and copies of the package without some of it.

A feature is a file or a folder of ``addons/``, or one logger of ``addons/loggers/``. A tool is what `TOOLS` lists.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORE_SAMPLE = Path(__file__).with_name("core_sample.py")

TOOLS: dict[str, tuple[str, ...]] = {
    "certify": ("zae/certify", "zae/cli/certify.py"),
    "cli": ("zae/cli", "zae/__main__.py"),
    "consolidate": ("zae/cli/consolidate.py",),
    "diff": ("zae/diff.py", "zae/cli/diff.py"),
    "doctor": ("zae/doctor", "zae/cli/doctor.py"),
    "explain": ("zae/explain.py", "zae/cli/explain.py"),
    "find_batch_size": ("zae/tuning/batch_size.py",),
    "launch": ("zae/cli/launch.py",),
    "new": ("zae/cli/new.py", "zae/cli/templates"),
    "plan": ("zae/plan", "zae/cli/plan.py"),
    "plot": ("zae/cli/plot.py",),
    "replay": ("zae/replay", "zae/cli/replay.py"),
    "report of runs": ("zae/report", "zae/cli/report.py"),
    "runs": ("zae/runs", "zae/cli/runs.py"),
    "script": ("zae/script.py", "zae/cli/script.py", "zae/cli/explain.py", "zae/cli/plan.py"),
    "search": ("zae/search",),
    "testing": ("zae/testing",),
    "tuning": ("zae/tuning",),
}
"""The tools, each with its files and folders."""

BUILT_ON: dict[str, tuple[str, ...]] = {
    # Engines of several processes, on what they share.
    "accelerate": ("distributed", "replicated"),
    "deepspeed": ("distributed",),
    "distributed": ("sharded",),
    "fsdp": ("distributed",),
    "mpu": ("distributed", "replicated"),
    "pipeline": ("distributed",),
    "tensor_parallel": ("distributed",),
    # Other features.
    "activation_offload": ("gradient_checkpointing",),
    "fairseq2": ("torch_metrics",),
    "lightning": ("torch_metrics",),
    "report": ("report of runs", "doctor"),
    # Tools.
    "certify": ("script", "testing"),
    "consolidate": ("doctor",),
    "doctor": ("state_manager",),
    "find_batch_size": ("accumulation",),
    "plot": ("report of runs",),
    "replay": ("diff", "script", "state_manager"),
    "report of runs": ("doctor",),
    "tuning": ("report of runs",),
}
"""What each feature or tool imports of others: it is removed together with any of them."""


def features() -> dict[str, tuple[str, ...]]:
    """Map each feature of addons/ to its file or folder."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted((ROOT / "addons").iterdir()):
        is_package = (path / "__init__.py").is_file()
        if is_package or (path.suffix == ".py" and path.name != "__init__.py"):
            found[path.stem] = (f"zae/addons/{path.name}",)
    for path in sorted((ROOT / "addons" / "loggers").glob("*_logger.py")):
        found[f"loggers.{path.stem}"] = (f"zae/addons/loggers/{path.name}",)
    return found


def removable() -> dict[str, tuple[str, ...]]:
    """Map each feature and each tool to its files and folders."""
    return features() | TOOLS


def built_on(name: str) -> list[str]:
    """List what is built on a feature or a tool, directly or not."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        base = waiting.pop()
        new = [each for each in removable() if base in BUILT_ON.get(each, ()) and each not in found]
        found += new
        waiting += new
    return sorted(found)


def copy_package(folder: Path) -> None:
    """Copy the package, with metadata that lists no entry points: what is installed here is then not seen."""
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "zae", folder / "zae", ignore=shutil.ignore_patterns("__pycache__", "addons"))
    shutil.copytree(ROOT / "addons", folder / "zae" / "addons", ignore=caches)
    metadata = folder / "zae-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: zae\nVersion: 0\n", encoding="utf-8")


def remove(folder: Path, names: Iterable[str]) -> None:
    """Delete the files and folders of features and tools from a copy."""
    for name in names:
        for each in removable()[name]:
            path = folder / each
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # One that lies in a folder which has gone.


def run_core_sample(folder: Path) -> dict[str, Any]:
    """Run the sample of the core's tests on a copy, in a process of its own, and return what it says."""
    path = os.pathsep.join([str(folder), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    working = folder / "working"
    working.mkdir()
    command = [sys.executable, "-W", "ignore", str(CORE_SAMPLE), str(folder)]
    done = subprocess.run(command, env=environment, cwd=working, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
