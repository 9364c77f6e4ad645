"""Make the table of docs/howto/does_it_resume.md: ``python resumecheck/tests/table_of_scripts.py [NAME ...]``.

``scripts/matrix.ini`` has a section for each script. ``command`` is what starts it, ``resume_with`` what is added to
resume. The version of ``package`` and ``settings`` are shown.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import shlex
import sys

from cases import SCRIPTS

sys.path.append(str(SCRIPTS.parents[1]))

from resumecheck import Options, Refused, Result, check
from resumecheck.judge import FAILED, PASSED

_HEAD = ("script", "settings", "a kill after a save", "a kill in a save")


def cells(result: Result) -> list[str]:
    """Return what was found after saves and within them."""
    if result.whole is not None and not result.tried:
        return [f"**{result.whole.cause}**", ""]
    texts = []
    for kind in ("step", "save"):
        verdicts = {judgement.verdict for instant, judgement in result.tried if instant.kind == kind}
        causes = ", ".join(f"**{each}**" for each in result.causes(kind))
        others = "as after a save" if FAILED in verdicts else "the same" if PASSED in verdicts else "not tried"
        texts.append(causes or others)
    return texts


def main(*names: str) -> None:
    """Check all scripts, or those that are named, and print the table."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(SCRIPTS / "matrix.ini")
    os.chdir(SCRIPTS)
    os.environ["PWD"] = str(SCRIPTS)
    print(f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|", sep="\n")
    for name in names or parser.sections():
        section = parser[name]
        try:
            result = check(shlex.split(section["command"]), Options(resume_with=section.get("resume_with", "")))
            found = cells(result)
        except Refused as error:
            found = [f"not tried: {error}", ""]
        version = importlib.metadata.version(section["package"]).partition("+")[0]
        row = [f"{name.partition(',')[0]} {version}", section["settings"], *found]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
