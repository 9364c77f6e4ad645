"""The pictures of the documentation, each for light and for dark pages.

It trains examples/digits.py twice, without interruption and with two kills, and compares the last weights bit by bit.
``docs/resume-*.svg`` shows the curves of both runs, and ``docs/report-*.png`` the report of one (needs Chromium).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from _generators import DOCS, ROOT
from kit.browser import Browser

KILLED_AFTER = (6, 15)  # Epochs.
COLORS = {
    "light": {"text": "#1f2328", "quiet": "#59636e", "grid": "#d8dee4", "train": "#0072b2", "valid": "#d55e00"},
    "dark": {"text": "#e6edf3", "quiet": "#9aa4b1", "grid": "#30363d", "train": "#56b4e9", "valid": "#e69f00"},
}
WIDTH, HEIGHT, TOP, BOTTOM, PANEL = 840, 320, 62, 276, 350  # Of a picture, its plots' edges, and the width of a plot.


def train(folder: Path, *, is_killed: bool) -> None:
    """Run the example to its end; send SIGKILL after some epochs, and start it again."""
    for epoch in (*KILLED_AFTER, None) if is_killed else (None,):
        command = [sys.executable, "-u", str(ROOT / "examples" / "digits.py")]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if epoch is not None and line.startswith(f"epoch {epoch}:"):
                    process.kill()
        assert (process.returncode == 0) == (epoch is None)


def curves(folder: Path) -> dict[str, list[float]]:
    """Read one value an epoch for each metric from the log of a run."""
    rows = [json.loads(line) for line in (folder / "runs/digits/log.jsonl").read_text().splitlines()]
    names = ("train/loss", "valid/loss", "train/accuracy", "valid/accuracy")
    return {name: [float(f"{row[name]:.5g}") for row in rows if name in row] for name in names}


def draw(data: dict[str, Any], theme: str) -> str:
    """Return the picture of both runs; ``data`` is stored in it, so that a test can draw it again."""
    color = COLORS[theme]
    said = "Loss and accuracy of two runs over the epochs. The run that was killed twice lies exactly on the other one."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" '
        f'fill="{color["text"]}">',
        f"<title>{said}</title>",
        f"<metadata>{escape(json.dumps(data))}</metadata>",
        *_legend(color),
    ]
    for left, metric, scale in ((52, "loss", math.log10), (478, "accuracy", float)):
        parts += _panel(data, left, metric, scale, color)
    return "\n".join([*parts, "</svg>\n"])


def _legend(color: dict[str, str]) -> Iterator[str]:
    """Yield what the two kinds of lines and the two colors mean."""
    x = 52
    for width, opacity, dash, text, advance in (
        (8, 0.3, "", "never interrupted", 166),
        (2, 1, "", "killed twice, started again", 232),
        (1, 1, "2 3", "SIGKILL", 0),
    ):
        line = f'<line x1="{x}" x2="{x + 30}" y1="16" y2="16" stroke="{color["text"]}" stroke-width="{width}"'
        yield f'{line} stroke-opacity="{opacity}" stroke-dasharray="{dash or "none"}"/>'
        yield f'<text x="{x + 38}" y="20.5">{text}</text>'
        x += advance
    for x, split, text in ((680, "train", "training"), (792, "valid", "validation")):
        yield f'<text x="{x}" y="20.5" fill="{color[split]}" font-weight="600" text-anchor="middle">{text}</text>'


def _panel(data: dict[str, Any], left: int, metric: str, scale: Any, color: dict[str, str]) -> Iterator[str]:
    """Yield one plot: grid, ticks, kills, and the curves of both runs."""
    ticks = {"loss": (0.01, 0.1, 1.0), "accuracy": (0.6, 0.7, 0.8, 0.9, 1.0)}[metric]
    every = [
        v for run in ("straight", "killed") for split in ("train", "valid") for v in data[run][f"{split}/{metric}"]
    ]
    low, high = scale(min(*every, ticks[0])), scale(max(*every, ticks[-1]))
    epochs = len(data["straight"][f"train/{metric}"])

    def x(epoch: float) -> float:
        return round(left + (epoch - 1) / (epochs - 1) * PANEL, 1)

    def y(value: float) -> float:
        return round(BOTTOM - (scale(value) - low) / (high - low) * (BOTTOM - TOP), 1)

    yield f'<text x="{left}" y="{TOP - 14}" font-weight="600">{metric}</text>'
    for tick in ticks:
        yield f'<line x1="{left}" x2="{left + PANEL}" y1="{y(tick)}" y2="{y(tick)}" stroke="{color["grid"]}"/>'
        yield f'<text x="{left - 8}" y="{y(tick) + 4.5}" text-anchor="end" fill="{color["quiet"]}">{tick:g}</text>'
    for tick in (1, *range(10, epochs + 1, 10)):
        is_last = tick + 10 > epochs
        place = f'x="{x(tick)}" y="{BOTTOM + 22}" text-anchor="{"end" if is_last else "middle"}"'
        yield f'<text {place} fill="{color["quiet"]}">{"epoch " * is_last}{tick}</text>'
    for epoch in data["kills"]:
        line = f'<line x1="{x(epoch)}" x2="{x(epoch)}" y1="{TOP}" y2="{BOTTOM}"'
        yield f'{line} stroke="{color["text"]}" stroke-dasharray="2 3"/>'
    for run, width, opacity in (("straight", 8, 0.3), ("killed", 2, 1)):
        for split in ("train", "valid"):
            points = " ".join(f"{x(at)},{y(value)}" for at, value in enumerate(data[run][f"{split}/{metric}"], 1))
            line = f'<polyline fill="none" stroke="{color[split]}" stroke-width="{width}" stroke-opacity="{opacity}"'
            yield f'{line} stroke-linejoin="round" stroke-linecap="round" points="{points}"/>'


def photograph(page: Path, theme: str, out: Path) -> None:
    """Write what a browser shows of the top of a report."""
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        browser.open(page, 1240, 612, theme)
        browser.picture(out, whole=False)
        browser.close()


def stored(theme: str) -> dict[str, Any]:
    """Return the numbers that a picture shows, which it contains."""
    root = ElementTree.fromstring(path_of(theme).read_text(encoding="utf-8"))
    data: dict[str, Any] = json.loads(root.findtext("{*}metadata") or "")
    return data


def path_of(theme: str) -> Path:
    return DOCS / f"resume-{theme}.svg"


def files() -> dict[Path, str]:
    """Return the pictures of the curves, of the numbers that they contain."""
    return {path_of(theme): draw(stored(theme), theme) for theme in COLORS}


def record() -> None:
    """Train, compare, and make all pictures anew."""
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place, name) for name in ("straight", "killed")}
        weights = []
        for name, folder in folders.items():
            folder.mkdir()
            train(folder, is_killed=name == "killed")
            weights.append(max(folder.glob("runs/digits/step-*/model.safetensors")).read_bytes())
        assert weights[0] == weights[1], "the killed run has other weights"
        data = {name: curves(folder) for name, folder in folders.items()}
        page = Path(place, "report.html")
        command = [sys.executable, "-m", "zae", "report", "runs/digits", "-o", str(page)]
        subprocess.run(command, cwd=folders["straight"], check=True)
        for theme in COLORS:
            picture = draw({**data, "kills": KILLED_AFTER}, theme)
            path_of(theme).write_text(picture, encoding="utf-8")
            photograph(page, theme, DOCS / "features" / f"report-{theme}.png")
