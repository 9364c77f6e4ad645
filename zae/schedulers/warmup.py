"""Schedules as long as the run, with a warm-up: cosine, linear, inverse square root, warmup-stable-decay.

Each function returns a factory, to be given to a trainer as ``scheduler=``. The trainer calls it with its optimizer and
with the number of optimizer steps of the run, and steps the schedule after each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from torch.optim import Optimizer

from zae.arguments import Interval, check_argument
from zae.errors import ConfigError
from zae.schedulers.ramps import StepSchedule

__all__ = ["Factory", "WarmUpSchedule", "cosine", "inverse_sqrt", "linear", "wsd"]

_TIMESCALE = 10_000  # Steps of inverse_sqrt without a warm-up at the base rate, as in other libraries.

Span: TypeAlias = (
    Annotated[int, Interval("[0, inf)"), "a number of optimizer steps, for instance 100"]
    | Annotated[float, Interval("[0, 1]"), "a share of the run in [0, 1], for instance 0.05"]
)
Final: TypeAlias = Annotated[float, Interval("[0, 1]"), "the part of the base rate at the end, in [0, 1]: final=0.1"]
Total: TypeAlias = Annotated[int, Interval("[1, inf)"), "the number of optimizer steps, which a trainer knows"] | None


class WarmUpSchedule(StepSchedule):
    """A warm-up from 0, and a function of the steps after it; `cosine` and the others make it.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The rates of its param groups are the base rates; each is multiplied by the same factor.
    shape : {"cosine", "linear", "inverse_sqrt", "wsd"}
        What follows the warm-up.
    warmup, decay : int
        Steps of the warm-up, and of the decay of "wsd".
    total_iters : int or None
        Steps of the run; None for "inverse_sqrt", which has no end.
    final : float
        The factor at the end.
    """

    steps_on_batch = True  # A trainer steps it after each optimizer step, whatever its own option is.

    def __init__(
        self, optimizer: Optimizer, shape: str, warmup: int, total_iters: int | None, decay: int, final: float
    ) -> None:
        self.shape, self.warmup, self.total_iters, self.decay, self.final = shape, warmup, total_iters, decay, final
        self.ends = total_iters is not None and (shape != "wsd" or decay > 0)
        super().__init__(optimizer)

    def factor_at(self, step: int) -> float:
        """Return the factor of the base rates after ``step`` scheduler steps."""
        if step < self.warmup:
            return step / self.warmup
        if self.total_iters is None:
            timescale = self.warmup or _TIMESCALE
            return math.sqrt(timescale / (timescale + step - self.warmup))
        start = self.total_iters - self.decay if self.shape == "wsd" else self.warmup
        if step < start or start == self.total_iters:
            return 1.0
        share = min(1.0, (step - start) / (self.total_iters - start))
        factors = {"cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share, "wsd": 1 - math.sqrt(share)}
        return self.final + (1 - self.final) * factors[self.shape]

    def lr_at(self, step: int) -> list[float]:
        """Return the rate of every param group after ``step`` scheduler steps."""
        factor = self.factor_at(step)
        return [float(base) * factor for base in self.base_lrs]


@dataclass(frozen=True)
class Factory:
    """Makes a `WarmUpSchedule` of an optimizer and the number of optimizer steps of a run."""

    shape: str
    warmup: int | float
    decay: int | float = 0
    final: float = 0.0
    total_steps: int | None = None
    steps_on_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check what is known before the run."""
        for name, kind in {"warmup": Span, "decay": Span, "final": Final, "total_steps": Total}.items():
            object.__setattr__(self, name, check_argument(f"{self.shape}: {name}", getattr(self, name), kind))

    @property
    def needs_total(self) -> bool:
        """Whether the number of steps of the run must be given to the call."""
        return self.total_steps is None and (self.shape != "inverse_sqrt" or isinstance(self.warmup, float))

    def __call__(self, optimizer: Optimizer, total_steps: int | None = None) -> WarmUpSchedule:
        """Return the schedule of a run with so many optimizer steps."""
        total = self.total_steps or total_steps
        if total is None and self.needs_total:
            raise ConfigError(
                f"{self!r} needs the number of optimizer steps of the run, which is not known: the loader has no "
                "length; write run(..., max_steps=1000), run(..., steps_per_epoch=100), or "
                f"zae.schedulers.{self.shape}(..., total_steps=1000)"
            )
        warmup, decay = (round(n * (total or 0)) if isinstance(n, float) else n for n in (self.warmup, self.decay))
        if self.shape == "inverse_sqrt":
            total = None
        elif warmup + decay > (total or 0):
            longer = f"a warm-up of {warmup} steps" + f" and a decay of {decay}" * (decay > 0)
            shares = "warmup=0.05" + ", decay=0.2" * (self.shape == "wsd")
            raise ConfigError(
                f"{self!r} has {longer}, and the run has {total} optimizer steps; train longer, or write shares of the "
                f"run: zae.schedulers.{self.shape}({shares})"
            )
        return WarmUpSchedule(optimizer, self.shape, warmup, total, decay, float(self.final))

    def __repr__(self) -> str:
        arguments = {"warmup": self.warmup}
        arguments |= {"decay": self.decay} if self.shape == "wsd" else {}
        arguments |= {"final": self.final} if self.final else {}
        arguments |= {"total_steps": self.total_steps} if self.total_steps is not None else {}
        return f"zae.schedulers.{self.shape}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def cosine(*, warmup: int | float = 0.05, final: float = 0.0, total_steps: int | None = None) -> Factory:
    """Raise the rate linearly, then lower it along half a cosine until the end of the run.

    After ``t`` optimizer steps, with ``w`` steps of warm-up and ``T`` in all, the rate is the base rate times ``t / w``
    up to ``w``, then times ``final + (1 - final) * (1 + cos(pi * (t - w) / (T - w))) / 2``: equation 5 of Loshchilov
    and Hutter, "SGDR" (ICLR 2017), after the gradual warm-up of Goyal et al. (2017), section 2.2.

    Parameters
    ----------
    warmup : int or float
        Optimizer steps (int), or the share of the run in [0, 1] (float), rounded to whole steps.
    final : float
        The part of the base rate at the end, in [0, 1]; each param group has its own base rate.
    total_steps : int, optional
        Optimizer steps of the run. A trainer knows them; a loop of your own, or a loader without a length, needs them.

    Returns
    -------
    callable
        A factory for ``scheduler=``; called with an optimizer it returns an ``LRScheduler``.

    Raises
    ------
    ConfigError
        An argument is out of range; when the run is set up, a warm-up longer than it, or an unknown length.

    Examples
    --------
    >>> import torch, zae
    >>> class Task(zae.Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> trainer = Task(
    ...     torch.nn.Linear(2, 1), "cpu", optimizer=torch.optim.AdamW, scheduler=zae.schedulers.cosine(warmup=0.2)
    ... )
    >>> [round(rate, 6) for rate in trainer.plan(2, [torch.ones(4, 2)] * 5).learning_rates["lr"]]
    [0.0, 0.0005, 0.001, 0.000962, 0.000854, 0.000691, 0.0005, 0.000309, 0.000146, 3.8e-05]

    In a loop of your own:

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = zae.schedulers.cosine(warmup=2, total_steps=10)(optimizer)
    """
    return Factory("cosine", warmup, final=final, total_steps=total_steps)


