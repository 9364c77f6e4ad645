"""Make the optimizers and schedulers of a trainer: it is given one or several, or functions that make them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zae.errors import ConfigError, kind_of
from zae.optim import parameters_of
from zae.optim.optimizer_state import load_optimizer_state
from zae.schedulers.lengths import takes_total_steps
from zae.values.walk import tensors_in

__all__ = [
    "as_dict",
    "call_factories",
    "check_parameters",
    "is_factory",
    "label",
    "make_optimizer",
    "make_scheduler",
    "map_entries",
    "optimizer_for",
    "takes_model",
]

_SINGLE = "0"  # The name of a single optimizer in states and messages.


def as_dict(value: Any) -> dict[str, Any]:
    """Return None, one object, or a list or dict of them as a dict."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {str(index): item for index, item in enumerate(value)}
    return {_SINGLE: value}


def label(option: str, value: Any, name: str) -> str:
    """Return the expression for one of several objects in a script."""
    if isinstance(value, Mapping):
        return f"{option}[{name!r}]"
    return f"{option}[{name}]" if isinstance(value, (list, tuple)) else option


def is_factory(value: Any) -> bool:
    """Return whether a value is a function, or a class, that makes the object."""
    return isinstance(value, type) or not hasattr(value, "state_dict")


def map_entries(value: Any, make: Callable[[str, Any], Any]) -> Any:
    """Apply a function to one object, or to each of a list or a dict, keeping the form."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: make(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [make(str(index), item) for index, item in enumerate(value)]
    return make(_SINGLE, value)


def make_optimizer(factory: Callable[..., Any], module: nn.Module) -> Any:
    """Call the factory of an optimizer with the model's parameters, or with what the name of its parameter asks for."""
    by_name = {"model": module, "named_parameters": module.named_parameters}
    name = _argument_of(factory)
    try:
        optimizer = factory(by_name.get(name, module.parameters()))
    except (AttributeError, TypeError, ValueError) as error:
        passed = {"model": "the model", "named_parameters": "model.named_parameters, a method"}.get(name)
        error.add_note(
            f"zae: the function given as optimizer was called with {passed or 'model.parameters()'}, as the name "
            f"{name!r} of its parameter says: 'model' is the model, 'named_parameters' the method that gives names as "
            "well, and any other name model.parameters()"
        )
        raise
    if isinstance(optimizer, Optimizer):
        check_parameters("what the function given as optimizer returned", optimizer, module)
    return optimizer


def check_parameters(place: str, optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that has no parameter of a model with some to train."""
    inside = {id(p) for p in model.parameters()}
    is_frozen = not any(p.requires_grad for p in model.parameters())
    parameters = parameters_of(optimizer)
    if not is_frozen and not any(id(p) in inside for p in parameters):
        name = type(optimizer).__name__
        raise ConfigError(
            f"{place} ({name}) has {len(parameters)} parameters, none of which is among the {len(inside)} of the "
            f"model; make it from the same model: {name}(model.parameters(), ...)"
        )


def takes_model(factory: Callable[..., Any]) -> bool:
    """Return whether a factory takes the model, or its ``named_parameters``, to form groups by name."""
    return _argument_of(factory) in ("model", "named_parameters")


def _argument_of(factory: Callable[..., Any]) -> str:
    """Return the name of the first parameter of a factory; empty for a builtin that does not say."""
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):
        return ""


def call_factories(
    value: Any,
    argument: Callable[[str], Any],
    kind: type,
    option: str,
    call: Callable[..., Any] = lambda factory, argument: factory(argument),
) -> Any:
    """Call the factories among one or several objects."""

    def make(name: str, entry: Any) -> Any:
        if isinstance(entry, Optimizer):
            _follow_parameters(entry)
        if isinstance(entry, (Optimizer, LRScheduler, ReduceLROnPlateau)):
            return entry
        result = call(entry, argument(name))
        if not isinstance(result, (kind, ReduceLROnPlateau)):
            several = f"for several, give a dict of functions: {option}={{'name': lambda parameters: ...}}"
            remedy = several if isinstance(result, (Mapping, list, tuple)) else f"return a torch {kind.__name__}"
            raise ConfigError(
                f"the function given as {label(option, value, name)} returned {kind_of(result)}; {remedy}"
            )
        return result

    return map_entries(value, make)


def _follow_parameters(optimizer: Optimizer) -> None:
    """Move an optimizer's state to the device that its parameters have been moved to."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):  # What is kept under a name, for instance.
            continue
        if any(value.dim() and value.device != parameter.device for value in tensors_in(state)):
            load_optimizer_state(optimizer, optimizer.state_dict())
            return


def make_scheduler(factory: Callable[..., Any], optimizer: Any, total_steps: int | None) -> Any:
    """Call a scheduler's factory, with the planned number of steps where it has a parameter ``total_steps``."""
    return factory(optimizer, total_steps=total_steps) if takes_total_steps(factory) else factory(optimizer)


def optimizer_for(optimizers: Mapping[str, Optimizer], name: str) -> Optimizer:
    """Return the optimizer for the factory of a scheduler: that of its name, or the only one."""
    if name.isdecimal() and list(optimizers) == [_SINGLE]:
        return optimizers[_SINGLE]
    if not optimizers:
        raise ConfigError(f"scheduler {name} has no optimizer; give the trainer one, or leave the scheduler out")
    if name not in optimizers:
        raise ConfigError(f"scheduler {name!r} has no optimizer of that name; give both as dicts with the same keys")
    return optimizers[name]
