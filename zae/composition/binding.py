"""Bind the seams of a step past idle add-ons, so that an add-on with nothing to do costs a step nothing.

An override that only calls ``super()`` costs as much as one that does something. At the start of each epoch and of each
evaluation, each add-on is asked ``is_idle()``; a seam whose outermost overrides belong to idle add-ons is then bound on
the trainer to the first override that has work to do. A default of Trainer that only forwards is passed by as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zae.composition.introspect import add_ons_of, kinds_of

__all__ = ["Binding"]

_SEAMS = (
    "batches", "on_step_begin", "batch_context", "gradients", "micro_batches", "sync_context", "to_device",
    "micro_step", "forward_context", "count_targets", "scale_loss", "backward", "sample_weight", "normalize", "unscale",
    "clip", "may_step", "optimizer_step", "step_one", "scheduler_step", "zero_grad", "logging", "on_step_end",
    "checkpoint",
)  # fmt: skip

_DECISIONS = ("should_validate", "should_checkpoint")
_EMPTY = ("on_step_begin", "on_step_end", "unscale")
_FORWARDED = ("backward", "clip", "scheduler_step", "step_one", "zero_grad")  # To the method of `Optimization`.
_CALLED = {"clip": "gradient_norm"}  # A seam that a default calls in turn: with an override of it nothing is forwarded.


class Binding:
    """What is bound on a trainer in the place of its seams; its `Run` owns it.

    ``bound`` has the seams that are bound now; the outermost override of each is one of an idle add-on. ``decisions``
    has those of ``should_validate`` and ``should_checkpoint`` that are overridden: a step does not ask for the others.
    """

    def __init__(self, owner: Callable[[], Any]) -> None:
        self._owner = owner
        self._idle: frozenset[Any] | None = None
        self._by_idle: dict[frozenset[Any], dict[str, Any]] = {}
        self.bound: dict[str, Any] = {}
        self.decisions: list[str] = []

    def idle_add_ons(self) -> frozenset[Any]:
        """Return the add-ons, with their bases, that have nothing to do in the steps that follow.

        An answer holds for the class that gives it and for its bases. A class that derives from it without an
        ``is_idle`` counts as busy, and so does a base that a busy add-on shares.
        """
        trainer = self._owner()
        idle: set[Any] = set()
        busy: set[Any] = set()
        for answering, covered, others in _answers(type(trainer)):
            is_idle = answering is not None and answering.is_idle(trainer)
            (idle if is_idle else busy).update(covered)
            busy.update(others)
        return frozenset(idle - busy)

    def update(self) -> None:
        """Bind each seam of a step to the first override that has work to do now."""
        self.decisions = [name for name in _DECISIONS if self.overrides(name)]
        idle = self.idle_add_ons()
        if idle == self._idle:
            return
        self._unbind()
        if idle not in self._by_idle:
            self._by_idle[idle] = self._past(idle)
        self._idle, self.bound = idle, self._by_idle[idle]
        vars(self._owner()).update(self.bound)

    def release(self) -> None:
        """Remove what is bound."""
        self._unbind()
        self._idle, self._by_idle = None, {}

    def unbound(self) -> dict[str, Any]:
        """Return the attributes of the trainer without what is bound and without its run."""
        return {key: value for key, value in vars(self._owner()).items() if key not in {*self.bound, "current_run"}}

    def overrides(self, name: str) -> bool:
        """Return whether anything overrides a seam of Trainer: a class, or an attribute of this trainer."""
        trainer = self._owner()
        return _is_overridden(type(trainer), name) or name in vars(trainer)

    def _past(self, idle: frozenset[Any]) -> dict[str, Any]:
        """Return the seams whose outermost override is idle, each with its first override that is not.

        A default that only forwards gives the method that it calls; one that does nothing, a function that costs
        next to nothing.
        """
        trainer, found = self._owner(), {}
        cls = type(trainer)
        for name in set(_SEAMS).difference(vars(trainer)):
            owners = [c for c in cls.__mro__ if name in c.__dict__]
            owner = next(c for c in owners if c not in idle)
            if owner is owners[-1] and name in _EMPTY:
                found[name] = "".format  # It takes any arguments and does nothing, at the least cost.
            elif owner is owners[-1] and name in _FORWARDED and not _is_overridden(cls, _CALLED.get(name, "")):
                found[name] = getattr(trainer.optimization, name)
            elif owner is not owners[0]:
                found[name] = owner.__dict__[name].__get__(trainer, cls)
        return found

    def _unbind(self) -> None:
        for name in self.bound:
            vars(self._owner()).pop(name, None)
        self.bound = {}


def _is_overridden(cls: type, name: str) -> bool:
    return sum(name in c.__dict__ for c in cls.__mro__) > 1


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
