"""Check the optimizers and schedulers of a script: with the model, with the run, and with those of a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from zae.errors import ConfigError, kind_of
from zae.optim import parameters_of
from zae.optim.factories import as_dict, check_parameters, label, optimizer_for
from zae.schedulers.lengths import (
    is_per_step,
    is_plateau,
    own_length,
    planned_length,
    steps_taken,
)
from zae.values.walk import is_of_zae

__all__ = [
    "Span",
    "check_closures",
    "check_disjoint",
    "check_optimizers",
    "check_scheduler_owners",
    "check_schedules",
    "needs_closure",
]

_ARGUMENT = {"optimizer": "parameters", "scheduler": "optimizer"}  # What a factory of each is called with.
_PUBLIC = {"optimizer": torch.optim, "scheduler": torch.optim.lr_scheduler}
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_EXAMPLES = {"optimizer": "torch.optim.AdamW(parameters, lr=1e-3)", "scheduler": "..."}


def check_optimizers(optimizer: Any, scheduler: Any, model: nn.Module, mode: str) -> None:
    """Refuse an optimizer that cannot train the model, and a scheduler of another optimizer."""
    if not as_dict(optimizer):
        if mode == "train":
            raise ConfigError(
                f"optimizer is {optimizer!r}, and mode='train' needs one; write "
                "optimizer=torch.optim.AdamW(model.parameters()), or mode='test'"
            )
        return
    _check_kinds("optimizer", optimizer, (Optimizer,))
    _check_kinds("scheduler", scheduler, (LRScheduler, ReduceLROnPlateau))
    present = [entry for entry in as_dict(optimizer).values() if isinstance(entry, Optimizer)]
    for name, part in as_dict(optimizer).items():
        if isinstance(part, Optimizer):
            check_parameters(label("optimizer", optimizer, name), part, model)
        elif part is getattr(torch.optim, "Muon", None) and any(
            p.requires_grad and p.ndim != 2 for p in model.parameters()
        ):
            raise ConfigError(
                f"{label('optimizer', optimizer, name)} is torch.optim.Muon, which is for matrices alone; write "
                "optimizer={'muon': ..., 'adamw': ...}, functions of the model, with AdamW for the other parameters"
            )
    check_disjoint({name: part for name, part in as_dict(optimizer).items() if isinstance(part, Optimizer)}, model)
    for name, part in as_dict(scheduler).items():
        if not isinstance(part, (LRScheduler, ReduceLROnPlateau)):
            optimizer_for(as_dict(optimizer), name)
        elif present and not any(part.optimizer is optimizer for optimizer in present):
            raise ConfigError(
                f"{label('scheduler', scheduler, name)} ({type(part).__name__}) was made for another optimizer than "
                f"the one given; make it from the same object: {type(part).__name__}(optimizer, ...)"
            )


def check_scheduler_owners(schedulers: Mapping[str, Any], optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse a scheduler whose optimizer does not train: it would change no learning rate."""
    stepped: set[int] = set()
    for optimizer in optimizers.values():
        stepped.update(map(id, parameters_of(optimizer)))
    for name, scheduler in schedulers.items():
        owner = getattr(scheduler, "optimizer", None)
        kind = type(scheduler).__name__
        if not stepped or not isinstance(owner, Optimizer) or any(owner is known for known in optimizers.values()):
            continue
        if stepped.isdisjoint(map(id, parameters_of(owner))):
            raise ConfigError(
                f"scheduler {name} ({kind}) was made for another optimizer than those that train, whose learning rate "
                f"it would not change; give a function that makes it: scheduler=lambda optimizer: {kind}(optimizer, "
                "...)"
            )


def check_disjoint(optimizers: Mapping[str, Optimizer], model: nn.Module) -> None:
    """Refuse two optimizers that hold the same parameter: each of them would update it in every step."""
    owners: dict[int, str] = {}
    for owner, optimizer in optimizers.items():
        for parameter in parameters_of(optimizer):
            first = owners.setdefault(id(parameter), owner)
            if first != owner:
                names = [name for name, candidate in model.named_parameters() if candidate is parameter]
                raise ConfigError(
                    f"optimizers {first!r} and {owner!r} share the parameter {names[0] if names else 'of a module'}, "
                    "which both would update in each step; give each parameter to one of them, for instance "
                    "torch.optim.AdamW(model.first.parameters()) and torch.optim.SGD(model.second.parameters())"
                )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, so that its ``step`` cannot do without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_closures(optimizers: Mapping[str, Optimizer], cls: type) -> None:
    """Refuse an optimizer whose ``step`` needs a closure, unless the user's class overrides the step."""
    user_classes = [c for c in cls.__mro__ if not is_of_zae(c)]
    if any(name in vars(c) for c in user_classes for name in ("step_one", "optimizer_step")):
        return
    for name, optimizer in optimizers.items():
        if needs_closure(optimizer):
            raise ConfigError(
                f"optimizer {name} ({type(optimizer).__name__}) evaluates the loss itself, through a closure; override "
                "def step_one(self, optimizer) in your class, with a closure that calls self.gradients(batch), "
                "self.unscale() and self.clip(): docs/howto/optimizers.md has it in full"
            )


