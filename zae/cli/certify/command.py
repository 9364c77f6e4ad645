"""The command: its arguments, and the certificate as text and as a page."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from zae.cli import Answer, script
from zae.errors import ConfigError

__all__ = ["add_arguments", "run"]

_ABOUT = """\
Short runs of the script's trainer, each in a process and a folder of its own,
prove for this composition and this model what zae promises: two runs are equal;
the weights are those of a loop by hand in plain PyTorch; loggers and
checkpoints change nothing; two ranks are one process; a run that is killed and
resumed has the same end.
The exit status is 1 if a promise fails."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    script.add_arguments(parser)
    parser.description = f"{parser.description}\n\n{_ABOUT}"
    parser.add_argument("-o", "--out", metavar="FILE", default="certificate.md",
                        help="the page to write, in Markdown (default: certificate.md)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=5.0, help="how long it may take (default: 5)")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a run at most (default: 24)")
    parser.add_argument("--kills", type=int, default=4, help="how often a run is killed (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants of the kills (default: 0)")
    parser.add_argument("--only", metavar="PROMISE", action="append", default=[],
                        help="try only this promise, by a part of its name; may be repeated")  # fmt: skip


def run(arguments: argparse.Namespace) -> Answer:
    """Try each promise, and write the page."""
    for name, least in (("minutes", 0.01), ("steps", 2), ("kills", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name} {getattr(arguments, name)} is too small; give at least {least}")
    from zae.cli.certify.jobs import JobFailed, OutOfTime, Workshop
    from zae.cli.certify.promises import Certificate, findings

    chosen = _choose(arguments.only)
    path, function = script.split(arguments.script)
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give the file of a Python script: script.py:make_trainer")
    target = f"{path.absolute()}:{function}"
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="zae-certify-"))
    try:
        common = {"script": target, "given": tuple(arguments.given), "origin": str(Path.cwd())}
        shop = Workshop(folder, began + 60 * arguments.minutes, **common)
        found = Certificate(shop, arguments.steps, arguments.kills, arguments.seed)
        try:
            found.measure(6 * arguments.minutes)
        except JobFailed as failure:
            raise ConfigError(f"the run that all others are compared with fails: {failure}") from None
        except OutOfTime:
            raise ConfigError(
                f"{arguments.minutes:g} minutes are too short for the first run; give --minutes"
            ) from None
        rows = [(name, status, detail) for name in chosen for status, detail in findings(found, name)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _answer(arguments.out, f"{path.name}:{function}", found, rows, time.monotonic() - began)


def _choose(only: list[str]) -> list[str]:
    """Return the names of the promises to try."""
    from zae.cli.certify.promises import PROMISES

    for each in only:
        if not any(each in name for name in PROMISES):
            raise ConfigError(f"--only {each!r} is part of no promise; there are {', '.join(PROMISES)}")
    return [name for name in PROMISES if not only or any(each in name for each in only)]


def _answer(out: str, target: str, found: Any, rows: list[tuple[str, str, str]], seconds: float) -> Answer:
    """Return the certificate, and write its page."""
    import torch

    import zae

    base = found.base
    failed = [name for name, status, _ in rows if status == "FAILED"]
    facts = {
        "trainer": f"{base['name']} of {target}",
        "model": f"{base['parameters']:,} parameters, on {base['device']}",
        "runs": f"{found.shop.count} of at most {found.steps} optimizer steps, in {seconds:.0f} s",
        "versions": f"zae {zae.__version__}, torch {torch.__version__}",
    }
    width, columns = max(len(name) for name, _, _ in rows), 118
    lines = [f"{key:<9} {value}" for key, value in facts.items()] + [""]
    for name, status, detail in rows:
        head = f"{status:<14}  {name:<{width}}  "
        text = [part for line in detail.splitlines() for part in textwrap.wrap(line, columns - len(head)) or [""]]
        lines += [head + text[0], *(" " * len(head) + each for each in text[1:])]
    end = f"{len(failed)} of {len(rows)} fail" if failed else "no promise fails"
    lines += ["", f"{end}; written to {out}"]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(_page(facts, rows, end), encoding="utf-8")
    data = {**facts, "findings": [{"promise": a, "status": b.lower(), "detail": c} for a, b, c in rows], "page": out}
    return Answer(data, "\n".join(lines), int(bool(failed)))


def _page(facts: dict[str, str], rows: list[tuple[str, str, str]], end: str) -> str:
    """Return the page."""
    lines = ["# Certificate", "", f"{end[0].upper()}{end[1:]}.", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    lines += ["", "| promise | result | what was found |", "|---|---|---|"]
    for name, status, detail in rows:
        escaped = "<br>".join(detail.replace("|", "\\|").splitlines())
        lines.append(f"| {name} | {f'**{status}**' if status == 'FAILED' else status} | {escaped} |")
    return "\n".join([*lines, "", "Made by `python -m zae certify`.", ""])
