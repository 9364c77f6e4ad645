"""HTML of metrics and trainers for notebooks: plain elements with inline styles, readable on light and on dark."""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zae.display.text import cell, columns_of, number

__all__ = [
    "COLORS",
    "block",
    "chart",
    "curves",
    "escape",
    "is_shown_above",
    "metrics_html",
    "note_shown",
    "rows_html",
]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#3a93c4", "#7a8699")
"""The colours of curves, training and validation first: those of Okabe and Ito, which readers with a colour vision
deficiency tell apart, where they have a contrast of at least 3 to white and to #111."""
_BORDER = "1px solid rgba(128,128,128,.35)"
_FAINT = "opacity:.75"
_MAX_ROWS = 60  # Rows of a table at most: the first ones and the last ones.
_MAX_POINTS = 300  # Points of a curve at most.
_MAX_CHARTS = 4
# A chart in pixels, its margins, and the width of a letter.
_WIDTH = 320
_HEIGHT = 150
_RIGHT_MARGIN = 8
_TOP_MARGIN = 24
_BOTTOM_MARGIN = 20
_MIN_LEFT_MARGIN = 46
_LETTER_WIDTH = 6.2
_SPLITS = ("train", "valid")


def escape(value: Any) -> str:
    """Return a value as text of a page."""
    return html.escape(cell(value))


def block(*parts: str) -> str:
    """Return the parts of one output."""
    return f"<div style='font:13px/1.5 system-ui,sans-serif;color:inherit'>{''.join(parts)}</div>"


