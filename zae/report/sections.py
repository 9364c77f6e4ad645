"""The parts of a report that are text: tiles and tables. Every text that comes from a run is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from zae.display.text import duration, format_size, number
from zae.errors import printable
from zae.report.records import THROUGHPUT, Run, Series, metrics_of, split_key
from zae.values.walk import flatten

__all__ = ["SECTIONS", "make_section", "make_table", "overview", "subtitle", "text_of"]

MAX_ROWS = 500  # Rows of the table of metrics.


def subtitle(runs: Sequence[Run]) -> str:
    """Return the line below the title: what was trained, where and when."""
    if len(runs) > 1:
        return text_of(", ".join(run.name for run in runs))
    records, config = runs[0].records, runs[0].records.description_of("config")
    count = config.get("parameters")
    model = f"{config.get('model', '')}" + (f", {count:,} parameters" if isinstance(count, int) else "")
    begun = "" if math.isnan(records.began) else f"started {_when(records.began)}"
    words = (model, records.description_of("environment").get("device"), begun)
    return " · ".join(text_of(word) for word in words if word)


def overview(runs: Sequence[Run]) -> str:
    """Return the most important numbers, as tiles for one run and as a table for several."""
    facts = [_facts(run) for run in runs]
    if len(runs) == 1:
        tiles = "".join(
            f"<div class='tile'><dt>{text_of(name)}</dt><dd>{text_of(value)} <small>{text_of(note)}</small></dd></div>"
            for name, (value, note) in facts[0].items()
        )
        return f"<dl class='tiles'>{tiles}</dl>"
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    rows = []
    for at, facts_of_run in enumerate(facts):
        cells = [_note(*facts_of_run.get(name, ("-", ""))) for name in names]
        rows.append([_run(runs, at), *cells])
    table = make_table(["run", *map(text_of, names)], rows, "The main numbers of each run")
    return make_section("overview", "Overview", table)


def _facts(run: Run) -> dict[str, tuple[str, str]]:
    """Return the best score, the last values, and how far and how fast a run came, each with a note."""
    series = run.records.series
    config = run.records.description_of("config")
    facts = dict[str, tuple[str, str]]()
    metric = split_key(str(config.get("monitor", "loss")))[0]
    choose = {"min": min, "max": max}.get(str(config.get("monitor_mode")))
    best = next((series[key] for key in (f"valid/{metric}", f"train/{metric}", metric) if key in series), Series())
    points = [pair for pair in zip(best.values, best.steps) if not math.isnan(pair[0])]
    if points and choose is not None:
        value, step = choose(points, key=lambda pair: pair[0])
        facts[f"best {metric}"] = number(value), f"at step {step:,}"
    for key in ("train/loss", "valid/loss"):
        if key in series:
            facts[f"last {key}"] = number(series[key].values[-1]), ""
    if series:
        facts["steps"] = f"{max(one_series.steps[-1] for one_series in series.values()):,}", ""
    if run.records.epochs.values:
        facts["epochs"] = f"{int(run.records.epochs.values[-1]):,}", ""
    end = max(
        (one_series.times[-1] for one_series in series.values() if not math.isnan(one_series.times[-1])),
        default=math.nan,
    )
    if end > run.records.began:
        facts["duration"] = duration(end - run.records.began), ""
    rates = sorted(series[THROUGHPUT].values) if THROUGHPUT in series else []
    if rates:
        facts["throughput"] = number(rates[len(rates) // 2], 3), "steps/s, median"
    return facts


# ----------------------------------------------------------------------------------------------------- the sections


def _metric_table(runs: Sequence[Run]) -> str:
    """Return the last, lowest and highest value of each series."""
    keys = dict.fromkeys(key for run in runs for key in run.records.series)
    rows = []
    for metric in metrics_of(runs):
        for key in (candidate for candidate in keys if split_key(candidate)[0] == metric):
            for at, run in enumerate(runs):
                series = run.records.series.get(key)
                if series is not None:
                    name = [_run(runs, at)] if len(runs) > 1 else []
                    rows.append([text_of(key), *name, *_extremes(series)])
    named = ["metric", *(["run"] if len(runs) > 1 else [])]
    headers = [*named, "last", "lowest", "highest", "points", "not finite"]
    table = make_table(headers, rows[:MAX_ROWS], "The last, lowest and highest value of each series")
    return make_section("metrics", "Metrics", table) if rows else ""


def _extremes(series: Series) -> list[str]:
    """Return the cells of a series."""
    finite = [pair for pair in zip(series.values, series.steps) if math.isfinite(pair[0])]
    cells = [number(series.values[-1])]
    for choose in (min, max):
        value, step = choose(finite, key=lambda pair: pair[0]) if finite else (math.nan, 0)
        cells.append(_note(number(value), f"at {step:,}") if finite else "-")
    return [*cells, f"{len(series.values):,}", f"{len(series.values) - len(finite) or '-'}"]


def _section_for(identifier: str, part: str) -> Callable[[Sequence[Run]], str]:
    """Return the section of a part of the description, where runs are compared: what differs comes first."""

    def section(runs: Sequence[Run]) -> str:
        facts_of_runs = [flatten(run.records.description_of(part), ".") for run in runs]
        names = [
            name for name in dict.fromkeys(name for facts in facts_of_runs for name in facts) if name != "composition"
        ]
        if not names:
            return ""
        rows = {}
        for name in names:
            rows[name] = [_value(facts[name]) if name in facts else "-" for facts in facts_of_runs]
        if len(runs) == 1:
            pairs = "".join(f"<div><dt>{text_of(name)}</dt><dd>{cell}</dd></div>" for name, (cell,) in rows.items())
            return make_section(identifier, identifier.title(), f"<dl class='pairs'>{pairs}</dl>")
        headers = ["", *(_run(runs, at) for at in range(len(runs)))]
        equal_rows = [[text_of(name), *cells] for name, cells in rows.items() if len(set(cells)) == 1]
        differing = [[text_of(name), *cells] for name, cells in rows.items() if len(set(cells)) > 1]
        content = make_table(headers, differing, "What differs") if differing else "<p>Nothing differs.</p>"
        if equal_rows:
            equal_table = make_table(headers, equal_rows, "What is the same")
            content += f"<details><summary>The same in all runs ({len(equal_rows)})</summary>{equal_table}</details>"
        return make_section(identifier, identifier.title(), content)

    return section


def _composition(runs: Sequence[Run]) -> str:
    """Return the add-ons of each run, and the loop that they make."""
    parts = []
    for at, run in enumerate(runs):
        names = run.records.description_of("config").get("composition", run.composition)
        names = names if isinstance(names, list) else []
        chips = "".join(f"<li>{text_of(name)}</li>" for name in names) or "<li class='none'>no add-on</li>"
        text = run.records.about.get("explain")
        loop = ""
        if text:
            shown = f"<pre tabindex='0'>{text_of(text, kept=chr(10))}</pre>"
            loop = f"<details{' open' if len(runs) == 1 else ''}><summary>The effective loop</summary>{shown}</details>"
        if names or text:
            parts.append(f"{_heading(runs, at)}<ul class='chips'>{chips}</ul>{loop}")
    return make_section("composition", "Composition", "".join(parts)) if parts else ""


def _checkpoints(runs: Sequence[Run]) -> str:
    """Return what doctor reports of the checkpoints of each run."""
    parts = []
    for at, run in enumerate(runs):
        for report in run.checkpoints:
            rows = [_checkpoint(entry) for entry in [*report["checkpoints"], *report.get("crashes", [])]]
            headers = ["checkpoint", "step", "epoch", "score", "size", "ranks", "zae", "state"]
            table = make_table(headers, rows, "Checkpoints") if rows else ""
            advice = "".join(f"<li>{text_of(line)}</li>" for line in report["advice"])
            place = f"<p class='quiet place'>{text_of(report['path'])}</p>"
            parts.append(f"{_heading(runs, at)}{place}{table}<ul class='advice'>{advice}</ul>")
    return make_section("checkpoints", "Checkpoints", "".join(parts)) if parts else ""


def _checkpoint(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the cells of a checkpoint."""
    size = format_size(checkpoint["bytes"])
    if not checkpoint["whole"]:
        wrong = f"<span class='bad'>damaged</span><br><span class='long'>{text_of(checkpoint.get('wrong', ''))}</span>"
        return [text_of(checkpoint["name"]), "-", "-", "-", size, "-", "-", wrong]
    score = checkpoint.get("score")
    shown = _note(number(score), str(checkpoint.get("monitor"))) if isinstance(score, (int, float)) else "-"
    cells = [text_of(checkpoint[name]) for name in ("step", "epoch", "world_size", "zae")]
    return [text_of(checkpoint["name"]), *cells[:2], shown, size, *cells[2:], "<span class='good'>intact</span>"]


