"""Bind the seams of a step past idle add-ons, so that an add-on with nothing to do costs a step nothing.

An override that only calls ``super()`` costs as much as one that does something. At the start of each epoch and of each
evaluation, each add-on is asked ``is_idle()``; a seam whose outermost overrides belong to idle add-ons is then bound on
the trainer to the first override that has work to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zae.composition.introspect import add_ons_of, kinds_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["bind", "idle_add_ons", "release", "unbound"]

_SEAMS = (
    "batches", "on_step_begin", "batch_context", "gradients", "micro_batches", "sync_context", "to_device",
    "micro_step", "forward_context", "scale_loss", "backward", "sample_weight", "normalize", "unscale", "clip",
    "may_step", "optimizer_step", "step_one", "scheduler_step", "zero_grad", "logging", "on_step_end", "checkpoint",
)  # fmt: skip

_EMPTY = ("on_step_begin", "on_step_end", "unscale")
_FORWARDED = ("backward", "clip", "scheduler_step", "step_one", "zero_grad")
_CALLED = {"clip": "gradient_norm"}  # A seam that a default calls in turn: with an override of it nothing is forwarded.


def idle_add_ons(trainer: Trainer) -> frozenset[Any]:
    """Return the add-ons, with their bases, that have nothing to do in the steps that follow.

    An answer holds for the class that gives it and for its bases. A class that derives from it without an ``is_idle``
    counts as busy, and so does a base that a busy add-on shares.
    """
    idle: set[Any] = set()
    busy: set[Any] = set()
    for answering, covered, others in _answers(type(trainer)):
        is_idle = answering is not None and answering.is_idle(trainer)
        (idle if is_idle else busy).update(covered)
        busy.update(others)
    return frozenset(idle - busy)


def _answers(cls: type[Any]) -> list[tuple[Any, list[Any], list[Any]]]:
    """List, for each add-on, the class with its ``is_idle``, the classes that the answer covers, and the others."""
    if "__answers__" in cls.__dict__:
        known: list[tuple[Any, list[Any], list[Any]]] = cls.__dict__["__answers__"]
        return known
    found = []
    for add_on in add_ons_of(cls):
        kinds = kinds_of(add_on)
        answering = next((c for c in kinds if "is_idle" in c.__dict__), None)
        covered = [c for c in kinds if answering is None or c in answering.__mro__]
        found.append((answering, covered, [c for c in kinds if c not in covered]))
    # Stored on the class, so that it is freed with it; a cache here would keep every class alive.
    cls.__answers__ = found if any(answering is not None for answering, _, _ in found) else []
    return _answers(cls)


def bind(trainer: Trainer) -> None:
    """Bind the seams of a step to the overrides that have work to do now."""
    idle, known = idle_add_ons(trainer), vars(trainer).setdefault("_bindings_by_idle", {})
    if vars(trainer).get("_idle") == idle:
        return
    _unbind(trainer)
    if idle not in known:
        known[idle] = _bindings(trainer, idle)
    vars(trainer).update(known[idle], _idle=idle)


def _bindings(trainer: Trainer, idle: frozenset[Any]) -> dict[str, Any]:
    """Return the seams whose outermost override is idle, each bound to its first override that is not.

    A default that only forwards is bound to the method of `Optimization` that it calls; one that does nothing, to a
    function that costs next to nothing.
    """
    bound, cls = {}, type(trainer)
    for name in set(_SEAMS).difference(vars(trainer)):
        owners = [c for c in cls.__mro__ if name in c.__dict__]
        owner = next(c for c in owners if c not in idle)
        if owner is owners[-1] and name in _EMPTY:
            bound[name] = "".format  # It takes any arguments and does nothing, at the least cost.
        elif owner is owners[-1] and name in _FORWARDED and not _is_overridden(cls, _CALLED.get(name, "")):
            bound[name] = getattr(trainer.optimization, name)
        elif owner is not owners[0]:
            bound[name] = owner.__dict__[name].__get__(trainer, cls)
    return bound


def _is_overridden(cls: type, name: str) -> bool:
    return sum(name in c.__dict__ for c in cls.__mro__) > 1


def _bound_names(trainer: Trainer) -> set[str]:
    own = vars(trainer)
    return set(own.get("_bindings_by_idle", {}).get(own.get("_idle"), ()))


def _unbind(trainer: Trainer) -> None:
    for name in _bound_names(trainer) | {"_idle"}:
        vars(trainer).pop(name, None)


def release(trainer: Trainer) -> None:
    """Remove the bindings, and what follows the optimizers."""
    trainer.optimization.release()
    _unbind(trainer)
    vars(trainer).pop("_bindings_by_idle", None)


def unbound(trainer: Trainer) -> dict[str, Any]:
    """Return the attributes of a trainer without bindings and without what a run has created."""
    removed = {*_bound_names(trainer), "_bindings_by_idle", "_idle", "current_run"}
    return {key: value for key, value in vars(trainer).items() if key not in removed} | {"model": trainer._module}
