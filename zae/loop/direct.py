"""The direct way through a step: what has nothing to do is not called.

A call that does nothing costs as much as one that does something. As an epoch begins, the seams of its steps are bound
past the add-ons that say that they are idle; where nobody overrides what encloses a micro-batch,
`gradients` does what ``Trainer.gradients`` does in fewer calls, and where nobody overrides anything of the step,
`run_batch` does so with all of it. Whatever anybody overrides is called as ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from zae.common import argument_checks, optim
from zae.common.device import samples_on_host
from zae.composition.introspect import add_ons_of, is_add_on
from zae.loop.progress import Every
from zae.loop.progress_bar import Bar

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["Own", "bind", "gradients", "idle_add_ons", "is_plain", "release", "run_batch", "unbound"]

_OF_A_MICRO_BATCH = ("sync_context", "micro_step", "forward_context", "weigh")
_OF_A_STEP = (
    "batch_context", "gradients", "micro_batches", "normalize", "unscale", "clip", "optimizer_step", "scheduler_step",
    "zero_grad", "logging",
)  # fmt: skip
_BOUND = (*_OF_A_MICRO_BATCH, *_OF_A_STEP, "batches", "to_device", "backward", "weight_of", "step_one", "checkpoint")


class Own(NamedTuple):
    """What is the core's own, for the time being: nobody overrides it who has something to do."""

    batch: bool = False  # Moving and weighing a batch, on the host.
    backward: bool = False
    micro_batch: bool = False  # All around its forward and backward: `gradients` may take the direct way.
    step: bool = False  # All of the step besides: `run_batch` may.
    optimizer: Optimizer | None = None  # The only one, where stepping it is the core's own.


def idle_add_ons(trainer: Trainer) -> frozenset[Any]:
    """The add-ons, with their bases, that say that they have nothing to do in the steps to come.

    An answer stands for the class that gives it and for its bases: one that derives from it, and says nothing itself,
    may do something there, and so may another add-on of the same base.
    """
    idle: set[Any] = set()
    busy: set[Any] = set()
    for answering, covered, others in _answers(type(trainer)):
        is_idle = answering is not None and answering.is_idle(trainer)
        (idle if is_idle else busy).update(covered)
        busy.update(others)
    return frozenset(idle - busy)


def _answers(cls: type[Any]) -> list[tuple[Any, list[Any], list[Any]]]:
    """For each add-on of a class: who answers whether it is idle, for which classes that stands, and the others."""
    if "__answers__" in cls.__dict__:
        known: list[tuple[Any, list[Any], list[Any]]] = cls.__dict__["__answers__"]
        return known
    found = []
    for add_on in add_ons_of(cls):
        kinds = [c for c in add_on.__mro__ if is_add_on(c) and not c.__dict__.get("_is_base")]
        answering = next((c for c in kinds if "is_idle" in c.__dict__), None)
        covered = [c for c in kinds if answering is None or c in answering.__mro__]
        found.append((answering, covered, [c for c in kinds if c not in covered]))
    # Kept on the class, with which it goes; a cache of ours would keep every class alive.
    cls.__answers__ = found if any(answering is not None for answering, _, _ in found) else []
    return _answers(cls)


def bind(trainer: Trainer) -> None:
    """Bind the seams of the step to what has something to do now, as attributes of a trainer that is set up.

    It is called anew as each epoch and each evaluation begins, for by then another answer may be true.
    """
    idle, ways = idle_add_ons(trainer), vars(trainer).setdefault("_ways", {})
    if vars(trainer).get("_idle") == idle:
        return
    _unbind(trainer)
    if idle not in ways:
        bound = _bindings(trainer, idle)
        vars(trainer).update(bound)
        ways[idle] = (bound, _own(trainer))
    bound, trainer._own = ways[idle]
    vars(trainer).update(bound, _idle=idle)


def _bindings(trainer: Trainer, idle: frozenset[Any]) -> dict[str, Any]:
    """The seams whose outermost override is of an idle add-on, bound to the first of one that is not."""
    bound, cls = {}, type(trainer)
    for name in _BOUND if idle else ():
        owners = [c for c in cls.__mro__ if name in c.__dict__]
        owner = next(c for c in owners if c not in idle)
        if owner is not owners[0] and name not in vars(trainer):
            bound[name] = owner.__dict__[name].__get__(trainer, cls)
    return bound


