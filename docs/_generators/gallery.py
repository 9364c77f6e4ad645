"""docs/gallery/, made of real runs of the examples: what they printed, logged and drew is stored there."""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from _generators import DOCS, ROOT, title_of
from kit.gallery import Example, Outcome, Plot, check, run
from kit.gallery_list import GALLERY
from zae.display.html import COLORS

FOLDER = DOCS / "gallery"
# Each is as far from white as from the black of a dark page: one picture for both.
TEXT, GRID = "#757b83", "#8a919a"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 720, 262, 52, 50, 218, 62
POINTS = 150  # Of a curve, at most: a longer one is drawn by the means of its parts.


def store(example: Example, outcome: Outcome, folder: Path) -> None:
    """Store what the page of an example shows of a run, and the pictures that it drew."""
    for number, (picture, _) in enumerate(example.pictures):
        shutil.copyfile(folder / picture, FOLDER / picture_name(example, number))
    result = {
        "script": outcome.script,
        "output": outcome.output,
        "seconds": round(outcome.cpu_seconds),
        "machine": f"{processor()}, Python {platform.python_version()}, torch {metadata.version('torch')}",
        "date": datetime.now(UTC).date().isoformat(),
        "curves": [[read_curve(folder, each.log, each.key) for each in plot.series] for plot in example.plots],
    }
    (FOLDER / "runs" / f"{example.name}.json").write_text(json.dumps(result, indent=None) + "\n", encoding="utf-8")


def read_result(example: Example) -> dict[str, Any]:
    """Return what is stored of the last run of an example."""
    found: dict[str, Any] = json.loads((FOLDER / "runs" / f"{example.name}.json").read_text(encoding="utf-8"))
    return found


def processor() -> str:
    """Return the name of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())


def picture_name(example: Example, number: int) -> str:
    """Return the file of a picture that an example drew."""
    return f"{example.name}-drawn{number or ''}.png"


def read_curve(folder: Path, log: str, key: str) -> list[list[float]]:
    """Return the steps and values of a key, in the log of a run."""
    rows = [json.loads(line) for line in (folder / log).read_text(encoding="utf-8").splitlines()]
    points = [(row["step"], float(row[key])) for row in rows if key in row]
    assert len(points) > 1, (log, key, sorted({name for row in rows for name in row}))
    size = math.ceil(len(points) / POINTS)
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [[part[-1][0], float(f"{sum(value for _, value in part) / len(part):.4g}")] for part in parts]


# ------------------------------------------------------------------------------------------------ the pictures


def draw(example: Example, curves: list[list[list[list[float]]]], numbers: dict[str, float]) -> str:
    """Return the picture of a run's curves."""
    count = len(example.plots)
    width = (WIDTH - LEFT - 12 - GAP * (count - 1)) / count
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" '
        f'fill="{TEXT}">',
        f"<title>{escape(describe(example))}</title>",
    ]
    for number, (plot, series) in enumerate(zip(example.plots, curves, strict=True)):
        parts += draw_plot(plot, series, LEFT + number * (width + GAP), width, numbers)
    return "\n".join([*parts, "</svg>\n"])


def describe(example: Example) -> str:
    """Return what the picture of an example shows, in words."""
    names = [f"{plot.title} ({', '.join(each.label for each in plot.series)})" for plot in example.plots]
    return f"{example.title}: {'; '.join(names)}, over the optimizer steps of the run"


def draw_plot(
    plot: Plot, curves: list[list[list[float]]], left: float, width: float, numbers: dict[str, float]
) -> Iterator[str]:
    """Yield one plot: its title and legend, its grid and ticks, and its curves."""
    compared = [numbers[plot.line[0]]] if plot.line else []
    scale = math.log10 if plot.scale == "log" else float
    values = [value for curve in curves for _, value in curve] + compared
    last = max(step for curve in curves for step, _ in curve)
    ticks = log_ticks(min(values), max(values)) if plot.scale == "log" else linear_ticks(min(values), max(values))
    low, high = scale(min(*ticks, *values)), scale(max(*ticks, *values))

    def x(step: float) -> float:
        return round(left + step / last * width, 1)

    def y(value: float) -> float:
        return round(BOTTOM - (scale(value) - low) / (high - low) * (BOTTOM - TOP), 1)

    yield f'<text x="{left:.0f}" y="14" font-weight="600">{escape(plot.title)}</text>'
    at = left
    for label, color in zip((each.label for each in plot.series), COLORS):
        yield f'<text x="{at:.0f}" y="33" fill="{color}" font-weight="600">{escape(label)}</text>'
        at += 7.4 * len(label) + 16
    if plot.line:
        yield f'<text x="{at:.0f}" y="33">{escape("- - " + plot.line[1])}</text>'
    for tick in ticks:
        yield f'<path d="M{left:.0f} {y(tick)}h{width:.0f}" stroke="{GRID}" stroke-opacity="0.35"/>'
        yield f'<text x="{left - 8:.0f}" y="{y(tick) + 4.5:.1f}" text-anchor="end">{tick:g}</text>'
    for step in (each for each in linear_ticks(0, last) if each <= last):
        word, anchor = ("step ", "start") if step == 0 else ("", "middle")
        yield f'<text x="{x(step)}" y="{BOTTOM + 20}" text-anchor="{anchor}">{word}{step:g}</text>'
    for value in compared:
        line = f'<path d="M{left:.0f} {y(value)}h{width:.0f}" stroke="{TEXT}" stroke-width="1.5"'
        yield f'{line} stroke-dasharray="6 5"/>'
    for number, (curve, color) in enumerate(zip(curves, COLORS)):
        points = " ".join(f"{x(step)},{y(value)}" for step, value in curve)
        size, opacity = (8, 0.4) if curve in curves[number + 1 :] else (2, 1)  # Seen below one that is the same.
        line = f'<polyline fill="none" stroke="{color}" stroke-width="{size}" stroke-opacity="{opacity}"'
        yield f'{line} stroke-linejoin="round" points="{points}"/>'


