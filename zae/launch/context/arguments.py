"""The arguments of a call of a model, and which of them have a sequence."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from zae.common.torch_private import flatten_tree
from zae.errors import ConfigError

__all__ = ["check_leaves", "check_names", "get", "input_dimensions", "put"]

_CONSTANTS = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def input_dimensions(model: nn.Module, given: Any) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of the sequence by the parameter of the forward: by default the first one, and 1."""
    if given is None:
        return dict.fromkeys(list(inspect.signature(model.forward).parameters)[:1], (1,))
    named = dict.fromkeys(given, 1) if isinstance(given, (list, tuple)) else given
    made = {name: dims if isinstance(dims, tuple) else (dims,) for name, dims in dict(named).items()}
    if (
        not made
        or not all(isinstance(each, str) for each in made)
        or not all(dims and all(type(dim) is int for dim in dims) for dims in made.values())
    ):
        raise ConfigError(
            f"context_inputs={given!r}; give the parameters of the model's forward that have a sequence, with its "
            "dimension: {'tokens': 1, 'positions': 1}"
        )
    check_names(model, made, "context_inputs")
    return made


def check_names(model: nn.Module, given: Any, option: str) -> None:
    """Refuse names that the forward of a model does not have."""
    parameters = inspect.signature(model.forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            raise ConfigError(
                f"{option}: the forward of {type(model).__name__} has no parameter {name!r}; name one of "
                f"its parameters: {', '.join(parameters)}"
            )


def check_leaves(value: Any, what: str) -> None:
    """Refuse objects in which tensors cannot be seen."""
    for each in flatten_tree(value)[0]:
        if not isinstance(each, _CONSTANTS):
            raise ConfigError(
                f"{what} is a {type(each).__name__}, whose tensors cannot be divided or gathered; give tensors, and "
                "leave out a cache of keys and values: use_cache=False"
            )


def get(bound: inspect.BoundArguments, name: str) -> Any:
    """Return an argument, also one that the forward takes as a further keyword."""
    for key, value in bound.arguments.items():
        if key == name:
            return value
        if bound.signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD and name in value:
            return value[name]
    return None


def put(bound: inspect.BoundArguments, name: str, value: Any) -> None:
    """Replace an argument; what is in the other bound arguments stays."""
    parameters = bound.signature.parameters
    if name in parameters:
        bound.arguments[name] = value
        return
    further = next(key for key, each in parameters.items() if each.kind is each.VAR_KEYWORD)
    bound.arguments[further] = {**bound.arguments.get(further, {}), name: value}
