"""What a trainer needs to know about any scheduler: its length, its parts, and how it is stepped."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from zae.errors import ConfigError

__all__ = [
    "is_per_step",
    "is_plateau",
    "milestones_of",
    "own_length",
    "parts_of",
    "planned_length",
    "steps_taken",
    "takes_total_steps",
]


def planned_length(scheduler: object) -> int | None:
    """Return the number of ``step()`` calls after which a scheduler must not be stepped, or None.

    ``OneCycleLR`` raises after ``total_steps`` calls. ``CosineAnnealingScheduler``, ``SchedulerChain``
    and those of `cosine`, `linear` and `wsd` do not, but should not be trained further at their last rate. Among
    torch's combinations, ``ChainedScheduler`` ends with the first of its parts, and ``SequentialLR`` with its last
    part, or with a ``OneCycleLR`` that ends before its milestone.

    Returns
    -------
    int or None
        Number of calls, counted from the scheduler's creation.

    Examples
    --------
    >>> import torch
    >>> from zae.schedulers import CosineAnnealingScheduler
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> planned_length(CosineAnnealingScheduler(optimizer, total_iters=30))
    30
    >>> planned_length(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20))
    20
    >>> planned_length(torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)) is None
    True
    """
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    if getattr(scheduler, "ends", False):  # Those of this package.
        return int(scheduler.total_iters)  # type: ignore[attr-defined]
    if isinstance(scheduler, ChainedScheduler):
        lengths = map(planned_length, parts_of(scheduler))
        return min((length for length in lengths if length is not None), default=None)
    if isinstance(scheduler, SequentialLR):
        return _sequential_length(scheduler)
    return None


def own_length(scheduler: object) -> int | None:
    """Return the length of a schedule in ``step()`` calls, whether or not it may be stepped further.

    It is ``total_steps``, ``total_iters`` or ``T_max``. A ``SequentialLR`` ends with its last part, a
    ``ChainedScheduler`` with the longest of its parts.

    Returns
    -------
    int or None
        None for one without an end, such as ``StepLR`` or ``LambdaLR``.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> own_length(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30))
    30
    >>> own_length(torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)) is None
    True
    """
    if isinstance(scheduler, ChainedScheduler):
        return max((length for length in map(own_length, parts_of(scheduler)) if length is not None), default=None)
    if isinstance(scheduler, SequentialLR):
        milestones, last = milestones_of(scheduler), own_length(parts_of(scheduler)[-1])
        return None if last is None or not milestones else milestones[-1] + last
    lengths = [getattr(scheduler, name, None) for name in ("total_steps", "total_iters", "T_max")]
    return next((int(value) for value in lengths if isinstance(value, (int, float)) and 1 <= value < math.inf), None)


def steps_taken(scheduler: object) -> int:
    """Return the number of ``step()`` calls of a scheduler since its creation, including those before a resume.

    Parameters
    ----------
    scheduler : object
        A scheduler with ``last_epoch``, as torch's have, or torch's ``ChainedScheduler``, which has none itself.

    Returns
    -------
    int
        Number of calls.

    Raises
    ------
    ConfigError
        If the scheduler has no such counter.

    Examples
    --------
    >>> import torch
    >>> from zae.schedulers import CosineAnnealingScheduler
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = CosineAnnealingScheduler(optimizer, total_iters=30)
    >>> optimizer.step()
    >>> scheduler.step()
    >>> steps_taken(scheduler)
    1
    """
    if isinstance(scheduler, ChainedScheduler):
        return steps_taken(parts_of(scheduler)[0])
    taken = getattr(scheduler, "last_epoch", None)
    if not isinstance(taken, int):
        raise ConfigError(
            f"{type(scheduler).__name__} has no integer attribute last_epoch, found {taken!r}; "
            f"derive it from torch.optim.lr_scheduler.LRScheduler"
        )
    return taken


def is_plateau(scheduler: object) -> bool:
    """Return whether a scheduler's ``step`` needs a metric, as that of ``ReduceLROnPlateau`` does.

    Returns
    -------
    bool
        True for ``ReduceLROnPlateau`` and what is derived from it.

    Examples
    --------
    >>> import torch
    >>> from zae.schedulers import WarmUpScheduler
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> is_plateau(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    True
    >>> is_plateau(WarmUpScheduler(optimizer, total_iters=3))
    False
    """
    return isinstance(scheduler, ReduceLROnPlateau)


def is_per_step(scheduler: object, default: bool) -> bool:
    """Return whether a scheduler, or a factory, counts optimizer steps: as it states itself, else the default."""
    return bool(getattr(scheduler, "steps_on_batch", default))


def parts_of(scheduler: object) -> list[Any]:
    """Return the schedulers that a scheduler consists of."""
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in vars(scheduler).values()]
    kinds = (LRScheduler, ReduceLROnPlateau)
    return [part for several in lists for part in several if isinstance(part, kinds) and part is not scheduler]


def milestones_of(scheduler: object) -> list[int] | None:
    """Return the milestones of a SequentialLR, or None if torch has no such attribute."""
    return getattr(scheduler, "_milestones", None)


def _sequential_length(scheduler: SequentialLR) -> int | None:
    """Return where a SequentialLR ends; a part's step 0 is at its milestone."""
    milestones, limits = milestones_of(scheduler), []
    if not milestones:
        return None
    for part, start, stop in zip(parts_of(scheduler), [0, *milestones], [*milestones, None], strict=True):
        length = planned_length(part)
        # Before the last milestone only OneCycleLR ends: the others keep their last rate until the next part.
        if length is not None and (stop is None or (isinstance(part, OneCycleLR) and stop - 1 - start > length)):
            limits.append(start + length)
    return min(limits, default=None)


def takes_total_steps(factory: Callable[..., Any]) -> bool:
    """Return whether a factory takes ``total_steps``: as its second parameter, or as a required one."""
    needs_total: bool | None = getattr(factory, "needs_total", None)  # One of `zae.schedulers.warmup` says it.
    if needs_total is not None:
        return needs_total
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # A builtin may not say.
        return False
    for place, parameter in enumerate(parameters):
        if parameter.name == "total_steps":
            # A partial that has set it leaves it behind as keyword-only, with a default.
            return parameter.default is parameter.empty or (
                place == 1 and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            )
    return False