def _check_kinds(option: str, argument: Any, kinds: tuple[type, ...]) -> None:
    """Refuse what is neither an object of these kinds nor a factory of one."""
    is_pair = _is_pair(argument)  # It is a tuple, and stands for one object.
    several = {option: argument} if is_pair else as_dict(argument)
    for name, entry in several.items():
        place = option if is_pair else label(option, argument, name)
        if isinstance(entry, kinds):
            continue
        if _is_pair(entry):
            cls, options = entry
            arguments = [_ARGUMENT[option], *(f"{key}={value!r}" for key, value in options.items())]
            raise ConfigError(
                f"{place} is a class and a dict of its arguments; give a function that makes it: "
                + _lambda(option, f"{_path(option, cls)}({', '.join(arguments)})")
            )
        if not callable(entry):
            raise ConfigError(
                f"{place} is {kind_of(entry)}; give a {kinds[0].__module__.removesuffix('.optimizer')}."
                f"{kinds[0].__name__}, or a function that makes one: {_lambda(option, _EXAMPLES[option])}"
            )
        _check_factory(option, place, entry)


def _is_pair(value: Any) -> bool:
    """Return whether a value is like ``(AdamW, {"lr": 1e-3})``."""
    is_two = isinstance(value, (list, tuple)) and len(value) == 2
    return is_two and isinstance(value[0], type) and isinstance(value[1], Mapping)


