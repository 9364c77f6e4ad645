"""Look, in the first step of a run, for what would train to other weights in silence: before the optimizer moves.

Some hooks of the loop are called through this object for one step: gradients, schedules and the model's mode are
looked at before and after ``train_step``, for the idioms of a loop by hand, and a closure for what it leaves out.
`zae.compose.first_call` looks at what any hook does, in its first call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zae.compose.first_call import check_properties
from zae.compose.introspect import is_add_on, is_base
from zae.errors import StepError, TaskError
from zae.loop.step_remarks import report_not_numbers, report_unknown_samples
from zae.optim import parameters_of
from zae.schedulers.lengths import steps_taken
from zae.torch_private import version_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["FirstStep"]

_log = logging.getLogger("zae")
_WATCHED_HOOKS = ("forward_context", "micro_step", "clip", "optimizer_step")
_GRADIENT_HOOKS = (
    "gradients",
    "micro_batches",
    "sync_context",
    "micro_step",
    "forward_context",
    "scale_loss",
    "backward",
    "normalize",
)


class FirstStep:
    """The first step of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._calls: list[str] = []

    def run_batch(self, make_step: Callable[[], None]) -> None:
        """Make the step, with some of its hooks watched."""
        trainer = self._trainer
        with self._watch():
            make_step()
        check_properties(trainer)
        self._warn_of_modules_beside()
        report_not_numbers(trainer.current_run, trainer.log_train, "train_step")

    @contextmanager
    def _watch(self) -> Iterator[None]:
        attributes = vars(self._trainer)
        before = {name: attributes[name] for name in _WATCHED_HOOKS if name in attributes}
        # On the object, before the methods of its class: afterwards nothing of it is left.
        attributes |= {name: partial(self._call, name, getattr(self._trainer, name)) for name in _WATCHED_HOOKS}
        try:
            yield
        finally:
            for name in _WATCHED_HOOKS:
                attributes.pop(name, None)
            attributes |= before

    def _call(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook, and look at what it is given and returns."""
        if self._trainer.mode != "train":  # An evaluation within the step.
            return hook(*args, **kwargs)
        if name == "optimizer_step":
            return self._step_optimizers(partial(hook, *args, **kwargs))
        result = hook(*args, **kwargs)
        self._calls.append(name)
        if name == "micro_step":
            report_unknown_samples(self._trainer.current_run, args[0], result[0])
        elif name == "forward_context":
            return self._forward(result)
        return result

    # --------------------------------------------------------------------------- gradients that a step computes itself

    def _step_optimizers(self, optimizer_step: Callable[[], Any]) -> Any:
        """Step the optimizers, and look at what computes gradients meanwhile: a closure, or a class's own backward."""
        computed: list[Tensor] = []
        hooks = []
        for optimizer in self._trainer.optimizers.values():
            trained = [
                parameter for parameter in parameters_of(optimizer) if parameter.requires_grad and parameter.is_leaf
            ]
            hooks += [parameter.register_post_accumulate_grad_hook(computed.append) for parameter in trained]
        self._calls.clear()
        try:
            result = optimizer_step()
        except RuntimeError as error:
            if "dtype" in str(error):  # What is computed outside of autocast meets what was computed in it.
                self._check_gradients()
            raise
        finally:
            for hook in hooks:
                hook.remove()
        if computed:
            self._check_gradients()
        return result

    def _check_gradients(self) -> None:
        """Refuse gradients that are computed without what the trainer does to them."""
        trainer = self._trainer
        without = []
        if trainer.gradient_clip and "clip" not in self._calls:
            without.append("gradient_clip")
        if "forward_context" not in self._calls:  # Nor what the add-ons do around it.
            for klass in type(trainer).__mro__:
                is_of_add_on = is_add_on(klass) and not is_base(klass)
                if is_of_add_on and any(name in vars(klass) for name in _GRADIENT_HOOKS):
                    without.append(klass.__name__)
        if not without:
            return
        steppers = [c for c in type(trainer).__mro__ if "step_one" in vars(c) or "optimizer_step" in vars(c)]
        owner = next(c for c in steppers if not is_add_on(c))
        name = "step_one" if "step_one" in vars(owner) else "optimizer_step"
        raise TaskError(
            f"{owner.__name__}.{name} computes gradients without {', '.join(without)}; leave these out, or return from "
            "train_step a loss for each optimizer: {'loss': {name: loss, ...}}. A closure calls self.gradients(batch), "
            "self.unscale() and self.clip(): docs/howto/optimizers.md has it in full"
        )

    # ------------------------------------------------------------------------------------------------- train_step

    @contextmanager
    def _forward(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Enclose ``train_step``, and refuse one that does what is done for it."""
        trainer = self._trainer
        gradients = self._gradients()
        steps_before = self._scheduler_steps()
        was_training = self._is_model_training()
        watched = [
            optimizer for optimizer in trainer.optimizers.values() if hasattr(optimizer, "_optimizer_step_pre_hooks")
        ]
        hooks = [optimizer.register_step_pre_hook(self._refuse_step) for optimizer in watched]
        try:
            with context:
                yield
        finally:
            for hook in hooks:
                hook.remove()
        after = self._gradients()
        # Of an earlier batch of the window: a loop by hand begins with zero_grad().
        if gradients and not after:
            raise self._loop_by_hand_error("has removed the gradients of the batches before it in the window")
        if after != gradients:
            raise self._loop_by_hand_error("has changed gradients itself (to clip them, write gradient_clip=...)")
        if self._scheduler_steps() != steps_before:
            raise self._loop_by_hand_error("steps a scheduler, as the trainer does (scheduler_step_on_batch=...)")
        if was_training and not self._is_model_training() and trainer.is_main:
            _log.warning(
                "%s.train_step leaves the model in evaluation mode: the next step has no dropout, and uses running "
                "statistics, unless it begins with self.model.train(); leave model.eval() out of train_step",
                type(trainer).__name__,
            )

    def _warn_of_modules_beside(self) -> None:
        """Warn of modules in attributes of the task that got gradients, and that no optimizer trains."""
        trainer = self._trainer
        trained = set(map(id, trainer.optimization.parameters))
        names = []
        for name, value in vars(trainer).items():
            weights = value.parameters() if isinstance(value, nn.Module) else ()
            if any(weight.grad is not None and id(weight) not in trained for weight in weights):
                names.append(f"self.{name}")
        if names and trainer.is_main:
            _log.warning(
                "no optimizer of the trainer trains %s, which gets gradients: make it a part of the model, or freeze "
                "it: requires_grad_(False)",
                ", ".join(names),
            )

    def _gradients(self) -> dict[int, tuple[int, int]]:
        """Return which parameters of the optimizers have a gradient, and how often it was changed in place."""
        gradients = {}
        for optimizer in self._trainer.optimizers.values():
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    gradients[id(parameter)] = (id(parameter.grad), version_of(parameter.grad))
        return gradients

    def _scheduler_steps(self) -> list[int]:
        """Return the steps that the schedulers have taken, unless the class steps them itself."""
        owners = [c for c in type(self._trainer).__mro__ if "scheduler_step" in vars(c)]
        if not all(is_add_on(c) for c in owners[:-1]):
            return []
        return [steps_taken(scheduler) for scheduler in self._trainer.schedulers.values()]

    def _is_model_training(self) -> bool:
        return bool(getattr(self._trainer.model, "training", False))

    def _refuse_step(self, *_: Any) -> None:
        raise self._loop_by_hand_error("steps an optimizer itself")

    def _loop_by_hand_error(self, fault: str) -> StepError:
        return StepError(
            f"{type(self._trainer).__name__}.train_step computes the loss, and backward(), optimizer.step() and "
            f"zero_grad() are done for you: it {fault}; take them out of it"
        )
