"""Write the page of a report: one HTML file with everything in it, which requests nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

import zae
from zae.checkpoint.filesystem import replace_file
from zae.report.records import THROUGHPUT, Run, Series, metrics_of, split_key
from zae.report.sections import SECTIONS, overview, subtitle, text_of

__all__ = ["render", "write"]

MAX_CURVES = 100  # Metrics with a curve: a person does not look at a thousand.
_TITLES = {"lr": "learning rate", "grad_norm": "gradient norm", THROUGHPUT: "throughput (steps/s)"}


def render(runs: Sequence[Run]) -> str:
    """Return the page of one run, or of several that are compared.

    Parameters
    ----------
    runs : sequence of Run
        Their order is that of their colours.

    Returns
    -------
    str
        An HTML document.

    Examples
    --------
    >>> from zae.report.records import Records, Run
    >>> page = render([Run("first", Records.of([{"step": 1, "train/loss": 0.5}]))])
    >>> page.startswith("<!DOCTYPE html>"), "train/loss" in page
    (True, True)
    """
    metrics = metrics_of(runs)
    css, script = (_asset(name) for name in ("report.css", "report.js"))
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    excess = len(metrics) - MAX_CURVES
    left_out = f"<p class='note'>{excess} more metrics are not drawn.</p>" if excess > 0 else ""
    parts = {
        "title": text_of(title),
        "subtitle": subtitle(runs),
        "version": text_of(zae.__version__),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "overview": overview(runs),
        "left_out": left_out,
        "sections": "\n".join(filter(None, (section(runs) for section in SECTIONS))),
        "data": _embed(_payload(runs, metrics[:MAX_CURVES])),
        "css": css,
        "script": script,
        "css_hash": _hash(css),
        "script_hash": _hash(script),
    }
    return Template(_asset("report.html")).substitute(parts)


def write(path: Path, runs: Sequence[Run]) -> int:
    """Write the page of runs, in the place of one that is there, and return its size in bytes.

    CheckpointError says why it cannot be written.
    """
    page = render(runs).encode()
    replace_file(path, lambda put: put(page), len(page))
    return len(page)


def _payload(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, Any]:
    """Return what the script draws: numbers as little-endian 64-bit floats in base64; equal axes are there once."""
    axes: dict[tuple[str, str], int] = {}
    runs_data = []
    for run in runs:
        series = []
        for key, points in run.records.series.items():
            metric, split = split_key(key)
            if metric in metrics:
                axis = axes.setdefault((_pack(points.steps), _pack(_since(run, points))), len(axes))
                series.append({"metric": metric, "split": split, "axis": axis, "values": _pack(points.values)})
        epochs = run.records.epochs
        resumed = [session["step"] for session in run.records.sessions if session["step"]]
        runs_data.append(
            {
                "name": run.name,
                "series": series,
                "resumed": resumed,
                "epochs": list(zip(epochs.steps, map(int, epochs.values))),
            }
        )
    titles = [{"name": metric, "title": _TITLES.get(metric, metric)} for metric in metrics]
    return {"metrics": titles, "axes": list(axes), "runs": runs_data}


def _since(run: Run, series: Series) -> list[float]:
    """Return the seconds of each point since the run began; none where no time is known."""
    start = run.records.began
    return [] if math.isnan(start) else [round(time - start, 6) for time in series.times]


def _pack(values: Iterable[float]) -> str:
    return base64.b64encode(np.array([*values], dtype="<f8").tobytes()).decode()


def _embed(value: Any) -> str:
    """Return JSON that no text in it can end as the content of a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return files("zae.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