def _check_factory(option: str, place: str, factory: Any) -> None:
    """Refuse a factory that needs more arguments than it gets."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # Some builtins have none.
        return
    if _binds(signature) or (option == "scheduler" and _binds(signature, total_steps=0)):
        return
    if not signature.parameters:
        raise ConfigError(f"{place} is a function without a parameter; write {_lambda(option, _EXAMPLES[option])}")
    if not any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in signature.parameters.values()):
        name = getattr(factory, "__name__", "make")
        raise ConfigError(
            f"{place} is {name}, a function that does not take the {_ARGUMENT[option]}; where it returns what makes "
            f"one, call it: {option}={name}()"
        )
    needed = [p.name for p in list(signature.parameters.values())[1:] if p.default is p.empty and p.kind not in _REST]
    is_class = isinstance(factory, type)
    call = _path(option, factory) if is_class else "make"
    by_steps = "total_steps" in signature.parameters
    arguments = [_ARGUMENT[option], *(f"{name}=..." for name in needed if name != "total_steps")]
    arguments += ["total_steps=total_steps"] * by_steps
    description = f"the class {factory.__name__}, which" if is_class else "a function that"
    raise ConfigError(
        f"{place} is {description} needs {', '.join(needed)} besides the {_ARGUMENT[option]}; write "
        + _lambda(option, f"{call}({', '.join(arguments)})", by_steps)
    )


def _binds(signature: inspect.Signature, **keywords: Any) -> bool:
    try:
        signature.bind(None, **keywords)
    except TypeError:
        return False
    return True


def _path(option: str, cls: type) -> str:
    """Return the name of a class in a script."""
    module = _PUBLIC[option]
    return f"{module.__name__}.{cls.__name__}" if getattr(module, cls.__name__, None) is cls else cls.__name__


def _lambda(option: str, body: str, by_steps: bool = False) -> str:
    return f"{option}=lambda {_ARGUMENT[option]}{', total_steps' * by_steps}: {body}"


# -------------------------------------------------------------------------------------------- schedules and a run


class Span(NamedTuple):
    """The part of a counter, of epochs or of optimizer steps, that a call of ``run`` covers."""

    start: int  # At the beginning of the call.
    present: int  # Now; after a resume it is larger.
    left: int | None  # Remaining; None is unknown.

    def totals(self) -> set[int]:
        """Return the length of this call, and the total at its end."""
        if self.left is None:
            return set()
        end = self.present + self.left
        return {end - self.start, end}


def check_schedules(
    schedulers: Mapping[str, Any], default: bool, is_set: bool, epochs: Span, steps: Span, has_metric: bool
) -> list[str]:
    """Refuse an invalid schedule before the first batch, and return texts of warnings."""
    warnings_: list[str] = []
    if 0 in (epochs.left, steps.left):
        return warnings_  # A finished script that is started again steps nothing.
    for name, scheduler in schedulers.items():
        place = f"scheduler {name} ({type(scheduler).__name__})"
        on_batch = is_per_step(scheduler, default)
        if on_batch and is_set and not default:
            raise ConfigError(
                f"{place} counts optimizer steps, and scheduler_step_on_batch=False is for schedulers that count "
                "epochs; leave that option out"
            )
        if is_plateau(scheduler):
            if not has_metric:
                raise ConfigError(
                    f"{place} needs a metric after each validation, and run() got no valid_loader; give "
                    "run(..., valid_loader=...), or monitor='train/loss'"
                )
            continue
        if isinstance(scheduler, OneCycleLR) and not on_batch:
            _check_cycle(place, scheduler, is_set, epochs, steps)
        _check_end(place, scheduler, on_batch, epochs, steps)
        warnings_ += _check_unit(place, scheduler, on_batch, is_set, epochs, steps)
    return warnings_


def _check_cycle(place: str, scheduler: OneCycleLR, is_set: bool, epochs: Span, steps: Span) -> None:
    """Refuse a OneCycleLR that is stepped by epochs, unless the user asked for it and its length can be in epochs."""
    total = int(scheduler.total_steps)
    fits = steps_taken(scheduler) + (epochs.left or 0) == total or total in epochs.totals()
    if is_set and (fits or total not in steps.totals()):
        return
    line = "scheduler_step_on_batch=True"
    if steps.left is not None and total < steps.present + steps.left:
        line += f", and total_steps={steps.present + steps.left}"
    if not is_set:
        line += " (for a cycle that is counted in epochs: scheduler_step_on_batch=False)"
    raise ConfigError(
        f"{place} has total_steps={total} and would be stepped once an epoch; it is made to be stepped after each "
        f"optimizer step: write {line}"
    )


def _check_end(place: str, scheduler: Any, on_batch: bool, epochs: Span, steps: Span) -> None:
    """Refuse a schedule that ends before the run does."""
    longest = planned_length(scheduler)
    if longest is None:
        return
    unit = "optimizer steps" if on_batch else "epochs"
    planned = steps.left if on_batch else epochs.left
    taken = steps_taken(scheduler)
    if planned is None:
        limit = "run(..., max_steps=...)" if on_batch else "a number of epochs: run(n_epoch, ...)"
        raise ConfigError(
            f"{place} ends after {longest} steps, and the loader has no length to plan with; give "
            f"run(..., steps_per_epoch=...) or {limit}"
        )
    total = taken + planned
    if total <= longest:
        return
    after = f" after {taken}" if taken else ""
    factory = ""
    if hasattr(scheduler, "shape"):
        factory = f", zae.schedulers.{scheduler.shape}(..., total_steps={total})"
    instead = ""
    if on_batch and longest in epochs.totals():
        instead = ", or, if its steps are epochs, write scheduler_step_on_batch=False"
    elif on_batch and longest > taken:
        instead = f", or end the run earlier: run(..., max_steps={longest - taken})"
    elif not on_batch and longest > planned:
        instead = ", or did you mean scheduler_step_on_batch=True?"
    raise ConfigError(
        f"{place} ends after {longest} steps, but this run has {planned} {unit}{after}; create it with a length of "
        f"{total} steps{factory}{instead}"
    )


def _check_unit(place: str, scheduler: Any, on_batch: bool, is_set: bool, epochs: Span, steps: Span) -> list[str]:
    """Compare a schedule's own length with what it is stepped by, and with the other unit."""
    length = own_length(scheduler)
    used, unused = (steps, epochs) if on_batch else (epochs, steps)
    taken = 0 if used.left is None else steps_taken(scheduler) + used.left
    if length not in unused.totals() or length in {taken, *used.totals()}:
        return []
    if on_batch:
        return [
            f"{place} lasts {length} steps, as many as this run has epochs, and is stepped after each of its optimizer "
            "steps; if its steps are epochs, write scheduler_step_on_batch=False"
        ]
    text = (
        f"{place} lasts {length} steps, as many as this run has optimizer steps, but would be stepped once an epoch; "
        "write scheduler_step_on_batch=True"
    )
    if not is_set:
        raise ConfigError(f"{text} (or scheduler_step_on_batch=False, if {length} epochs are meant)")
    return [text.replace("would be", "is").replace("; write", "; if these are meant, write")]
