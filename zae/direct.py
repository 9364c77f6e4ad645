"""The direct way through a step: what has nothing to do in a run is not called in its steps.

A call that does nothing costs as much as one that does something. When a trainer is set up, its seams of the step are
bound past the add-ons that say that they are idle; and where nobody overrides what deals with windows and contexts,
`gradients` does what ``Trainer.gradients`` does in fewer calls. Whatever anybody overrides is called as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zae import checks
from zae.seams import add_ons_of, is_add_on

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["bind", "gradients", "idle_add_ons", "is_plain", "release"]

_OF_A_WINDOW = ("micro_batches", "sync_context", "micro_step", "forward_context", "weigh", "normalize")
_OF_THE_STEP = (
    *_OF_A_WINDOW, "batches", "batch_context", "gradients", "to_device", "backward", "weight_of", "unscale", "clip",
    "optimizer_step", "step_one", "scheduler_step", "zero_grad", "logging", "checkpoint",
)  # fmt: skip


def idle_add_ons(trainer: Trainer) -> set[Any]:
    """The add-ons, with their bases, that say that they have nothing to do in the steps of this run.

    An answer stands for the class that gives it and for its bases: one that derives from it, and says nothing itself,
    may do something there, and so may another add-on of the same base.
    """
    idle: set[Any] = set()
    busy: set[Any] = set()
    if not any("is_idle" in c.__dict__ and not c.__dict__.get("_is_base") for c in type(trainer).__mro__):
        return idle
    for add_on in add_ons_of(type(trainer)):
        kinds = [c for c in add_on.__mro__ if is_add_on(c) and not c.__dict__.get("_is_base")]
        answers = next((c for c in kinds if "is_idle" in c.__dict__), None)
        rests = [c for c in kinds if c in answers.__mro__] if answers and answers.is_idle(trainer) else []
        idle.update(rests)
        busy.update(c for c in kinds if c not in rests)
    return idle - busy


def bind(trainer: Trainer) -> None:
    """Bind the seams of the step to what has something to do in this run, as attributes of a trainer just set up."""
    idle, cls = idle_add_ons(trainer), type(trainer)
    bound: list[str] = vars(trainer).setdefault("_bound", [])
    for name in _OF_THE_STEP if idle else ():
        owners = [c for c in cls.__mro__ if name in c.__dict__]
        owner = next(c for c in owners if c not in idle)
        if owner is not owners[0] and name not in vars(trainer):
            vars(trainer)[name] = owner.__dict__[name].__get__(trainer, cls)
            bound.append(name)
    alone = len(trainer._optimizers) == 1 and is_plain(trainer, "step_one")
    trainer._only_optimizer = next(iter(trainer._optimizers.values())) if alone else None
    trainer._is_direct = trainer.world_size == 1 and all(is_plain(trainer, name) for name in _OF_A_WINDOW)


def release(trainer: Trainer) -> None:
    """Take away what `bind` has bound."""
    for name in vars(trainer).pop("_bound", ()):
        vars(trainer).pop(name, None)
    trainer._only_optimizer = None


def is_plain(trainer: Trainer, name: str) -> bool:
    """Whether a seam is the core's own in this run: nobody overrides it who has something to do."""
    root = next(c for c in reversed(type(trainer).__mro__) if name in c.__dict__)
    return getattr(getattr(trainer, name), "__func__", None) is root.__dict__[name]


def gradients(trainer: Trainer, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
    """``Trainer.gradients`` of a window that is one batch, and whole, without the calls that would do nothing."""
    batch = trainer.to_device(batch)
    out = trainer.train_step(batch)
    try:
        trainer.backward(out["loss"])
        return [(out, trainer.weight_of(batch, out.get("num_targets")))]
    except Exception as error:
        checks.explain_outputs(trainer, out, batch, error)
        raise
