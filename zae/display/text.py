"""Numbers, durations and tables as text: the style of everything that zae shows."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from zae.errors import printable

__all__ = [
    "cell",
    "columns_of",
    "duration",
    "fitting",
    "format_size",
    "number",
    "table",
    "terminal_columns",
    "width_of",
    "wrapped",
]

_COLUMN_GAP = 2  # Spaces between two columns.
_RANKS = {"epoch": 0, "time": 3, "steps/s": 6, "step": 7}
_MIN_FLOAT_WIDTH = 7  # Columns of a float: most of them, so that a line does not shift the next ones.


def number(value: Any, digits: int = 5, *, aligned: bool = False) -> str:
    """Return a number as text.

    Parameters
    ----------
    value : object
        A number; anything else is returned as its ``str``.
    digits : int
        Significant digits of a number from 1, and one more than the decimals of a smaller one.
    aligned : bool
        Whether zeros at the end are kept, so that the numbers of a column or of a bar have the same length.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> [number(each) for each in (12345, 0.5, 2.34567, 1234.5678, 0.002, 0.00035, 1e-10, 2.5e7, float("nan"))]
    ['12345', '0.5', '2.3457', '1234.6', '0.002', '3.5e-4', '1e-10', '2.5e7', 'nan']
    >>> number(1234.5678, 3), number(12.345, 3), number(0.5, aligned=True)
    ('1235', '12.3', '0.5000')
    """
    if isinstance(value, Integral) or not isinstance(value, Real):
        return str(value)
    value = float(value)
    size = abs(value)
    if not math.isfinite(value) or not size:
        return f"{value:g}"
    if size < 1e-3 or size >= 99999.5:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size < 0.01 or (size < 1 and not aligned):
        return f"{value:.{digits - 1}g}"
    digits_before = len(str(int(size))) if size >= 1 else 1
    decimals = max(0, digits - digits_before)
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text and not aligned else text


def terminal_columns(stream: Any) -> int | None:
    """Return the width of the terminal that a stream writes to; None where it is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (AttributeError, OSError, ValueError):  # A pipe, a file, or an object of a notebook or a test.
        return None


def wrapped(line: str, columns: int | None, indent: int) -> list[str]:
    """Return a line as lines of a width; all but the first are indented. Without a width, it stays as it is."""
    if columns is None or len(line) < columns:
        return [line]
    indented = len(line) - len(line.lstrip())
    width = max(columns - 1, indent + 24)
    margin = " " * indent
    rows = textwrap.wrap(line.strip(), width - indented, subsequent_indent=margin[indented:], break_on_hyphens=False)
    return [f"{line[:indented]}{row}" for row in rows]


def duration(seconds: float) -> str:
    """Return a time in its two largest units.

    Parameters
    ----------
    seconds : float
        At least 0.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> [duration(each) for each in (0.25, 9.96, 75, 3600 * 26 + 60)]
    ['0.2s', '10s', '1m15s', '26h01m']
    """
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, remaining = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{minutes}m{remaining:02}s" if minutes else f"{remaining}s"


def format_size(count: float) -> str:
    """Return a number of bytes with a unit.

    Examples
    --------
    >>> [format_size(each) for each in (712, 38_420, 999_600_000, 61.3e9)]
    ['712 bytes', '38.4 kB', '1000 MB', '61.3 GB']
    """
    power = min(4, (len(str(int(count))) - 1) // 3)
    return f"{number(count / 1000**power, 3)} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def cell(value: Any) -> str:
    """Return what stands in a table: a number, or a name without control characters; "-" for None."""
    return "-" if value is None else printable(number(value, aligned=True), kept="")


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of rows, in the order in which they first come."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    return list(columns)


def table(rows: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> str:
    """Return rows as an aligned table with a header, and a mark after each row."""
    columns = columns_of(rows)
    lines = [[cell(name) for name in columns]]
    for row in rows:
        lines.append([cell(row.get(name)) for name in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line, mark in zip(lines, ["", *marks], strict=True):
        cells = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        texts.append("  ".join([*cells, mark]).rstrip())
    return "\n".join(texts)


def width_of(name: str, value: Any) -> int:
    """Return the columns that a metric needs in a table that grows line by line."""
    return max(len(cell(name)), len(cell(value)), _MIN_FLOAT_WIDTH if isinstance(value, float) else 0)


def fitting(widths: Mapping[str, int], columns: int) -> list[str]:
    """Return the names of the columns of a table that fit into a width, the most important ones first to be taken.

    These are the epoch, the losses, the metrics of the validation, the time, then all others, and the step at last.
    """

    def rank(name: str) -> int:
        if name in _RANKS:
            return _RANKS[name]
        if name.endswith("loss"):
            return 1
        if name.startswith("valid_"):
            return 2
        return 5 if name.startswith("lr") else 4

    fitting_names = set()
    used = -_COLUMN_GAP
    for name in sorted(widths, key=rank):
        if used + widths[name] + _COLUMN_GAP <= columns or name == "epoch":
            fitting_names.add(name)
            used += widths[name] + _COLUMN_GAP
    return [name for name in widths if name in fitting_names]
