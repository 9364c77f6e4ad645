"""Write the page of a certificate: HTML by the ending of its name, with the curves of the runs, else Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zae.certify.runs import Run
from zae.report import records
from zae.report.page import render
from zae.report.sections import make_section, make_table, text_of

__all__ = ["write"]


def write(path: Path, data: dict[str, Any], runs: Sequence[Run], text: str, end: str) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_html = path.suffix.lower() in (".html", ".htm")
    path.write_text(_html(data, runs, end) if is_html else _markdown(data, text, end), encoding="utf-8")


def _markdown(data: dict[str, Any], text: str, end: str) -> str:
    """Return the page in Markdown."""
    lines = ["# Certificate", "", f"`{' '.join(data['command'])}`: {end}.", ""]
    lines += ["| promise | verdict | cause | what was found |", "|---|---|---|---|"]
    for cells in _promises(data):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", "```text", text, "```", "", "Made by `python -m zae certify`.", ""])


def _promises(data: dict[str, Any]) -> list[list[str]]:
    """Return the cells of each promise."""
    return [[each["name"], each["verdict"], each["cause"] or "", each["message"]] for each in data["promises"]]


def _html(data: dict[str, Any], runs: Sequence[Run], end: str) -> str:
    """Return the page in HTML: what was found, and the report of the runs."""
    found = [[text_of(cell) for cell in cells] for cells in _promises(data)]
    table = make_table(["promise", "verdict", "cause", "what was found"], found, "What was found of each promise")
    rows = []
    for run in data["runs"]:
        cells = [" + ".join(map(str, run["steps"])), run.get("resumed"), run.get("parted"), run.get("cause")]
        rows.append([text_of(run["name"]), *("-" if cell is None else text_of(cell) for cell in cells)])
    beside = make_table(["run", "steps", "resumed after", "parted at", "cause"], rows, "The runs side by side")
    title = f"<p><code>{text_of(' '.join(data['command']))}</code>: {text_of(end)}.</p>"
    first = make_section("certificate", "Certificate", f"{title}{table}{beside}")
    starts = [run.get("resumed") or 0 for run in data["runs"]]
    return render([_records(run, start) for run, start in zip(runs, starts)], first)


def _records(run: Run, resumed: int) -> records.Run:
    """Return a run as the report knows runs."""
    return records.Run(run.name, records.Records.of(_steps(run, resumed)))


def _steps(run: Run, resumed: int) -> Iterator[dict[str, Any]]:
    """Yield the losses and learning rates of a run; after a resume they stand at the steps that they repeat."""
    for number, attempt in enumerate(run.attempts):
        before = resumed if number else 0
        yield {"step": before, "run": {}}
        for index, row in enumerate(attempt.rows(), start=before + 1):
            found: dict[str, Any] = {"step": index, "lr": row["lr"][0]}
            if row["loss"]:
                found["train/loss"] = sum(row["loss"]) / len(row["loss"])
            yield found