def _processes(runs: Sequence[Run]) -> str:
    """Return when a run was started and resumed; nothing where each run is one process."""
    rows = []
    for at, run in enumerate(runs):
        for session in run.records.sessions:
            environment = session.get("environment")
            device = environment.get("device", "-") if isinstance(environment, Mapping) else "-"
            began = f"resumed after step {session['step']:,}" if session["step"] else "started"
            name = [_run(runs, at)] if len(runs) > 1 else []
            rows.append([*name, began, _when(session["unix_time"]), text_of(device)])
    headers = [*(["run"] if len(runs) > 1 else []), "process", "time", "device"]
    table = make_table(headers, rows, "When a run was started and resumed")
    return make_section("processes", "Processes", table) if len(rows) > len(runs) else ""


SECTIONS: tuple[Callable[[Sequence[Run]], str], ...] = (
    _metric_table,
    _checkpoints,
    _composition,
    _section_for("options", "config"),
    _section_for("environment", "environment"),
    _processes,
)
"""What comes below the curves; each returns an empty text where nothing is known."""


# -------------------------------------------------------------------------------------------------------- the pieces


def text_of(value: object, kept: str = "") -> str:
    """Return any text as HTML."""
    return html.escape(printable(str(value), kept=kept))


def make_section(identifier: str, title: str, content: str) -> str:
    """Return a part of the page; the content is HTML already."""
    return f"<section id='{identifier}'><h2>{title}</h2>\n{content}\n</section>"


