"""Answer: what a tool found, for a command to print."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Answer"]


class Answer(NamedTuple):
    """What a tool found: data for ``--json``, and the same as text; and the exit status of its command."""

    data: Any
    text: str
    status: int = 0
