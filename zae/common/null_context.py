"""A context that does nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

__all__ = ["NULL_CONTEXT"]


class _NullContext:
    """As ``contextlib.nullcontext()``, without a Python function to call: a step enters it several times.

    ``"".format`` accepts any arguments, and returns an empty string, which lets exceptions pass.
    """

    __enter__ = staticmethod("".format)
    __exit__ = staticmethod("".format)


NULL_CONTEXT = cast("AbstractContextManager[None]", _NullContext())
"""The return value of the hooks for contexts where no add-on overrides them."""
