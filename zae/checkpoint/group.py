"""What several ranks do together, so that an error of one is the error of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from zae import errors
from zae.checkpoint.filesystem import not_saved
from zae.errors import CheckpointError, ZaeError

__all__ = ["Group"]

_Result = TypeVar("_Result")


class Group(NamedTuple):
    """The ranks that do something together, for instance save; by default this process alone."""

    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def together(self, function: Callable[[], _Result], where: Path, needed: int = 0) -> list[_Result]:
        """Call a function on every rank, and return what each returned; if one fails, all of them raise its error.

        An error of the disk names ``where``, and how many bytes were ``needed`` there. Where rank 0 writes alone,
        the others learn from it that this failed.
        """
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
            if isinstance(raised, OSError) and not isinstance(raised, CheckpointError):
                error = not_saved(where, raised, needed)
        outcomes = self.gather((result, None if error is None else _describe(error)))
        if error is not None:
            raise error
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                raise _rebuild(rank, *failed)
        return [result for result, _ in outcomes]


def _describe(error: BaseException) -> tuple[str, str, int | None]:
    """Return the name of an error of zae, else "", its text, and the number of the system."""
    name = type(error).__name__
    is_ours = isinstance(error, ZaeError) and getattr(errors, name, None) is type(error)
    return name if is_ours else "", str(error) if is_ours else f"{name}: {error}", getattr(error, "errno", None)


def _rebuild(rank: int, name: str, text: str, errno: int | None) -> Exception:
    """Return the error of another rank; `zae.distributed.rank_process` reports the original in its place."""
    error: ZaeError = getattr(errors, name or "CheckpointError")(f"rank {rank}: {text}")
    if isinstance(error, CheckpointError):
        error.errno = errno
    error.from_rank = rank
    return error
