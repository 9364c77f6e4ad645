"""`find_lr`: raise the learning rate exponentially on a copy of a trainer, and suggest one from the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from zae.arguments import Interval, checked
from zae.display.text import number
from zae.errors import ConfigError
from zae.optim.factories import as_dict
from zae.tuning.trials import trial, trial_loader

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["RangeTest", "find_lr"]

_DIVERGED = 4.0  # Times the lowest smoothed loss, as in fastai and Lightning.
_SMOOTHING = 0.98
_SHORTEST = 5  # Losses in a row of falling ones, for a suggestion.


@dataclass(repr=False)
class RangeTest:
    """The losses of a learning-rate range test; it prints as what follows from them.

    Attributes
    ----------
    learning_rates : list of float
        The rate of each step; of several param groups, the highest.
    losses, smoothed : list of float
        The loss of each step, and their moving average without its bias to 0.
    stopped : str
        Why the test ended.
    """

    learning_rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    stopped: str = ""

    @property
    def suggestion(self) -> float | None:
        """A rate to train with, two thirds down the longest fall of the loss (fastai's "valley"); None without one."""
        before, after = _longest_fall(self.smoothed)
        if after - before < _SHORTEST:
            return None
        return self.learning_rates[before + (after - before) // 2]

    def add(self, rate: float, loss: float) -> bool:
        """Record a step; return whether the loss has diverged."""
        if not math.isfinite(loss):
            self.stopped = f"the loss was {loss} at {number(rate, 3)}"
            return True
        count = len(self.losses) + 1
        past = self.smoothed[-1] * (1 - _SMOOTHING ** (count - 1)) if self.smoothed else 0.0
        self.learning_rates.append(rate)
        self.losses.append(loss)
        self.smoothed.append((_SMOOTHING * past + (1 - _SMOOTHING) * loss) / (1 - _SMOOTHING**count))
        if self.smoothed[-1] > self.smoothed[0] and self.smoothed[-1] > _DIVERGED * abs(min(self.smoothed)):
            self.stopped = f"the loss diverged at {number(rate, 3)}"
            return True
        return False

    def __str__(self) -> str:
        if not self.losses:
            return f"learning-rate range test: {self.stopped}"
        suggestion = self.suggestion
        if suggestion is None:
            return f"no suggestion: the loss does not fall; {self.stopped}"
        return f"suggestion: lr={number(suggestion, 3)}; {self.stopped}"

    __repr__ = __str__


@checked
def find_lr(
    trainer: Trainer,
    loader: Any,
    *,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    steps: Annotated[int, Interval("[10, inf)")] = 100,
) -> RangeTest:
    """Find a learning rate: train a copy with rates that rise exponentially, and look at the loss.

    The range test of Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), section 3.3, with the
    smoothing, the end and the suggestion of fastai's ``lr_find``. Accumulation, mixed precision, clipping and other
    add-ons that take part in a step are as in a run; those that save, log or report are left out. A schedule is left
    out. Of several param groups each keeps its part of the highest rate. The trainer, files and random streams are not
    changed; a dataset that counts or keeps what is read of it notices.

    Parameters
    ----------
    trainer : Trainer
        In one process, with one optimizer.
    loader : DataLoader or list
        The batches to train with; it begins again when it ends.
    min_lr, max_lr : float
        The first and the last rate.
    steps : int
        Optimizer steps at most, at least 10.

    Returns
    -------
    RangeTest
        ``suggestion`` is the rate to use; give it to the optimizer yourself.

    Raises
    ------
    ConfigError
        An argument is out of range; the trainer has several optimizers or processes, or cannot be copied; the loader
        cannot be put back.

    Examples
    --------
    >>> import torch, zae
    >>> class Task(zae.Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()}
    ...     test_step = train_step
    >>> trainer = Task(lambda: torch.nn.Linear(4, 1), "cpu", optimizer=torch.optim.AdamW, seed=0)
    >>> found = zae.find_lr(trainer, list(torch.randn(20, 8, 4, generator=torch.Generator().manual_seed(0))))
    >>> 1e-4 < found.suggestion < 1
    True
    >>> trainer.progress_checker.step
    0
    """
    if not all(isinstance(rate, (int, float)) for rate in (min_lr, max_lr)) or not 0 < min_lr < max_lr < math.inf:
        raise ConfigError(f"min_lr={min_lr!r}, max_lr={max_lr!r}; write two numbers, 0 < min_lr < max_lr")
    twin = trial(trainer, "find_lr")
    result = RangeTest()
    names = [*as_dict(trainer.optimizer)]
    if len(names) > 1:
        raise ConfigError(
            f"find_lr looks for one learning rate, and this trainer has the optimizers {', '.join(names)}; try it with "
            "a trainer that has one of them"
        )
    rates = [min_lr * (max_lr / min_lr) ** (step / (steps - 1)) for step in range(steps)]
    parts: list[float] = []

    def set_rate(copy: Any) -> None:
        (optimizer,) = copy.optimizers.values()
        groups = optimizer.param_groups
        if not parts:
            base = [float(group.get("initial_lr", group["lr"])) for group in groups]
            parts.extend(rate / (max(base) or 1.0) if max(base) else 1.0 for rate in base)
        for group, part in zip(groups, parts, strict=True):
            rate = rates[copy.progress_checker.step % steps] * part
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def look(copy: Any, outputs: Any) -> bool:
        total = sum(output.weight for output in outputs) or 1.0
        loss = sum(float(output.loss.detach()) * output.weight for output in outputs) / total
        return result.add(rates[len(result.losses)], loss)

    twin.before_step = set_rate
    twin.after_step = look
    with trial_loader(loader, "find_lr") as trial_data:
        twin.run(None, trial_data, max_steps=steps)
    result.stopped = result.stopped or f"the highest rate, {number(max_lr, 3)}, was tried"
    return result


def _longest_fall(values: Sequence[float]) -> tuple[int, int]:
    """Return the ends of the longest decreasing subsequence: the index of its last value, minus its length, and it."""
    lengths = [1] * len(values)
    for i, value in enumerate(values):
        lengths[i] += max((lengths[j] for j in range(i) if values[j] > value), default=0)
    if not values:
        return 0, 0
    last = max(range(len(values)), key=lengths.__getitem__)
    return last - lengths[last] + 1, last
