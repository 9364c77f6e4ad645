"""Look, in the first step of a run, for what would train to other weights in silence: before the optimizer moves.

Some hooks of the loop are called through this object for one step: gradients, schedules and the model's mode are
looked at before and after ``train_step``, for the idioms of a loop by hand, and a closure for what it leaves out.
`zae.compose.first_call` looks at what any hook does, in its first call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zae.compose.first_call import check_properties
from zae.compose.introspect import is_add_on, is_base
from zae.data.loaders import describe, length_of
from zae.errors import StepError, TaskError
from zae.loop.step_output import report_not_numbers, report_unknown_samples
from zae.optim import parameters_of
from zae.schedulers.lengths import steps_taken
from zae.torch_private import version_of
from zae.values.walk import local_part

if TYPE_CHECKING:
    from zae.loop.run import Run
    from zae.trainer import Trainer

__all__ = ["FirstEpoch", "FirstStep"]

_log = logging.getLogger("zae")
_SAMPLE_SIZE = 16  # Numbers of each parameter that are kept for an epoch.
_MODE_DEPENDENT = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
)
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

    def run_batch(self, batch: Any) -> None:
        """Make the step, with some of its hooks watched."""
        trainer = self._trainer
        with self._watch():
            type(trainer).run_batch(trainer, batch)
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


class _WeightSample(NamedTuple):
    """The first numbers of a parameter, to see later whether it has changed."""

    parameter: Tensor
    version: int
    numbers: Tensor

    @classmethod
    def of(cls, parameter: Tensor) -> _WeightSample:
        """Return the sample of a parameter as it is now."""
        return cls(parameter, version_of(parameter), _first_numbers(parameter).clone())

    @property
    def has_moved(self) -> bool:
        """Whether the parameter was written to, or these numbers differ: a fused kernel may not count as a write."""
        return version_of(self.parameter) != self.version or not _first_numbers(self.parameter).equal(self.numbers)


def _first_numbers(parameter: Tensor) -> Tensor:
    return local_part(parameter.data).reshape(-1)[:_SAMPLE_SIZE]


class FirstEpoch:
    """Compares, as it ends, the first epoch of a run with what its loader has said and with the weights before it."""

    def __init__(self) -> None:
        self._weights: dict[str, list[_WeightSample]] = {}  # Of each optimizer.
        self._skipped_steps = 0
        self._length: int | None = None  # That of the loader as the first epoch of the training began.

    def open(self, run: Run, wrapped_loader: Any) -> None:
        """Note what there is as an epoch begins, or continues."""
        trainer = run.trainer
        progress = trainer.progress_checker
        is_begin = not progress.epoch_batch
        if is_begin:
            self._length = None if progress.epoch else length_of(wrapped_loader)
        self._weights = _weight_samples(trainer) if run.setup.watches_next_step and is_begin else {}
        if self._weights and trainer.is_main:
            _warn_of_evaluation_mode(trainer)
        self._skipped_steps = progress.skipped_steps

    def close(self, run: Run, wrapped_loader: Any, is_complete: bool) -> None:
        """Warn of another number of batches, and of weights that no step has changed."""
        trainer = run.trainer
        progress = trainer.progress_checker
        if is_complete:
            self._warn_of_length(run, wrapped_loader)
        if progress.skipped_steps - self._skipped_steps < progress.epoch_step:
            _warn_of_unmoved(trainer, self._weights)
        self._weights = {}

    def _warn_of_length(self, run: Run, wrapped_loader: Any) -> None:
        """Warn, in the first epoch, of a loader that yields another number of batches than its length says."""
        trainer = run.trainer
        progress = trainer.progress_checker
        length = self._length
        count = progress.epoch_batch + trainer.loader_position.absent_count
        self._length = None
        if length in (None, count) or run.extent.epoch_ends_at or not trainer.is_main:
            return
        _log.warning(
            "the loader has a length of %d, by which schedules are made, and yielded %d batches in the first epoch "
            "(%s): let __len__ return the number of batches, or write steps_per_epoch=...",
            length,
            count,
            describe(wrapped_loader),
        )


def _warn_of_evaluation_mode(trainer: Trainer) -> None:
    """Warn of parts that are trained in evaluation mode, in which ``from_pretrained`` returns a model.

    A layer alone, a BatchNorm for instance, is in evaluation mode on purpose.
    """
    trained = set(map(id, trainer.optimization.parameters))
    names: list[str] = []
    for name, part in trainer.unwrap().named_modules():
        if part.training or not part._modules or any(name.startswith(f"{outer}.") for outer in names):
            continue
        is_trained = any(id(weight) in trained and weight.requires_grad for weight in part.parameters())
        if is_trained and any(isinstance(layer, _MODE_DEPENDENT) for layer in part.modules()):
            names.append(name)
    if names:
        _log.warning(
            "%s is trained in evaluation mode, in which from_pretrained() returns a model: without dropout, and with "
            "fixed statistics of BatchNorm. Write model.train() before the run, or requires_grad_(False) for what is "
            "not to be trained",
            ", ".join(names),
        )


def _weight_samples(trainer: Trainer) -> dict[str, list[_WeightSample]]:
    """Return the first numbers of what each optimizer trains on this rank, to compare them later."""
    weights = {}
    for name, optimizer in trainer.optimizers.items():
        weights[name] = [_WeightSample.of(parameter) for parameter in _trained_parameters(optimizer)]
    return weights


def _trained_parameters(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer trains and of which this rank has plain numbers."""
    parameters = []
    for parameter in parameters_of(optimizer):
        if not parameter.requires_grad or is_lazy(parameter) or parameter.is_meta:
            continue
        local = local_part(parameter.data)
        if type(local) is Tensor and local.numel():
            parameters.append(parameter)
    return parameters


def _warn_of_unmoved(trainer: Trainer, before: Mapping[str, list[_WeightSample]]) -> None:
    """Warn of optimizers that have changed none of their weights in the epoch that ends."""
    names = []
    for name, samples in before.items():
        if samples and not any(sample.has_moved for sample in samples):
            names.append(name)
    if not names or not trainer.is_main:
        return
    several = ""
    remedy = ""
    if len(trainer.optimizers) > 1:
        several = f" of optimizer {', '.join(map(repr, names))}"
        remedy = ", and return a loss for each: {'loss': {name: loss, ...}}"
    _log.warning(
        "epoch %d has changed no weight%s in %d steps: compute the loss from self.model(...), let optimizer_step() "
        "step the optimizers, and a learning rate be above 0%s",
        trainer.progress_checker.epoch + 1,
        several,
        trainer.progress_checker.epoch_step,
        remedy,
    )