def _own(trainer: Trainer) -> Own:
    """What is the core's own, with the seams as they are bound."""
    alone = len(trainer._optimizers) == 1 and is_plain(trainer, "step_one")
    optimizer = next(iter(trainer._optimizers.values())) if alone else None
    micro_batch = trainer.world_size == 1 and _are_plain(trainer, _OF_A_MICRO_BATCH)
    return Own(
        batch=trainer.device.type == "cpu" and _are_plain(trainer, ("to_device", "weight_of")),
        backward=is_plain(trainer, "backward"),
        micro_batch=micro_batch,
        step=micro_batch and optimizer is not None and not trainer._clearing and _are_plain(trainer, _OF_A_STEP),
        optimizer=optimizer,
    )


def _unbind(trainer: Trainer) -> None:
    for name in vars(trainer)["_ways"].get(vars(trainer).pop("_idle", None), [()])[0]:
        vars(trainer).pop(name, None)


def release(trainer: Trainer) -> None:
    """Take away what `bind` has bound, and what follows the optimizers."""
    optim.unlisted(trainer._optimizers)
    if "_ways" in vars(trainer):
        _unbind(trainer)
        del vars(trainer)["_ways"]
    trainer._own = Own()


def unbound(trainer: Trainer) -> dict[str, Any]:
    """Return the attributes of a trainer as it is before it is set up: without what a run, or `bind`, has made."""
    own = vars(trainer)
    bound = own.get("_ways", {}).get(own.get("_idle"), [()])[0]
    made = {"_own": Own(), "_ready": False, "_bar": Bar(False), "_wrapped": None, "_valid": (None, Every(epochs=1))}
    kept = {key: value for key, value in own.items() if key not in (*bound, "_ways", "_idle")}
    return kept | made | {"model": trainer._module}


def is_plain(trainer: Trainer, name: str) -> bool:
    """Whether a seam is the core's own in this run: nobody overrides it who has something to do."""
    root = next(c for c in reversed(type(trainer).__mro__) if name in c.__dict__)
    return getattr(getattr(trainer, name), "__func__", None) is root.__dict__[name]


def _are_plain(trainer: Trainer, names: Iterable[str]) -> bool:
    """Whether all of these seams are the core's own in this run."""
    return all(is_plain(trainer, name) for name in names)


def gradients(trainer: Trainer, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
    """``Trainer.gradients`` without the calls that would do nothing."""
    micro_batches = trainer.micro_batches(batch)
    count, outputs = len(micro_batches), []
    for micro_batch in micro_batches:  # What fails is told with it: `zae.loop.error_notes` looks for it by this name.
        outputs.append(_gradient(trainer, micro_batch, count))
    trainer.normalize([out.get("num_targets") for out, _ in outputs])
    return outputs


def _gradient(trainer: Trainer, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
    """``Trainer.micro_step`` of one of ``count`` batches, from the loader's hands."""
    own = trainer._own
    samples = samples_on_host(batch) if own.batch else 0
    if not samples:
        batch = trainer.to_device(batch)
    out: Any = trainer.train_step(batch)
    if type(out) is not dict:
        out = argument_checks.as_mapping(trainer, out, batch)
    try:
        loss, num_targets = out["loss"], out.get("num_targets")
        if count > 1:
            loss = trainer.weigh(loss, num_targets, count)
        if own.backward and type(loss) is Tensor:
            loss.backward()
        else:
            trainer.backward(loss)
        kept = out if count == 1 else dict(out)  # A step may return the same dict for all of a window.
        return kept, samples if samples and num_targets is None else trainer.weight_of(batch, num_targets)
    except Exception as error:
        argument_checks.explain_outputs(trainer, out, batch, error)
        raise


def run_batch(trainer: Trainer, batch: Any) -> None:
    """``Trainer.run_batch`` where all of it is the core's own; a loss on the host is read once, by guard and log."""
    out, weight = both = _gradient(trainer, batch, 1)
    loss = out["loss"]
    value = loss.item() if type(loss) is Tensor and loss.is_cpu else math.nan
    if trainer.gradient_clip:
        trainer.clip()
    # A loss that is not finite, one elsewhere, and a norm are the guard's to look at.
    stepped = (value - value == 0 and trainer.grad_norm is None) or trainer.nonfinite.allows(trainer, [both])
    if stepped:
        optim.step(trainer._own.optimizer)  # type: ignore[arg-type]
        if trainer.scheduler_step_on_batch:
            trainer.scheduler_step("batch")
    for parameter in trainer.parameters:
        parameter.grad = None
    trainer.progress_checker.advance(1, not stepped)
    trainer.log_train.record({"loss": value} if len(out) == 1 and value == value else out, weight)
