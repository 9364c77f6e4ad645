"""Look, in the first step of a run, for what would train to other weights in silence: before the optimizer moves.

The hooks of the loop are called through this object for one step. Each default in `zae.trainer` notes that it was
reached, so that an override without ``super()`` is found; a value that the loop needs and did not get is found where it
is returned; and the gradients are looked at before and after ``train_step``, for the idioms of a loop by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from zae.common.optim import parameters_of
from zae.common.torch_private import version_of
from zae.composition.introspect import is_add_on, is_base, is_marked, mentions_super
from zae.errors import AddOnError, StepError, TaskError

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["FirstStep", "moved", "weights_of"]

_SHOWN = 16  # Numbers of each parameter that are kept for an epoch.
_WITHOUT_VALUE = ("on_step_begin", "backward", "normalize", "unscale", "clip", "zero_grad", "logging", "on_step_end")
_WITH_VALUE = (
    "batch_context",
    "gradients",
    "micro_batches",
    "sync_context",
    "to_device",
    "micro_step",
    "forward_context",
    "may_step",
    "step_one",
    "optimizer_step",
)


class FirstStep:
    """The first step of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._called: list[str] = []
        self._reached: set[str] = set()
        self._before: dict[int, tuple[int, int]] = {}  # The gradients before a forward, by their parameters.
        self._is_in_forward = False
        self._hooks: list[Any] = []  # Of the optimizers, within a forward.

    def run_batch(self, batch: Any) -> None:
        """Make the step, with each of its hooks watched."""
        with self._watching():
            type(self._trainer).run_batch(self._trainer, batch)
            self._check_reached()
        run = self._trainer.current_run
        run.say_not_numbers(self._trainer.log_train, "train_step")

    @contextmanager
    def _watching(self) -> Iterator[None]:
        attributes = vars(self._trainer)
        watched = [name for name in (*_WITHOUT_VALUE, *_WITH_VALUE) if name not in attributes]
        attributes["_reach"] = self._reached.add
        attributes |= {name: partial(self._call, name, getattr(self._trainer, name)) for name in watched}
        try:
            yield
        finally:
            self._leave_forward()
            for name in ("_reach", *watched):
                attributes.pop(name, None)

    def _call(self, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook, and look at what it needs and returns."""
        if self._trainer.mode != "train":  # An evaluation within the step.
            return hook(*args, **kwargs)
        if name == "optimizer_step":
            self._leave_forward()  # A compiled step has no call of backward().
            self._check_reached()
        elif name == "forward_context":
            self._begin_forward()
        elif name == "backward":
            self._end_forward()
        result = hook(*args, **kwargs)
        if result is None and name in _WITH_VALUE and (name != "to_device" or args[0] is not None):
            self._refuse_none(name)
        if name == "micro_step":
            self._trainer.current_run.say_uncounted(args[0], result[0])
        self._called.append(name)
        return result

    # ------------------------------------------------------------------------------------------------------ hooks

    def _check_reached(self) -> None:
        """Refuse an override that was called and is why an add-on inside of it, or the default, was not."""
        for name in dict.fromkeys(self._called):
            if name not in self._reached:
                self._refuse_without_super(name)

    def _refuse_without_super(self, name: str) -> None:
        """Refuse the outermost override of a hook that cannot have called ``super()``.

        One that mentions ``super()`` may have had a reason not to call it in this step.
        """
        cls: Any = type(self._trainer)
        holders = [c for c in cls.__mro__ if name in c.__dict__ and not is_base(c)][:-1]
        for index, klass in enumerate(holders):
            value = klass.__dict__[name]
            if is_marked(value, "__replaces__"):
                return
            below = [c for c in holders[index + 1 :] if is_add_on(c)]
            if mentions_super(value) or not (below or is_add_on(klass)):
                continue
            inside = f"what {below[0].__name__} does there" if below else "the add-ons inside it and the default"
            raise _error(klass)(
                f"{klass.__name__}.{name} overrides a hook without calling super(), and so skips {inside}; call "
                f"super().{name}(...), or mark the method with @zae.replaces if it replaces them on purpose"
            )

    def _refuse_none(self, name: str) -> None:
        """Refuse an override that has returned nothing where the loop needs a value."""
        holders: list[Any] = [c for c in type(self._trainer).__mro__ if name in c.__dict__ and not is_base(c)]
        klass, others = holders[0], [c.__name__ for c in holders[1:-1]]
        passes_on = f" (or {' or '.join(others)} inside of it)" if others else ""
        raise _error(klass)(
            f"{klass.__name__}.{name}{passes_on} returned None, and the loop needs its return value; write return "
            f"super().{name}(...), or store it and return it at the end"
        )

    # -------------------------------------------------------------------------------------------------- gradients

    def _gradients(self) -> dict[int, tuple[int, int]]:
        """Return which parameters of the optimizers have a gradient, and how often it was changed in place."""
        held: list[Tensor] = [p for each in self._trainer.optimizers.values() for p in parameters_of(each)]
        return {id(p): (id(p.grad), version_of(p.grad)) for p in held if p.grad is not None}

    def _begin_forward(self) -> None:
        self._leave_forward()
        self._before, self._is_in_forward = self._gradients(), True
        optimizers = [each for each in self._trainer.optimizers.values() if hasattr(each, "_optimizer_step_pre_hooks")]
        self._hooks = [each.register_step_pre_hook(self._refuse_step) for each in optimizers]

    def _leave_forward(self) -> None:
        self._is_in_forward = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _end_forward(self) -> None:
        """Refuse a step that has computed or removed gradients; what it returns is differentiated for it."""
        if not self._is_in_forward:
            return  # A further backward of the same forward.
        self._leave_forward()
        after = self._gradients()
        if self._before and not after:
            raise self._of_a_loop_by_hand("has removed the gradients of the batches before it in the window")
        if after != self._before:
            raise self._of_a_loop_by_hand("has changed gradients itself")

    def _refuse_step(self, *_: Any) -> None:
        raise self._of_a_loop_by_hand("steps an optimizer itself")

    def _of_a_loop_by_hand(self, what: str) -> StepError:
        return StepError(
            f"{type(self._trainer).__name__}.train_step computes the loss, and backward(), optimizer.step() and "
            f"zero_grad() are done for you: it {what}; take them out of it"
        )


def weights_of(trainer: Trainer) -> list[Any]:
    """Return the first numbers of each parameter that the optimizers of one process hold, to compare them later."""
    if trainer.world_size > 1:  # They may lie in parts on the ranks.
        return []
    held = [p for each in trainer.optimizers.values() for p in parameters_of(each) if p.requires_grad]
    plain = [p for p in held if not is_lazy(p) and not p.is_meta and type(p.data) is Tensor]
    return [(p, version_of(p), p.detach().reshape(-1)[:_SHOWN].clone()) for p in plain]


def moved(before: list[Any]) -> bool:
    """Return whether any of these parameters has changed since then."""
    return any(version_of(p) != version or not p.detach().reshape(-1)[:_SHOWN].equal(few) for p, version, few in before)


def _error(klass: type) -> type[TaskError]:
    return AddOnError if is_add_on(klass) else TaskError
