"""The optimizers and schedulers of a trainer: what is clipped, stepped, cleared and saved of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.common import argument_checks, optim, optimizer_modes
from zae.common.optimizer_settings import ScriptSettings
from zae.errors import ConfigError
from zae.schedulers import is_plateau

__all__ = ["Optimization"]

_log = logging.getLogger("zae")
_SHOWN = 5  # Names of parameters in a warning.


class Optimization:
    """The optimizers and schedulers of a trainer, and the parameters that they train.

    Parameters
    ----------
    optimizer, scheduler : object
        As the trainer was given them. Factories are passed over until `hold` gets what they made.
    gradient_clip : float
        The largest gradient norm; 0 does not clip.
    scheduler_step_on_batch : bool or None
        Whether schedulers are stepped after each optimizer step; None is False, and is not explicit.

    Attributes
    ----------
    optimizers, schedulers : dict
        By name; an only one is named "0".
    parameters : list of Tensor
        Those of the model and of the optimizers, each once. It follows ``optimizer.add_param_group``.
    grad_norm : Tensor or None
        The norm of the gradients before they were last clipped.
    settings : ScriptSettings
        What the script has set on the optimizers and schedulers.

    Examples
    --------
    >>> model = nn.Linear(2, 1)
    >>> optimization = Optimization(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> optimization.track(model)
    >>> len(optimization.parameters), optimization.learning_rates()
    (2, {'lr': 0.1})
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any = None,
        gradient_clip: float = 0.0,
        scheduler_step_on_batch: bool | None = None,
    ) -> None:
        self.gradient_clip = argument_checks.check_number("gradient_clip", gradient_clip)
        self.is_step_explicit = scheduler_step_on_batch is not None
        flag = {"scheduler_step_on_batch": scheduler_step_on_batch or False}
        (self.scheduler_step_on_batch,) = argument_checks.check_flags(**flag)
        self.parameters: list[Tensor] = []
        self.grad_norm: Tensor | None = None
        self.settings = ScriptSettings()
        self._clipped: list[list[Tensor]] = []
        self._clearing: list[Optimizer] = []  # Those whose ``zero_grad`` does more than to drop gradients.
        self._warned: set[str] = set()
        self.hold(optimizer, scheduler)

    def hold(self, optimizer: Any, scheduler: Any) -> None:
        """Take the optimizers and schedulers out of what a trainer has; factories are not made yet."""
        self.optimizers: dict[str, Optimizer] = _made(optimizer)
        self.schedulers: dict[str, Any] = _made(scheduler)

    def track(self, model: nn.Module) -> None:
        """List the parameters of a model and of the optimizers; the lists follow groups that are added later."""
        self._clipped, self.parameters, self._clearing = optim.listed(self.optimizers, model)

    def release(self) -> None:
        """Stop to follow the groups of the optimizers."""
        optim.unlisted(self.optimizers)

    def check_unreplaced(self, optimizer: Any, scheduler: Any) -> None:
        """Refuse optimizers or schedulers that were assigned to the trainer within a run."""
        for name, given, held in (("optimizer", optimizer, self.optimizers), ("scheduler", scheduler, self.schedulers)):
            if [*optim.named(given).values()] != [*held.values()]:
                raise ConfigError(
                    f"trainer.{name} was replaced within a run, which continues with the one it has; replace it "
                    "between two calls of run, or change what is in its param_groups"
                )

    def warn_of_unheld(self, model: nn.Module, is_main: bool) -> None:
        """Warn once of each parameter that requires a gradient and that no optimizer holds."""
        names = [name for name in optim.unheld(model, self.optimizers) if name not in self._warned]
        self._warned.update(names)
        if names and is_main:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            _log.warning(
                "no optimizer holds %s%s (%d parameters with requires_grad=True): training does not change them; give "
                "them to one, optimizer.add_param_group({'params': [...]}), or freeze them: requires_grad_(False)",
                ", ".join(names[:_SHOWN]), more, len(names),
            )  # fmt: skip

    # --------------------------------------------------------------------------------------- the parts of a step

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Add the gradient of a loss to ``.grad``; of several losses, each to the parameters of its optimizer."""
        if isinstance(loss, Tensor):
            loss.backward(**kwargs)
        else:
            optim.backward_each(loss, self.optimizers, **kwargs)

    def normalize(self, num_targets: list[Any], reduce: Callable[[Tensor], Tensor], world_size: int) -> None:
        """Divide the gradients by the number of targets of a window, over all ranks."""
        if len(num_targets) == 1 and world_size == 1:
            return
        optim.normalize(num_targets, self.parameters, reduce, world_size)

    def clip(self) -> None:
        """Clip the gradients of each group of parameters to ``gradient_clip``, and keep the norm that they had."""
        if self.gradient_clip:
            norms = [nn.utils.clip_grad_norm_(parameters, self.gradient_clip) for parameters in self._clipped]
            self.grad_norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()

    step_one = staticmethod(optim.step)

    def scheduler_step(self, when: str) -> None:
        """Step the schedulers that are stepped after a "batch" or an "epoch", but those that wait for a metric."""
        if (when == "batch") == self.scheduler_step_on_batch:
            for scheduler in self.schedulers.values():
                if not is_plateau(scheduler):
                    scheduler.step()

    def zero_grad(self) -> None:
        """Set every gradient to None, and call each ``zero_grad`` that a class of optimizers overrides."""
        for parameter in self.parameters:
            parameter.grad = None
        for optimizer in self._clearing:
            optimizer.zero_grad()

    # ------------------------------------------------------------------------------------------------ the state

    @property
    def clipped_parameters(self) -> list[list[Tensor]]:
        """The parameters whose gradients are clipped together: all for one optimizer, else those of each."""
        return self._clipped

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each group, named as `log` records it."""
        return optim.learning_rates(self.optimizers)

    def note_settings(self) -> None:
        """Note the settings of optimizers and schedulers that are new: as the script has made them."""
        self.settings.note(optimizer=self.optimizers, scheduler=self.schedulers)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states of the optimizers and of the schedulers, by name."""
        several: dict[str, Mapping[str, Any]] = {"optimizer": self.optimizers, "scheduler": self.schedulers}
        return {what: {name: each.state_dict() for name, each in held.items()} for what, held in several.items()}

    # ------------------------------------------------------------------ optimizers with train and evaluation modes

    def begin_training(self) -> None:
        """Put the training weights into the model, where an optimizer has left those of evaluation there."""
        optimizer_modes.begin_training(self.optimizers)

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Return a context with the evaluation weights in the model; the training weights are restored bitwise."""
        return optimizer_modes.evaluation_weights(self.optimizers)


def _made(given: Any) -> dict[str, Any]:
    return {name: each for name, each in optim.named(given).items() if not optim.is_factory(each)}
