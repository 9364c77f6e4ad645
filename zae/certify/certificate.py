"""Certify the trainer of a script: try the promises, and show the certificate as text and as a page."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import zae
from zae.certify.jobs import JobFailed, OutOfTime, Workshop
from zae.certify.promises import PROMISES, Certificate, findings
from zae.display.answer import Answer
from zae.errors import ConfigError
from zae.script import split

__all__ = ["certify"]


def certify(
    target: str,
    given: Sequence[str] = (),
    *,
    out: str = "certificate.md",
    minutes: float = 5.0,
    steps: int = 24,
    kills: int = 4,
    seed: int = 0,
    only: Sequence[str] = (),
) -> Answer:
    """Try each promise with the trainer of a script, and write the page; the status is 1 if a promise fails."""
    for name, value, least in (("minutes", minutes, 0.01), ("steps", steps, 2), ("kills", kills, 1)):
        if value < least:
            raise ConfigError(f"--{name} {value} is too small; give at least {least}")
    chosen = _choose(only)
    path, function = split(target)
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give the file of a Python script: script.py:make_trainer")
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="zae-certify-"))
    try:
        common = {"script": f"{path.absolute()}:{function}", "given": tuple(given), "origin": str(Path.cwd())}
        shop = Workshop(folder, began + 60 * minutes, **common)
        found = Certificate(shop, steps, kills, seed)
        try:
            found.measure(6 * minutes)
        except JobFailed as failure:
            raise ConfigError(f"the run that all others are compared with fails: {failure}") from None
        except OutOfTime:
            raise ConfigError(f"{minutes:g} minutes are too short for the first run; give --minutes") from None
        rows = [(name, status, detail) for name in chosen for status, detail in findings(found, name)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _answer(out, f"{path.name}:{function}", found, rows, time.monotonic() - began)


def _choose(only: Sequence[str]) -> list[str]:
    """Return the names of the promises to try."""
    for each in only:
        if not any(each in name for name in PROMISES):
            raise ConfigError(f"--only {each!r} is part of no promise; there are {', '.join(PROMISES)}")
    return [name for name in PROMISES if not only or any(each in name for each in only)]


def _answer(out: str, target: str, found: Any, rows: list[tuple[str, str, str]], seconds: float) -> Answer:
    """Return the certificate, and write its page."""
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
