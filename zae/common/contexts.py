"""The context that does nothing: what a seam returns that nobody overrides."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

__all__ = ["NOTHING"]


class _NoContext:
    """Entering it is on the path of every step: one object for all, and no function of Python's is called.

    To format an empty string takes any arguments, does nothing, and says by its empty result: let exceptions pass.
    """

    __enter__ = __exit__ = staticmethod("".format)


NOTHING = cast("AbstractContextManager[None]", _NoContext())