def _heading(runs: Sequence[Run], at: int) -> str:
    return f"<h3>{_run(runs, at)}</h3>" if len(runs) > 1 else ""


def make_table(headers: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Return a table of cells that are HTML already."""
    head = "".join(f"<th scope='col'>{header}</th>" for header in headers)
    lines = []
    for first, *cells in rows:
        other_cells = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr><th scope='row'>{first}</th>{other_cells}</tr>")
    body = "\n".join(lines)
    opening = f"<div class='scroll' tabindex='0' role='region' aria-label='{text_of(caption)}'>"
    return f"{opening}<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"


def _run(runs: Sequence[Run], at: int) -> str:
    """Return the name of a run, with a mark in its colour: from the ninth on dashed, from the seventeenth dotted."""
    return f"<span class='swatch c{at % 8} d{at // 8 % 3}'></span>{text_of(runs[at].name)}"


def _note(value: str, note: str) -> str:
    return f"{text_of(value)} <small>{text_of(note)}</small>" if note else text_of(value)


def _value(value: Any) -> str:
    """Return the value of an option as a script has it, but for the quotes of a text."""
    text = value if isinstance(value, str) else repr(value)
    return f"<code>{text_of(text if len(text) <= 300 else text[:300] + ' ...')}</code>"


def _when(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if 0 < time < 1e11 else "-"
