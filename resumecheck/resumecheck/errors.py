"""What ends a check."""

from __future__ import annotations

__all__ = ["Refused", "Stopped"]


class Refused(Exception):
    """What cannot be checked, and what to do."""


class Stopped(BaseException):
    """A signal, or the end of the time: what was seen until then is reported."""