def linear(*, warmup: int | float = 0.05, final: float = 0.0, total_steps: int | None = None) -> Factory:
    """Raise the rate linearly, then lower it linearly until the end of the run.

    After the warm-up the base rate is multiplied by ``final + (1 - final) * (T - t) / (T - w)``: Devlin et al., "BERT"
    (2019), appendix A.2.

    Arguments, errors and the returned factory are those of `cosine`.

    Examples
    --------
    >>> import torch, zae
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = zae.schedulers.linear(warmup=2, total_steps=6)(optimizer)
    >>> [scheduler.lr_at(step)[0] for step in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return Factory("linear", warmup, final=final, total_steps=total_steps)


def inverse_sqrt(*, warmup: int | float = 0.05, total_steps: int | None = None) -> Factory:
    """Raise the rate linearly, then lower it by the inverse square root of the steps, without an end.

    After ``w`` steps of warm-up the base rate is multiplied by ``sqrt(w / t)``: equation 3 of Vaswani et al.,
    "Attention Is All You Need" (2017), section 5.3, with the base rate at the end of the warm-up. Without a
    warm-up it is ``sqrt(10000 / (10000 + t))``.

    Arguments and errors are those of `cosine`; ``total_steps`` is needed only where ``warmup`` is a share.

    Examples
    --------
    >>> import torch, zae
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = zae.schedulers.inverse_sqrt(warmup=4)(optimizer)
    >>> [scheduler.lr_at(step)[0] for step in (0, 2, 4, 16, 64)]
    [0.0, 0.5, 1.0, 0.5, 0.25]
    """
    return Factory("inverse_sqrt", warmup, total_steps=total_steps)


def wsd(
    *, warmup: int | float = 0.05, decay: int | float = 0.2, final: float = 0.0, total_steps: int | None = None
) -> Factory:
    """Raise the rate linearly, keep it (warmup, stable), and lower it in the last part of the run (decay).

    With ``d`` steps of decay, the base rate is multiplied by ``1 - sqrt((t - (T - d)) / d)`` in them: the schedule of
    Hu et al., "MiniCPM" (2024), section 4, with the decay "1-sqrt" of Hägele et al., "Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations" (2024), section 3. ``decay=0`` keeps the rate to the end.

    Arguments and errors are those of `cosine`; ``decay`` is a number of steps, or a share of the run, as ``warmup``.

    Examples
    --------
    >>> import torch, zae
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = zae.schedulers.wsd(warmup=2, decay=4, total_steps=10)(optimizer)
    >>> [round(scheduler.lr_at(step)[0], 3) for step in range(11)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.293, 0.134, 0.0]
    """
    return Factory("wsd", warmup, decay, final, total_steps)
