"""Schedules to be stepped in any loop: a ramp up, half a cosine, and a chain of them."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from itertools import accumulate
from typing import Annotated, Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zae.arguments import Interval, check_argument
from zae.errors import ConfigError

__all__ = ["CosineAnnealingScheduler", "SchedulerBase", "SchedulerChain", "StepSchedule", "WarmUpScheduler"]

Length: TypeAlias = Annotated[
    int, Interval("[1, inf)"), "a whole number of at least 1, the scheduler steps; for example total_iters=100"
]


class StepSchedule(LRScheduler):
    """A schedule whose rates are a function of the step; subclasses define ``total_iters`` and ``lr_at``."""

    total_iters: int | None
    ends = False  # Whether a run beyond ``total_iters`` steps is refused.

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        # With lr=tensor(...) these are tensors; the schedule is computed, and saved, in floats.
        self.base_lrs: list[Any] = [float(lr) for lr in self.base_lrs]

    def lr_at(self, step: int) -> list[float]:
        """Return the rate of every param group after ``step`` scheduler steps."""
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        """Return the rate of every param group at the current step, ``last_epoch``."""
        return self.lr_at(self.last_epoch)


class SchedulerBase(StepSchedule, ABC):
    """The base of schedules between ``eta_min`` and the base rate: a subclass defines ``lr_at(step)``.

    Parameters
    ----------
    optimizer : Optimizer
        Its groups' rates are the base rates.
    total_iters : int
        The length, in steps.
    eta_min : float
        The lowest rate.

    Raises
    ------
    ConfigError
        A value is out of its range.

    Examples
    --------
    >>> import torch
    >>> class LinearScheduler(SchedulerBase):
    ...     def lr_at(self, step):
    ...         left = max(0.0, 1 - step / self.total_iters)
    ...         return [self.eta_min + (base - self.eta_min) * left for base in self.base_lrs]
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> [LinearScheduler(optimizer, total_iters=4).lr_at(step)[0] for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    total_iters: int

    def __init__(self, optimizer: Optimizer, total_iters: int, eta_min: float = 0.0) -> None:
        name = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"{name}(optimizer=...) must be a torch.optim.Optimizer, found {type(optimizer).__name__}; "
                f"write {name}(torch.optim.SGD(model.parameters(), lr=0.1), total_iters=100)"
            )
        self.total_iters = check_argument(f"{name}: total_iters", total_iters, Length)
        self.eta_min = _floor(eta_min, optimizer, name)
        super().__init__(optimizer)

    @abstractmethod
    def lr_at(self, step: int) -> list[float]:
        """Return the rate of every param group after ``step`` scheduler steps."""


class WarmUpScheduler(SchedulerBase):
    """Raise the rate linearly from ``eta_min`` to the base rate, then keep it.

    After ``t`` steps the rate is ``eta_min + (base - eta_min) * t / total_iters``, from ``total_iters`` steps on
    it is ``base``. With ``eta_min=0`` the first update therefore changes nothing.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its param groups' rates at this moment are the base rates.
    total_iters : int
        Number of ``step()`` calls between the two rates, at least 1.
    eta_min : float, default 0.0
        The lowest rate, at the beginning or the end; not above the base rate of any param group.

    Raises
    ------
    ConfigError
        If an argument has an invalid value.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    >>> warm_up = WarmUpScheduler(optimizer, total_iters=4)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates += warm_up.get_last_lr()
    ...     optimizer.step()
    ...     warm_up.step()
    >>> rates
    [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 0.8]
    """

    def lr_at(self, step: int) -> list[float]:
        if step >= self.total_iters:  # The formula may differ from the base rate by a rounding.
            return list(self.base_lrs)
        low = self.eta_min
        return [low + (base - low) * step / self.total_iters for base in map(float, self.base_lrs)]


