"""A context that does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

__all__ = ["NULL_CONTEXT", "both"]


class _NullContext:
    """As ``contextlib.nullcontext()``, without a Python function to call: a step enters it several times.

    ``"".format`` accepts any arguments, and returns an empty string, which lets exceptions pass.
    """

    __enter__ = staticmethod("".format)
    __exit__ = staticmethod("".format)


NULL_CONTEXT = cast("AbstractContextManager[None]", _NullContext())
"""The return value of the hooks for contexts where no add-on overrides them."""


def both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return a context that enters two of them; the other one itself where one does nothing."""
    if inner is NULL_CONTEXT:
        return outer
    return inner if outer is NULL_CONTEXT else _both(outer, inner)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
