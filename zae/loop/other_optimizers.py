"""Optimizers that step and that a trainer does not have: those in hooks of parameters, for instance."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from zae.optim import parameters_of
from zae.optim.optimizer_state import with_inner

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["naming_other_optimizers"]

_log = logging.getLogger("zae")


@contextmanager
def naming_other_optimizers(trainer: Trainer) -> Iterator[None]:
    """Warn of optimizers that step weights within the block and that neither the trainer nor the task has."""
    stepped: dict[int, Optimizer] = {}

    def note(optimizer: Optimizer, *_: Any) -> None:
        stepped[id(optimizer)] = optimizer

    hook = register_optimizer_step_post_hook(note)
    try:
        yield
    finally:
        hook.remove()
    for optimizer in trainer.optimizers.values():
        for inner in with_inner(optimizer):
            stepped.pop(id(inner), None)
    for stateful_object in trainer.user_state.stateful_objects(trainer) if stepped else ():
        stepped.pop(id(stateful_object), None)
    trained = set(map(id, trainer.optimization.parameters))
    untracked = [other for other in stepped.values() if any(id(weight) in trained for weight in parameters_of(other))]
    if untracked and trainer.is_main:
        _log.warning(
            "weights move that no optimizer of the trainer steps, but %s of the class %s, in a hook for "
            "instance. Its state is in no checkpoint, so that a resume differs, and gradient_clip, grad_norm and "
            "schedules do not reach it. Give it to the trainer: optimizer=..., or keep it in an attribute of the task, "
            "which is saved",
            "an optimizer" if len(untracked) == 1 else f"{len(untracked)} optimizers",
            type(untracked[0]).__name__,
        )
