"""Check the optimizers and schedulers of a script: what they are, and that they train the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zae.errors import ConfigError, kind_of
from zae.optim import parameters_of
from zae.optim.factories import as_dict, check_parameters, label, optimizer_for
from zae.values.walk import owners_of_user

__all__ = ["check_closures", "check_disjoint", "check_optimizers", "check_scheduler_owners", "needs_closure"]

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
    parts = as_dict(optimizer)
    objects = {name: part for name, part in parts.items() if isinstance(part, Optimizer)}
    for name, part in parts.items():
        if name in objects:
            check_parameters(label("optimizer", optimizer, name), part, model)
        elif part is getattr(torch.optim, "Muon", None) and any(
            p.requires_grad and p.ndim != 2 for p in model.parameters()
        ):
            raise ConfigError(
                f"{label('optimizer', optimizer, name)} is torch.optim.Muon, which is for matrices alone; write "
                "optimizer={'muon': ..., 'adamw': ...}, functions of the model, with AdamW for the other parameters"
            )
    check_disjoint(objects, model)
    for name, part in as_dict(scheduler).items():
        if not isinstance(part, (LRScheduler, ReduceLROnPlateau)):
            optimizer_for(parts, name)
        elif objects and not any(part.optimizer is owner for owner in objects.values()):
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
        if not stepped or not isinstance(owner, Optimizer) or any(owner is part for part in optimizers.values()):
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
    if owners_of_user(cls, "step_one", "optimizer_step"):
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