def rows_html(rows: Sequence[Mapping[str, Any]], marks: Sequence[str] = ()) -> str:
    """Return rows as a table with a header; a long one without its middle."""
    columns = columns_of(rows)
    marks = marks or [""] * len(rows)
    style = f"padding:2px 10px 2px 0;text-align:right;border:0;border-bottom:{_BORDER};white-space:nowrap"
    head = "".join(f"<th scope='col' style='{style};font-weight:600'>{escape(name)}</th>" for name in columns)
    lines = []
    for row, mark in zip(rows, marks, strict=True):
        kind = ";font-weight:600" if mark else ""
        cells = "".join(f"<td style='{style}{kind}'>{escape(row.get(name))}</td>" for name in columns)
        lines.append(f"<tr style='background:transparent'>{cells}<td style='border:0{kind}'>{escape(mark)}</td></tr>")
    if len(lines) > _MAX_ROWS:
        left_out = f"<tr style='background:transparent'><td style='border:0;text-align:left;{_FAINT}' "
        left_out += f"colspan='{len(columns) + 1}'>{len(lines) - _MAX_ROWS:,} rows are not shown</td></tr>"
        lines = [*lines[: _MAX_ROWS // 2], left_out, *lines[-_MAX_ROWS // 2 :]]
    return (
        "<div style='overflow-x:auto;max-width:100%'><table style='border-collapse:collapse;margin:4px 0;"
        "font-size:13px;font-variant-numeric:tabular-nums;color:inherit;background:transparent'>"
        f"<thead><tr style='background:transparent'>{head}<th style='border:0'></th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def metrics_html(rows: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> str:
    """Return the rows of a run: their curves, and their table."""
    return curves(rows) + rows_html(rows, marks) if rows else "<p>no epoch has been trained</p>"


def curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart for each metric, with a curve for training and one for the validation; the first four."""
    metrics: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name in columns_of(rows):
        split, _, metric = name.partition("_")
        if split in _SPLITS and metric:
            points = []
            for row in rows:
                value = row.get(name)
                if isinstance(value, (int, float)) and math.isfinite(value):
                    points.append((row["step"], float(value)))
            metrics.setdefault(metric, {})[split] = points
    drawn = [chart(name, series) for name, series in metrics.items() if any(series.values())][:_MAX_CHARTS]
    return f"<div style='display:flex;flex-wrap:wrap;gap:8px 20px'>{''.join(drawn)}</div>" if drawn else ""


def chart(name: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return curves over the steps as an SVG element."""
    series = {label: points for label, points in series.items() if points}
    colors = {}
    steps = []
    values = []
    for index, (label, points) in enumerate(series.items()):
        colors[label] = COLORS[_SPLITS.index(label) if label in _SPLITS else index]
        for step, value in points:
            steps.append(step)
            values.append(value)
    across = (min(steps), max(steps))
    down = (min(values), max(values))
    ends = (f"{across[0]:,}" if across[0] < across[1] else "", f"step {across[1]:,}")
    last_values = "; ".join(f"{label} {number(points[-1][1])}" for label, points in series.items())
    title = escape(f"{name}, {' to '.join(filter(None, ends))}; last: {last_values}")
    parts = [f"<text x='0' y='12' font-weight='600' fill='currentColor'>{escape(name)}</text>"]
    parts += _legend(colors)
    margin = max(_MIN_LEFT_MARGIN, 8 + math.ceil(_LETTER_WIDTH * max(len(number(value)) for value in down)))
    # A line at the largest and one at the smallest value; at an only value one in the middle.
    lines = [(0.0, down[1]), (1.0, down[0])] if down[0] < down[1] else [(0.5, down[0])]
    for share, value in lines:
        y = _TOP_MARGIN + share * (_HEIGHT - _TOP_MARGIN - _BOTTOM_MARGIN)
        end = _WIDTH - _RIGHT_MARGIN
        parts.append(f"<line x1='{margin}' x2='{end}' y1='{y:.0f}' y2='{y:.0f}' stroke='#888' stroke-opacity='.35'/>")
        parts.append(
            f"<text x='{margin - 5}' y='{y + 4:.0f}' text-anchor='end' fill='currentColor'>{number(value)}</text>"
        )
    for at, anchor, text in zip((margin, _WIDTH - _RIGHT_MARGIN), ("start", "end"), ends):
        parts.append(
            f"<text x='{at}' y='{_HEIGHT - 5}' text-anchor='{anchor}' fill='currentColor'>{escape(text)}</text>"
        )
    parts += [_curve(points, across, down, colors[label], margin) for label, points in series.items()]
    return (
        f"<svg role='img' aria-label='{title}' viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' "
        f"style='max-width:100%;height:auto' font-size='11' font-family='system-ui,sans-serif'>{''.join(parts)}</svg>"
    )


def _legend(colors: dict[str, str]) -> Iterator[str]:
    """Yield the label of each curve with its colour, from the right to the left."""
    x = float(_WIDTH - _RIGHT_MARGIN)
    for label, color in reversed(colors.items()):
        x -= _LETTER_WIDTH * len(label)
        yield f"<text x='{x:.0f}' y='12' fill='currentColor'>{escape(label)}</text>"
        yield f"<rect x='{x - 16:.0f}' y='6' width='12' height='4' rx='2' fill='{color}'/>"
        x -= 26


def _curve(
    points: Sequence[tuple[float, float]],
    across: tuple[float, float],
    down: tuple[float, float],
    color: str,
    margin: int,
) -> str:
    """Return the line through points, of a long one every so many; few points have dots."""
    every = math.ceil(len(points) / _MAX_POINTS)
    shown = list(points[::every])
    if (len(points) - 1) % every:  # The last one is shown in any case.
        shown.append(points[-1])
    places = [_place(step, value, across, down, margin) for step, value in shown]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.2' fill='{color}'/>" for x, y in places)
    line = f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.75' stroke-linejoin='round'/>"
    return line + (dots if len(places) <= 25 else "")


def _place(
    step: float, value: float, across: tuple[float, float], down: tuple[float, float], margin: int
) -> tuple[float, float]:
    """Return where a point is drawn, in pixels."""
    x = (step - across[0]) / (across[1] - across[0]) if across[1] > across[0] else 0.5
    y = (down[1] - value) / (down[1] - down[0]) if down[1] > down[0] else 0.5
    return margin + x * (_WIDTH - margin - _RIGHT_MARGIN), _TOP_MARGIN + y * (_HEIGHT - _TOP_MARGIN - _BOTTOM_MARGIN)


# -------------------------------------------------------------------------------------------- what a cell shows

_last: tuple[Any, str] = (None, "")  # The cell and the table that were drawn last.


def note_shown(text: str) -> None:
    """Note the table that the output of this cell shows."""
    global _last
    _last = (_cell(), text)


def is_shown_above(text: str) -> bool:
    """Return whether the output of a run in the same cell shows this table."""
    return _last == (_cell(), text) and _last[0] is not None


def _cell() -> Any:
    """Return the number of the cell that is executed; None outside of IPython."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython(), "execution_count", None) if ipython else None