def linear_ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers around a range."""
    rough = (high - low or abs(high) or 1) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough * 0.99)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(each * step, 10) for each in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers of a logarithmic scale within a range, with at least two of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [each for each in ticks if low * 0.999 <= each <= high * 1.001]
        if len(ticks) > 2:
            return ticks
    return [low, high]


def draw_small(example: Example, curves: list[list[list[list[float]]]]) -> str:
    """Return a small picture of the curves of the first plot, without its text."""
    plot, series = example.plots[0], curves[0]
    scale = math.log10 if plot.scale == "log" else float
    values = [scale(value) for curve in series for _, value in curve]
    last, low, high = max(step for curve in series for step, _ in curve), min(values), max(values)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 120 60" width="120" height="60" role="img">']
    parts += [f"<title>{escape(plot.title)}</title>", f'<path d="M4 3V57H118" fill="none" stroke="{GRID}"/>']
    for curve, color in zip(series, COLORS):
        every = curve[:: math.ceil(len(curve) / 40)]
        points = " ".join(
            f"{5 + step / last * 112:.0f},{54 - (scale(v) - low) / (high - low) * 48:.0f}" for step, v in every
        )
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>')
    return "\n".join([*parts, "</svg>\n"])


# ------------------------------------------------------------------------------------------------ the pages


def about(example: Example) -> str:
    """Return the docstring of a script: two sentences about what it shows."""
    return example.path.read_text(encoding="utf-8").split('"""')[1].strip()


def page(example: Example, result: dict[str, Any]) -> str:
    """Return the page of an example."""
    script, texts = example.path.relative_to(ROOT).as_posix(), example.texts(result["output"])
    said = [each for each in about(example).split("\n\n") if not each.startswith("python ")]
    is_usual = example.extras == "examples"  # What the list of all says.
    extras = "" if is_usual else f', after `pip install -c constraints.txt -e ".[{example.extras}]"`'
    rows = {
        "score": example.score.format(**texts),
        "floor": example.floor.format(**texts),
        "time": f"{result['seconds']} s of processor time",
        "writes": ", ".join(f"`{each}`" for each in example.files),
        "run it": f"`python {script}`" + extras,
    }
    lines = result["output"].rstrip().splitlines()
    printed = "\n".join(line for line in lines if not re.match(r"\[\d{4}-", line))  # Not what a library logs.
    pictures = [f"![{words}]({picture_name(example, n)})" for n, (_, words) in enumerate(example.pictures)]
    parts = [
        f"# {example.title}",
        *said,
        f"![{describe(example)}]({example.name}.svg)",
        *pictures,
        "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        "It prints:",
        f"<!-- not run: this is what the script below printed -->\n```text\n{printed}\n```",
        "## The script",
        f"[{script}](../../{script}):",
        f":::{{literalinclude}} ../../{script}\n:language: python\n:::",
        "## Read on",
        "\n".join(f"- {link(each)}" for each in example.links) + "\n- [Gallery](index.md)",
    ]
    return "\n\n".join(parts) + "\n"


def link(target: str) -> str:
    """Return a link to a page, or to a part of it, that has the title of the page."""
    return f"[{title_of(DOCS / target.partition('#')[0])}](../{target})"


INTRODUCTION = """# Gallery

Each example is one short script, on real data that comes with a package: none needs a network. It has to reach its
floor, on data that nothing was trained on or chosen by, within 60 s of processor time, and leaves only the files that
it names. Where the floor is another method, the script computes it from the same data.

`python -m pip install -c constraints.txt -e ".[examples]"` installs what they need. `python docs/_generators gallery`
runs all of them and writes these pages.
"""


def index(results: dict[str, dict[str, Any]]) -> str:
    """Return the page that lists all examples."""
    rows = ["| | example | score | time |", "|---|---|---|---|"]
    for each in GALLERY:
        result = results[each.name]
        texts = each.texts(result["output"])
        cells = (
            f"![{each.plots[0].title}]({each.name}-small.svg)",
            f"[{each.title}]({each.name}.md)",
            each.score.format(**texts),
            f"{result['seconds']} s",
        )
        rows.append("| " + " | ".join(cells) + " |")
    total = sum(result["seconds"] for result in results.values())
    machines = "; ".join(sorted({result["machine"] for result in results.values()}))
    pages = "\n".join(each.name for each in GALLERY)
    contents = f":::{{toctree}}\n:hidden:\n{pages}\n:::\n"
    sum_up = f"All of them together take {total} s of processor time ({machines})."
    return "\n".join([INTRODUCTION, *rows, "", sum_up, "", contents])


def files() -> dict[Path, str]:
    """Return the text of every file that is made of what is stored."""
    results = {each.name: read_result(each) for each in GALLERY}
    made = {"index.md": index(results)}
    for each in GALLERY:
        result = results[each.name]
        made[f"{each.name}.md"] = page(each, result)
        made[f"{each.name}.svg"] = draw(each, result["curves"], each.numbers(result["output"]))
        made[f"{each.name}-small.svg"] = draw_small(each, result["curves"])
    return {FOLDER / name: text for name, text in made.items()}


def record(*names: str) -> None:
    """Run the examples that are named, or all, and store what they showed."""
    for each in GALLERY:
        if each.name in names or not names:
            with tempfile.TemporaryDirectory() as place:
                outcome = run(each, Path(place))
                check(each, outcome)
                store(each, outcome, Path(place))
