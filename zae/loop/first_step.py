"""Look, in the first step of a run, for what would train to other weights in silence: before the optimizer moves.

The hooks of the loop are called through this object for one step. Where an override may lack its ``super()``, the
method inside of it notes whether it was reached; a value that the loop needs and did not get is found where it is
returned; and the gradients are looked at before and after ``train_step``, for the idioms of a loop by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import is_lazy

from zae.common.torch_private import version_of
from zae.common.walk import local_part, names_in
from zae.compose.introspect import is_add_on, is_base, is_marked, mentions_super
from zae.errors import AddOnError, StepError, TaskError
from zae.loop.step_output import say_not_numbers, say_uncounted
from zae.optim import needs_closure, parameters_of
from zae.schedulers.lengths import steps_taken

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["FirstStep", "WeightSample", "warn_of_unmoved", "weights_of"]

_log = logging.getLogger("zae")
_SHOWN = 16  # Numbers of each parameter that are kept for an epoch.
_CLIPS = {"clip_grad_norm", "clip_grad_norm_", "clip_grad_value_"}
_WITHOUT_VALUE = ("on_step_begin", "backward", "normalize", "unscale", "clip", "zero_grad", "logging", "on_step_end")
_WITH_VALUE = (
    "batch_context",
    "gradients",
    "micro_batches",
    "sync_context",
    "to_device",
    "micro_step",
    "forward_context",
    "should_step",
    "step_one",
    "optimizer_step",
)
_OF_GRADIENTS = (
    "gradients",
    "micro_batches",
    "sync_context",
    "micro_step",
    "forward_context",
    "scale_loss",
    "backward",
    "normalize",
)


class _Suspect(NamedTuple):
    """An override of a hook that cannot have called ``super()`` itself, and what is inside of it."""

    name: str
    klass: Any
    inner: Any  # The class whose method ``super()`` would call.
    skipped: str


class FirstStep:
    """The first step of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._called: list[str] = []
        self._reached: set[str] = set()
        self._suspects = [*_suspects(type(trainer))]

    def run_batch(self, batch: Any) -> None:
        """Make the step, with each of its hooks watched."""
        with self._watching():
            type(self._trainer).run_batch(self._trainer, batch)
            self._check_reached()
        say_not_numbers(self._trainer.current_run, self._trainer.log_train, "train_step")

    @contextmanager
    def _watching(self) -> Iterator[None]:
        attributes = vars(self._trainer)
        watched = [name for name in (*_WITHOUT_VALUE, *_WITH_VALUE) if name not in attributes]
        with ExitStack() as stack:
            for each in self._suspects:
                stack.enter_context(self._noting(each))
            # On the object, before the methods of its class: afterwards nothing of it is left.
            attributes |= {name: partial(self._call, name, getattr(self._trainer, name)) for name in watched}
            try:
                yield
            finally:
                for name in watched:
                    attributes.pop(name, None)

    @contextmanager
    def _noting(self, suspect: _Suspect) -> Iterator[None]:
        """Let the method inside of an override note that it was called."""
        name = suspect.name
        method = vars(suspect.inner)[name]

        def noting(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            self._reached.add(name)
            return method.__get__(trainer, type(trainer))(*args, **kwargs)

        # On the class: ``super()`` does not look at the attributes of an object.
        setattr(suspect.inner, name, noting)
        try:
            yield
        finally:
            setattr(suspect.inner, name, method)

    def _call(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook, and look at what it needs and returns."""
        if self._trainer.mode != "train":  # An evaluation within the step.
            return hook(*args, **kwargs)
        if name == "optimizer_step":
            self._check_reached()
        elif name == "backward":
            self._warn_of_cut_loss(*args)
        called_before = len(self._called)
        result = hook(*args, **kwargs)
        if name == "optimizer_step":
            self._check_closure(self._called[called_before:])
        if result is None and name in _WITH_VALUE and (name != "to_device" or args[0] is not None):
            self._refuse_none(name)
        if name == "micro_step":
            say_uncounted(self._trainer.current_run, args[0], result[0])
        self._called.append(name)
        return self._forward(result) if name == "forward_context" else result

    # ------------------------------------------------------------------------------------------------------ hooks

    def _check_reached(self) -> None:
        """Refuse an override that was called, and that has called nothing of what is inside of it."""
        for name, klass, _, skipped in self._suspects:
            if name in self._called and name not in self._reached:
                raise _error(klass)(
                    f"{klass.__name__}.{name} overrides a hook without calling super(), and so skips {skipped}; call "
                    f"super().{name}(...), or mark the method with @zae.replaces if it replaces them on purpose"
                )

    def _check_closure(self, called: list[str]) -> None:
        """Refuse the closure of an optimizer that computes gradients without what the trainer does to them."""
        trainer = self._trainer
        if not any(needs_closure(each) for each in trainer.optimizers.values()):
            return
        without = []
        if trainer.gradient_clip and "clip" not in called:
            without.append("gradient_clip")
        if "forward_context" not in called:  # Nor what the add-ons do around it.
            for klass in type(trainer).__mro__:
                is_of_add_on = is_add_on(klass) and not is_base(klass)
                if is_of_add_on and any(name in vars(klass) for name in _OF_GRADIENTS):
                    without.append(klass.__name__)
        if without:
            steppers = [c for c in type(trainer).__mro__ if "step_one" in vars(c) or "optimizer_step" in vars(c)]
            owner = next(c for c in steppers if not is_add_on(c))
            raise TaskError(
                f"the closure that {owner.__name__} gives its optimizer computes gradients without "
                f"{', '.join(without)}; let it call self.gradients(batch), self.unscale() and self.clip(): "
                "docs/howto/optimizers.md has it in full"
            )

    def _refuse_none(self, name: str) -> None:
        """Refuse an override that has returned nothing where the loop needs a value."""
        holders: list[Any] = [c for c in type(self._trainer).__mro__ if name in c.__dict__ and not is_base(c)]
        klass = holders[0]
        others = [c.__name__ for c in holders[1:-1]]
        passes_on = f" (or {' or '.join(others)} inside of it)" if others else ""
        raise _error(klass)(
            f"{klass.__name__}.{name}{passes_on} returned None, and the loop needs its return value; write return "
            f"super().{name}(...), or store it and return it at the end"
        )

    # ------------------------------------------------------------------------------------------------- train_step

    @contextmanager
    def _forward(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Enclose ``train_step``, and refuse one that does what is done for it."""
        trainer = self._trainer
        gradients = self._gradients()
        taken = self._scheduler_steps()
        was_training = self._is_model_training()
        watched = [each for each in trainer.optimizers.values() if hasattr(each, "_optimizer_step_pre_hooks")]
        hooks = [each.register_step_pre_hook(self._refuse_step) for each in watched]
        try:
            with context:
                yield
        finally:
            for hook in hooks:
                hook.remove()
        after = self._gradients()
        # Of an earlier batch of the window: a loop by hand begins with zero_grad().
        if gradients and not after:
            raise self._of_a_loop_by_hand("has removed the gradients of the batches before it in the window")
        if after != gradients:
            raise self._of_a_loop_by_hand("has changed gradients itself (to clip them, write gradient_clip=...)")
        self._warn_of_clip()
        if self._scheduler_steps() != taken:
            raise self._of_a_loop_by_hand("steps a scheduler, as the trainer does (scheduler_step_on_batch=...)")
        if was_training and not self._is_model_training() and trainer.is_main:
            _log.warning(
                "%s.train_step leaves the model in evaluation mode: the next step has no dropout, and uses running "
                "statistics, unless it begins with self.model.train(); leave model.eval() out of train_step",
                type(trainer).__name__,
            )

    def _warn_of_clip(self) -> None:
        """Warn of a ``train_step`` that clips what backward() is still to compute."""
        trainer = self._trainer
        clips = sorted(names_in(type(trainer).train_step) & _CLIPS)
        if clips and trainer.is_main:
            _log.warning(
                "%s.train_step calls %s, and backward() is done after it: the gradients of its batch do not exist yet, "
                "and are not clipped. For these write gradient_clip=...",
                type(trainer).__name__,
                clips[0],
            )

    def _gradients(self) -> dict[int, tuple[int, int]]:
        """Return which parameters of the optimizers have a gradient, and how often it was changed in place."""
        found = {}
        for optimizer in self._trainer.optimizers.values():
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    found[id(parameter)] = (id(parameter.grad), version_of(parameter.grad))
        return found

    def _scheduler_steps(self) -> list[int]:
        """Return the steps that the schedulers have taken, unless the class steps them itself."""
        owners = [c for c in type(self._trainer).__mro__ if "scheduler_step" in vars(c)]
        if not all(is_add_on(c) for c in owners[:-1]):
            return []
        return [steps_taken(each) for each in self._trainer.schedulers.values()]

    def _is_model_training(self) -> bool:
        return bool(getattr(self._trainer.model, "training", False))

    def _warn_of_cut_loss(self, loss: Any, **_: Any) -> None:
        """Warn of a loss that requires a gradient and was computed from nothing, as that of ``requires_grad_()``."""
        losses = loss.values() if isinstance(loss, Mapping) else (loss,)
        if any(isinstance(each, Tensor) and each.requires_grad and each.grad_fn is None for each in losses):
            _log.warning(
                "%s.train_step returned a loss that no parameter takes part in, and so it trains nothing: compute it "
                "from self.model(...), without .detach(), torch.no_grad(), torch.tensor(...) or requires_grad_()",
                type(self._trainer).__name__,
            )

    def _refuse_step(self, *_: Any) -> None:
        raise self._of_a_loop_by_hand("steps an optimizer itself")

    def _of_a_loop_by_hand(self, what: str) -> StepError:
        return StepError(
            f"{type(self._trainer).__name__}.train_step computes the loss, and backward(), optimizer.step() and "
            f"zero_grad() are done for you: it {what}; take them out of it"
        )


def _suspects(cls: Any) -> Iterator[_Suspect]:
    """Yield the outermost override of each hook that mentions no ``super()``; a helper may still call it.

    One that mentions it may have a reason not to call it in this step.
    """
    for name in (*_WITHOUT_VALUE, *_WITH_VALUE):
        holders = [c for c in cls.__mro__ if name in c.__dict__ and not is_base(c)]
        for index, klass in enumerate(holders[:-1]):
            value = klass.__dict__[name]
            if is_marked(value, "__replaces__"):
                break
            below = [c for c in holders[index + 1 :] if is_add_on(c)]
            if not mentions_super(value) and (below or is_add_on(klass)):
                skipped = f"what {below[0].__name__} does there" if below else "the add-ons inside it and the default"
                yield _Suspect(name, klass, holders[index + 1], skipped)
                break


class WeightSample(NamedTuple):
    """The first numbers of a parameter, to see later whether it has changed."""

    parameter: Tensor
    version: int
    numbers: Tensor

    @classmethod
    def of(cls, parameter: Tensor) -> WeightSample:
        """Return the sample of a parameter as it is now."""
        return cls(parameter, version_of(parameter), _first_numbers(parameter).clone())

    @property
    def has_moved(self) -> bool:
        """Whether the parameter was written to, or these numbers differ: a fused kernel may not count as a write."""
        return version_of(self.parameter) != self.version or not _first_numbers(self.parameter).equal(self.numbers)


def _first_numbers(parameter: Tensor) -> Tensor:
    return local_part(parameter.data).reshape(-1)[:_SHOWN]


def weights_of(trainer: Trainer) -> dict[str, list[WeightSample]]:
    """Return the first numbers of what each optimizer trains on this rank, to compare them later."""
    found = {}
    for name, optimizer in trainer.optimizers.items():
        found[name] = [WeightSample.of(parameter) for parameter in _trained_by(optimizer)]
    return found


def _trained_by(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer trains and of which this rank has plain numbers."""
    found = []
    for parameter in parameters_of(optimizer):
        if not parameter.requires_grad or is_lazy(parameter) or parameter.is_meta:
            continue
        local = local_part(parameter.data)
        if type(local) is Tensor and local.numel():
            found.append(parameter)
    return found


def warn_of_unmoved(trainer: Trainer, before: Mapping[str, list[WeightSample]]) -> None:
    """Warn of optimizers that have changed none of their weights in the epoch that ends."""
    names = []
    for name, samples in before.items():
        if samples and not any(each.has_moved for each in samples):
            names.append(name)
    if not names or not trainer.is_main:
        return
    several = ""
    own = ""
    if len(trainer.optimizers) > 1:
        several = f" of optimizer {', '.join(map(repr, names))}"
        own = ", and return a loss for each: {'loss': {name: loss, ...}}"
    _log.warning(
        "epoch %d has changed no weight%s in %d steps: compute the loss from self.model(...), let optimizer_step() "
        "step the optimizers, and a learning rate be above 0%s",
        trainer.progress_checker.epoch + 1,
        several,
        trainer.progress_checker.epoch_step,
        own,
    )


def _error(klass: type) -> type[TaskError]:
    return AddOnError if is_add_on(klass) else TaskError
