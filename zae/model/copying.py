"""Copy a model, or what holds one."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["deep_copy"]

_Value = TypeVar("_Value")


class _WithoutGraphs(TorchFunctionMode):
    """Copies a tensor that an operation has returned as its value; torch refuses to copy it with its graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def deep_copy(value: _Value, memo: dict[int, Any] | None = None) -> _Value:
    """Return what ``copy.deepcopy`` does, also of a module that keeps an activation of its last forward.

    Parameters
    ----------
    value : object
        A model, a trainer's attributes, or anything else.
    memo : dict, optional
        What is not to be copied, or has been copied already, by id.

    Returns
    -------
    object
        The copy; tensors in it have no graph.

    Examples
    --------
    >>> import torch
    >>> from zae.model.copying import deep_copy
    >>> module = torch.nn.Linear(2, 2)
    >>> module.output = module(torch.ones(1, 2))  # copy.deepcopy(module) raises RuntimeError.
    >>> twin = deep_copy(module)
    >>> torch.equal(twin.output, module.output), twin.output.requires_grad
    (True, False)
    """
    with _WithoutGraphs():
        return copy.deepcopy(value, memo)
