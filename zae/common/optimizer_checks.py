"""Check the optimizers and schedulers of a trainer's constructor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zae.common.optim import as_dict, label, optimizer_for, parameters_of
from zae.errors import ConfigError, kind_of

__all__ = ["check_optimizers"]

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
    known = [each for each in as_dict(optimizer).values() if isinstance(each, Optimizer)]
    for name, each in as_dict(optimizer).items():
        if isinstance(each, Optimizer):
            _check_parameters(label("optimizer", optimizer, name), each, model)
    for name, each in as_dict(scheduler).items():
        if not isinstance(each, (LRScheduler, ReduceLROnPlateau)):
            optimizer_for(as_dict(optimizer), name)
        elif known and not any(each.optimizer is optimizer for optimizer in known):
            raise ConfigError(
                f"{label('scheduler', scheduler, name)} ({type(each).__name__}) was made for another optimizer than "
                f"the one given; make it from the same object: {type(each).__name__}(optimizer, ...)"
            )


def _check_parameters(where: str, optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that has no parameter of the model."""
    own, held = {id(p) for p in model.parameters()}, parameters_of(optimizer)
    if own and not any(id(p) in own for p in held):
        name = type(optimizer).__name__
        raise ConfigError(
            f"{where} ({name}) has {len(held)} parameters, none of which is among the {len(own)} of the model; make "
            f"it from the same model: {name}(model.parameters(), ...)"
        )


def _check_kinds(what: str, given: Any, kinds: tuple[type, ...]) -> None:
    """Refuse what is neither an object of these kinds nor a factory of one."""
    if _is_pair(given):
        _refuse_pair(what, what, *given)
    for name, each in as_dict(given).items():
        where = label(what, given, name)
        if isinstance(each, kinds):
            continue
        if _is_pair(each):
            _refuse_pair(what, where, *each)
        if not callable(each):
            raise ConfigError(
                f"{where} is {kind_of(each)}; give a {kinds[0].__module__.removesuffix('.optimizer')}."
                f"{kinds[0].__name__}, or a function that makes one: {_lambda(what, _EXAMPLES[what])}"
            )
        _check_factory(what, where, each)


def _is_pair(value: Any) -> bool:
    is_two = isinstance(value, (list, tuple)) and len(value) == 2
    return is_two and isinstance(value[0], type) and isinstance(value[1], Mapping)


def _refuse_pair(what: str, where: str, cls: type, options: Mapping[Any, Any]) -> None:
    """Refuse ``(AdamW, {"lr": 1e-3})``."""
    arguments = [_ARGUMENT[what], *(f"{key}={value!r}" for key, value in options.items())]
    raise ConfigError(
        f"{where} is a class and a dict of its arguments; give a function that makes it: "
        + _lambda(what, f"{_path(what, cls)}({', '.join(arguments)})")
    )


def _check_factory(what: str, where: str, factory: Any) -> None:
    """Refuse a factory that needs more arguments than it gets."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # Some builtins have none.
        return
    if _binds(signature) or (what == "scheduler" and _binds(signature, total_steps=0)):
        return
    if not signature.parameters:
        raise ConfigError(f"{where} is a function without a parameter; write {_lambda(what, _EXAMPLES[what])}")
    needed = [p.name for p in list(signature.parameters.values())[1:] if p.default is p.empty and p.kind not in _REST]
    is_class = isinstance(factory, type)
    made = _path(what, factory) if is_class else "make"
    by_steps = "total_steps" in signature.parameters
    arguments = [_ARGUMENT[what], *(f"{name}=..." for name in needed if name != "total_steps")]
    arguments += ["total_steps=total_steps"] * by_steps
    found = f"the class {factory.__name__}, which" if is_class else "a function that"
    raise ConfigError(
        f"{where} is {found} needs {', '.join(needed)} besides the {_ARGUMENT[what]}; write "
        + _lambda(what, f"{made}({', '.join(arguments)})", by_steps)
    )


def _binds(signature: inspect.Signature, **more: Any) -> bool:
    try:
        signature.bind(None, **more)
    except TypeError:
        return False
    return True


def _path(what: str, cls: type) -> str:
    """Return the name of a class in a script."""
    module = _PUBLIC[what]
    return f"{module.__name__}.{cls.__name__}" if getattr(module, cls.__name__, None) is cls else cls.__name__


def _lambda(what: str, body: str, by_steps: bool = False) -> str:
    return f"{what}=lambda {_ARGUMENT[what]}{', total_steps' * by_steps}: {body}"
