"""What can be removed of zae, what is built on what, and copies of the package without some of it.

A feature is a file or a folder of ``addons/``, or one logger of ``addons/loggers/``. `imports` lists the
tools, and what is built on what.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from kit import imports
from kit.scripts import Script, importing_from

ROOT = imports.ROOT
CORE_SAMPLE = Path(__file__).with_name("core_sample.py")

COMMANDS = ROOT / "zae" / "cli"
LOGGERS = ROOT / "addons" / "loggers"


@cache
def removable() -> list[str]:
    """List what can be removed, by the name of its module or package below zae: "addons.ema", "search", "cli.diff"."""
    features = [f"addons.{name}" for name in imports.features()]
    loggers = [f"addons.loggers.{path.stem}" for path in LOGGERS.glob("*_logger.py")]
    commands = [f"cli.{path.stem}" for path in COMMANDS.glob("*.py") if path.stem != "__init__"]
    parts = [name for name in imports.BUILT_ON if name.partition(".")[0] in imports.TOOLS]
    return sorted({*features, *loggers, *imports.TOOLS, *commands, *parts})


def needs(name: str) -> set[str]:
    """Return what a feature or a tool is built on."""
    if name in imports.IN_ONE_METHOD:
        return set()
    found = set(imports.BUILT_ON.get(name, ()))
    folder, _, own = name.partition(".")
    if folder == "cli" and own in imports.TOOLS:
        found.add(own)  # A command of the name of a tool.
    return found


def built_on(name: str) -> list[str]:
    """List what is built on a feature or a tool, directly or not: it is removed together with that."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        base = waiting.pop()
        new = [each for each in removable() if base in needs(each) and each not in found]
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
    """Delete features and tools, each a file or a folder, from a copy."""
    for name in names:
        path = folder.joinpath("zae", *name.split("."))
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.with_suffix(".py").unlink(missing_ok=True)  # One that lies in a folder which has gone.
        if name == "cli":
            (folder / "zae" / "__main__.py").unlink()  # It only calls the commands.


def run_core_sample(folder: Path) -> dict[str, Any]:
    """Run the sample of the core's tests on a copy, in a process of its own, and return what it says."""
    working = folder / "working"
    working.mkdir()
    script = f"{importing_from(folder, ROOT / 'tests')}\nimport runpy, warnings\nwarnings.simplefilter('ignore')\n"
    script += f"sys.argv[1:] = [{str(folder)!r}]\nrunpy.run_path({str(CORE_SAMPLE)!r}, run_name='__main__')\n"
    with contextlib.chdir(working):
        status, shown, said = Script(script).end()
    assert status == 0, said[-4000:]
    answer: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return answer