class CosineAnnealingScheduler(SchedulerBase):
    """Lower the rate from the base rate to ``eta_min`` along half a cosine, then keep it.

    After ``t`` steps the rate is ``eta_min + (base - eta_min) * (1 + cos(pi * t / total_iters)) / 2``: equation 5 of
    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts" (ICLR 2017), without the restarts.
    Beyond ``total_iters`` it does not rise again. Arguments and errors are those of `WarmUpScheduler`.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> cosine = CosineAnnealingScheduler(optimizer, total_iters=4, eta_min=0.5)
    >>> [round(cosine.lr_at(step)[0], 4) for step in range(6)]
    [1.0, 0.9268, 0.75, 0.5732, 0.5, 0.5]
    """

    ends = True

    def lr_at(self, step: int) -> list[float]:
        if step <= 0:  # The formula may differ from the base rate by a rounding.
            return list(self.base_lrs)
        low = self.eta_min
        if step >= self.total_iters:
            return [low] * len(self.base_lrs)
        wave = 1 + math.cos(math.pi * step / self.total_iters)
        return [low + (base - low) * wave / 2 for base in map(float, self.base_lrs)]


class SchedulerChain(StepSchedule):
    """Run schedules one after another, each over its own ``total_iters`` steps.

    The first has the steps from 0, the next begins with its own step 0 where that one ends, and so on; after the
    last has ended, its last rate stays. Only the chain is stepped, not its parts.

    Parameters
    ----------
    *schedulers : WarmUpScheduler or CosineAnnealingScheduler or SchedulerChain
        At least one, all of the same optimizer.

    Attributes
    ----------
    schedulers : tuple
        The parts, in order.
    total_iters : int
        The sum of their lengths.
    next_iters : list of int
        The step at which each part ends, and the next one begins.

    Raises
    ------
    ConfigError
        If there is no part, or one that cannot be chained, or if they have different optimizers.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> chain = SchedulerChain(
    ...     WarmUpScheduler(optimizer, total_iters=2), CosineAnnealingScheduler(optimizer, total_iters=4)
    ... )
    >>> chain.total_iters
    6
    >>> [round(chain.lr_at(step)[0], 4) for step in range(8)]
    [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    >>> optimizer.param_groups[0]["lr"]
    0.0
    """

    ends = True

    def __init__(self, *schedulers: LRScheduler) -> None:
        # Not called "_schedulers": SequentialLR of torch would then rewind the parts, and not the chain.
        self.schedulers = _chainable(schedulers)
        self.next_iters = list(accumulate(part.total_iters or 0 for part in self.schedulers))
        *self._starts, self.total_iters = 0, *self.next_iters
        super().__init__(self.schedulers[0].optimizer)

    def lr_at(self, step: int) -> list[float]:
        index = max((i for i, start in enumerate(self._starts) if start <= step), default=0)
        return self.schedulers[index].lr_at(step - self._starts[index])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the chain, and under ``"schedulers"`` that of each part."""
        return {**super().state_dict(), "schedulers": [part.state_dict() for part in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of a chain of as many parts."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "schedulers"})
        for part, saved in zip(self.schedulers, state_dict["schedulers"], strict=True):
            part.load_state_dict(saved)


def _floor(value: object, optimizer: Optimizer, name: str) -> float:
    """Return ``eta_min`` as a float that is not above any base rate."""
    least = min((float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups), default=math.inf)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) <= least or math.isinf(value):  # type: ignore[arg-type]
        raise ConfigError(
            f"{name}(eta_min=...) must be a finite number from 0 to the least learning rate of the param groups, "
            f"{least!r}, found {value!r}; write eta_min=0.0"
        )
    return float(value)  # type: ignore[arg-type]


def _chainable(schedulers: tuple[object, ...]) -> tuple[StepSchedule, ...]:
    """Return the parts of a chain, all of them schedules of one optimizer."""
    parts = [scheduler for scheduler in schedulers if isinstance(scheduler, StepSchedule) and scheduler.total_iters]
    if not parts or len(parts) < len(schedulers):
        kinds = ", ".join(type(scheduler).__name__ for scheduler in schedulers) or "nothing"
        raise ConfigError(
            f"SchedulerChain holds WarmUpScheduler, CosineAnnealingScheduler and SchedulerChain, one by one, and got "
            f"{kinds}; write SchedulerChain(WarmUpScheduler(optimizer, 10), CosineAnnealingScheduler(optimizer, 90)), "
            "or torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones)"
        )
    if any(part.optimizer is not parts[0].optimizer for part in parts):
        raise ConfigError(
            "SchedulerChain has schedulers of two optimizers; build every one on the same optimizer, or a chain for "
            "each"
        )
    return tuple(parts)
