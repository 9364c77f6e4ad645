"""Draw a search: its scores in order, each parameter against the score, and all parameters side by side."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zae.display.html import escape
from zae.display.text import number
from zae.report.records import Series
from zae.report.text_plot import draw

if TYPE_CHECKING:
    from zae.search.result import SearchResult, TrialResult

__all__ = ["SearchPlot", "page"]

_DONE, _BEST, _PRUNED = "#3b82f6", "#dd6b10", "#7a8699"  # Each can be seen on white and on black.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 320, 190, 52, 12, 28, 26
_MOST = 400  # Trials in a picture at most: the last ones.
_SLICES = 12


class SearchPlot:
    """The plots of a search; it prints as text, and is a picture in a notebook.

    Parameters
    ----------
    result : SearchResult
        The search.
    """

    def __init__(self, result: SearchResult) -> None:
        self._result = result
        self._ended = [each for each in result.trials if each.values and math.isfinite(each.values[0])][-_MOST:]
        self._best = {each.number for each in result.best_trials}

    def text(self, width: int = 78, height: int = 12, *, is_ascii: bool = False) -> str:
        """Return the scores of the trials, in order, as text."""
        if not self._ended:
            return "no trial has ended with a score"
        done = [each for each in self._ended if each.state == "complete"]
        numbers = [each.number for each in self._ended]
        curves = {"score": Series(numbers, [each.values[0] for each in self._ended], [])}
        if done and len(self._result.directions) == 1:
            curves["best so far"] = Series([each.number for each in done], self._best_so_far(done), [])
        ends = (f"trial {numbers[0]}", f"trial {numbers[-1]}")
        return draw(curves, width, height, ends=ends, is_ascii=is_ascii).rstrip("\n")

    def __str__(self) -> str:
        return self.text()

    def svg(self) -> str:
        """Return the plots as HTML with SVG elements."""
        if not self._ended:
            return "<p>no trial has ended with a score</p>"
        pictures = [self._history(), *(self._slice(name) for name in [*self._result.scales][:_SLICES])]
        small = "".join(f"<div>{each}</div>" for each in pictures)
        return f"<div style='display:flex;flex-wrap:wrap;gap:8px 20px'>{small}</div>{self._parallel()}"

    def _repr_html_(self) -> str:
        return self.svg()

    def _best_so_far(self, done: Sequence[TrialResult]) -> list[float]:
        choose = min if self._result.directions[0] == "minimize" else max
        return [choose(each.values[0] for each in done[: at + 1]) for at in range(len(done))]

    # --------------------------------------------------------------------------------------------------- pictures

    def _history(self) -> str:
        """Return the score of each trial, and the best so far."""
        axis, scores = _Axis([each.number for each in self._ended]), self._scores()
        done = [each for each in self._ended if each.state == "complete"]
        line = ""
        if done and len(self._result.directions) == 1:
            steps, last = list[str](), None
            for each, value in zip(done, self._best_so_far(done)):
                x, y = self._x(axis.share(each.number)), self._y(scores.share(value))
                steps += [*([f"{x:.1f},{last:.1f}"] if last is not None else []), f"{x:.1f},{y:.1f}"]
                last = y
            line = f"<polyline points='{' '.join(steps)}' fill='none' stroke='{_BEST}' stroke-width='1.5'/>"
        return self._picture("score of each trial", axis, [each.number for each in self._ended], line)

    def _slice(self, name: str) -> str:
        """Return the scores against one parameter."""
        values = [each.params.get(name) for each in self._ended]
        return self._picture(name, _Axis(values, self._result.scales[name]), values)

    def _picture(self, title: str, axis: _Axis, values: Sequence[Any], line: str = "") -> str:
        scores = self._scores()
        parts = [_text(0, 14, title, "start", bold=True)]
        for share, label in scores.labels():
            y = self._y(share)
            parts += [_rule(_LEFT, y, _WIDTH - _RIGHT, y), _text(_LEFT - 6, y + 4, label, "end")]
        for share, label in axis.labels():
            anchor = "middle" if 0 < share < 1 else "start" if share == 0 else "end"
            parts.append(_text(self._x(share), _HEIGHT - 8, label, anchor))
        parts.append(line)
        for each, value in sorted(zip(self._ended, values), key=lambda pair: pair[0].number in self._best):
            if axis.has(value):
                parts.append(self._dot(each, self._x(axis.share(value)), self._y(scores.share(each.values[0]))))
        return _svg(_WIDTH, _HEIGHT, f"{title} and score of {len(self._ended)} trials", parts)

    def _dot(self, each: TrialResult, x: float, y: float) -> str:
        """Return the dot of a trial, with its number for a pointer."""
        title = f"trial {each.number}: {number(each.values[0])}, {each.state}"
        color = _BEST if each.number in self._best else _DONE
        look = f"fill='none' stroke='{_PRUNED}'" if each.state == "pruned" else f"fill='{color}'"
        radius = 4.5 if each.number in self._best else 3
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' {look}><title>{escape(title)}</title></circle>"

    def _parallel(self) -> str:
        """Return a line for each trial through its parameters and its score."""
        names = [name for name in self._result.scales if any(name in each.params for each in self._ended)][:_SLICES]
        if len(names) < 2:
            return ""
        axes = {
            name: _Axis([each.params.get(name) for each in self._ended], self._result.scales[name]) for name in names
        }
        axes["score"] = self._scores()
        gap = max(110, min(220, 900 // len(axes)))
        left, top, bottom = 60, 44, 196
        places = {name: left + at * gap for at, name in enumerate(axes)}
        parts = []
        for each in sorted(self._ended, key=lambda one: one.number in self._best):
            values = {**each.params, "score": each.values[0]}
            points = [
                f"{places[name]},{bottom - axis.share(values[name]) * (bottom - top):.1f}"
                for name, axis in axes.items() if name in values and axis.has(values[name])
            ]  # fmt: skip
            is_best, is_done = each.number in self._best, each.state == "complete"
            color, opacity = _BEST if is_best else _DONE if is_done else _PRUNED, 1 if is_best else 0.5
            dashes = "" if is_done else " stroke-dasharray='3 3'"
            parts.append(
                f"<polyline points='{' '.join(points)}' fill='none' stroke='{color}' stroke-opacity='{opacity}' "
                f"stroke-width='{2.5 if is_best else 1.2}'{dashes}><title>trial {each.number}</title></polyline>"
            )
        for name, axis in axes.items():
            x = places[name]
            parts += [_rule(x, top, x, bottom, 0.9), _text(x, 16, name, "middle", bold=True)]
            for share, label in axis.labels():
                y = bottom - share * (bottom - top)
                parts.append(_text(x, top - 8 if share == 1 else bottom + 16, label, "middle") if share in (0, 1)
                             else _text(x + 6, y + 4, label, "start"))  # fmt: skip
        width = places["score"] + 60
        return (
            f"<div style='overflow-x:auto'>{_svg(width, 222, 'parameters and score of each trial', parts, False)}</div>"
        )

    def _scores(self) -> _Axis:
        return _Axis([each.values[0] for each in self._ended])

    def _x(self, share: float) -> float:
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, share: float) -> float:
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


class _Axis:
    """Where the values of a parameter or of a score lie, as shares from 0 to 1."""

    def __init__(self, values: Sequence[Any], scale: Any = "linear") -> None:
        self._choices = list(scale) if isinstance(scale, list) else None
        self._is_log = scale == "log"
        numbers = [float(each) for each in values if self._choices is None and self.has(each)]
        self._low, self._high = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)

    def has(self, value: Any) -> bool:
        """Return whether a value can be drawn."""
        if self._choices is not None:
            return value in self._choices
        return isinstance(value, (int, float)) and math.isfinite(value) and (value > 0 or not self._is_log)

    def share(self, value: Any) -> float:
        if self._choices is not None:
            return self._choices.index(value) / (len(self._choices) - 1) if len(self._choices) > 1 else 0.5
        low, high, at = map(self._scaled, (self._low, self._high, value))
        return (at - low) / (high - low) if high > low else 0.5

    def labels(self) -> list[tuple[float, str]]:
        """Return the texts along the axis, and where they are."""
        if self._choices is not None:
            return [(self.share(each), str(each)[:12]) for each in self._choices]
        ends = [self._low, self._high] if self._low < self._high else [self._low]
        return [(self.share(each), number(each, 3)) for each in ends]

    def _scaled(self, value: float) -> float:
        return math.log(value) if self._is_log else float(value)


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False) -> str:
    weight = " font-weight='600'" if bold else ""
    return f"<text x='{x:.0f}' y='{y:.0f}' text-anchor='{anchor}'{weight} fill='currentColor'>{escape(text)}</text>"


def _rule(x0: float, y0: float, x1: float, y1: float, opacity: float = 0.35) -> str:
    return f"<line x1='{x0:.0f}' y1='{y0:.0f}' x2='{x1:.0f}' y2='{y1:.0f}' stroke='#888' stroke-opacity='{opacity}'/>"


def _svg(width: int, height: int, label: str, parts: Sequence[str], shrinks: bool = True) -> str:
    style = "max-width:100%;height:auto" if shrinks else "display:block"
    return (
        f"<svg role='img' aria-label='{escape(label)}' viewBox='0 0 {width} {height}' width='{width}' "
        f"style='{style}' font-size='11.5' font-family='system-ui,sans-serif'>{''.join(parts)}</svg>"
    )


def page(title: str, conclusion: str, plot: SearchPlot, table: str) -> str:
    """Return a whole page, readable on light and on dark."""
    best = f"<span style='color:{_BEST}'>&#9679;</span> best, <span style='color:{_DONE}'>&#9679;</span> finished, "
    best += f"<span style='color:{_PRUNED}'>&#9675;</span> pruned"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; max-width: 1120px; padding: 16px 20px 40px; font: 14px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 22px; margin: 8px 0 2px; overflow-wrap: anywhere; }}
p {{ margin: 0 0 14px; opacity: .8; }}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(conclusion)} &middot; {best}</p>
{plot.svg()}
{table}
</body>
</html>
"""
