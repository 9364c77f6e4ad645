"""Check several scripts, and make a table of what becomes of each: ``resumecheck matrix FILE``.

The file is an INI file with a section for each script. ``command`` is what starts it, in the folder of the file or in
``folder``, ``resume_with`` what is added to resume. The version of ``package`` and ``settings`` are shown.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from .check import Options, Result, check
from .errors import Refused
from .judge import FAILED, PASSED

__all__ = ["table"]

_HEAD = ("script", "settings", "a kill after a save", "a kill in a save")


def table(file: str, names: Sequence[str] = ()) -> tuple[str, int]:
    """Return a table in Markdown and an exit status; of some scripts, where names are given."""
    parser = configparser.ConfigParser(interpolation=None)
    if not parser.read(file):
        raise Refused(f"{file} cannot be read; it has a section for each script: [name], command = python train.py")
    lines = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    status = 0
    for name in names or parser.sections():
        section = parser[name]
        folder = Path(file).resolve().parent / section.get("folder", ".")
        command = shlex.split(section["command"])
        with _working_in(folder):
            try:
                result = check(command, Options(resume_with=section.get("resume_with", "")))
                cells = _cells(result)
                status = max(status, 2 * (result.status == 2))
            except Refused as error:
                cells, status = [f"not tried: {error}", ""], 2
        label = " ".join(filter(None, [name.partition(",")[0], _version(command, section.get("package", ""))]))
        lines.append(f"| {' | '.join([label, section.get('settings', ''), *cells])} |")
    return "\n".join(lines), status


def _cells(result: Result) -> list[str]:
    """Return what was found after saves and within them."""
    if result.whole is not None and not result.tried:
        return [f"**{result.whole.cause}**", ""]
    cells: list[str] = []
    for kind in ("step", "save"):
        judgements = [each for instant, each in result.tried if instant.kind == kind]
        text = ", ".join(f"**{each}**" for each in result.causes(kind))
        if not text and any(each.verdict == FAILED for each in judgements):
            text = "as after a save"
        cells.append(text or ("the same" if any(each.verdict == PASSED for each in judgements) else "not tried"))
    return cells


def _version(command: Sequence[str], package: str) -> str:
    """Return the version of a package, as the Python of the script has it."""
    if not package:
        return ""
    python = command[0] if "python" in Path(command[0]).name else "python"
    words = f"import importlib.metadata as m; print(m.version({package!r}).partition('+')[0])"
    return subprocess.run([python, "-c", words], capture_output=True, text=True, check=False).stdout.strip()


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before, shell = os.getcwd(), os.environ.get("PWD")
    os.chdir(folder)
    os.environ["PWD"] = str(folder)
    try:
        yield
    finally:
        os.chdir(before)
        if shell is not None:
            os.environ["PWD"] = shell
