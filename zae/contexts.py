"""The context that does nothing: what a seam returns that nobody overrides."""

from __future__ import annotations

from contextlib import AbstractContextManager

__all__ = ["NOTHING"]


class _NoContext(AbstractContextManager[None]):
    """Entering it is on the path of every step, so there is one object for all."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


NOTHING = _NoContext()
