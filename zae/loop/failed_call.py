"""Describe the call of a module, or of a function of torch, in which an error was raised: where model and data differ.

Nothing is done for it before there is an error: the frames of its traceback hold what was called, and with what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from zae.common.argument_checks import describe_batch

__all__ = ["describe_failed_call"]

_MODULE_CALLS = ("_call_impl", "_wrapped_call_impl")  # The methods of nn.Module behind ``module(...)``.
_SHOWN = 8  # Parameters of a module.


def describe_failed_call(error: BaseException, model: nn.Module) -> str:
    """Return what was called innermost, with the shapes of its parameters and of its input; "" for no such call."""
    function: FrameType | None = None
    for frame in reversed([*_frames_of(error)]):
        called = frame.f_locals.get("self")
        if frame.f_code.co_name in _MODULE_CALLS and isinstance(called, nn.Module):
            return _describe_module(called, model, frame.f_locals)
        if frame.f_globals.get("__name__") == "torch.nn.functional":
            function = frame  # The outermost: losses call others of the same name.
    return "" if function is None else _describe_function(function)


def _frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of a traceback, the innermost last."""
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame
        entry = entry.tb_next


def _describe_module(module: nn.Module, model: nn.Module, given: Mapping[str, Any]) -> str:
    """Describe a module by its name in the model and its parameters, and what it was called with."""
    name = next((name for name, each in model.named_modules() if each is module), "")
    what = f"{name} ({type(module).__name__})" if name else type(module).__name__
    shapes = [f"{key} {list(each.shape)}" for key, each in module.named_parameters(recurse=False)]
    shapes += ["..."] if len(shapes) > _SHOWN else []
    own = f", with the parameters {', '.join(shapes[:_SHOWN])}" if shapes else ""
    inputs = [_describe(each) for each in given.get("args", ())]
    inputs += [f"{key}={_describe(each)}" for key, each in given.get("kwargs", {}).items()]
    return f"the error is of {what}{own}; its input was {', '.join(inputs) or 'nothing'}"


def _describe_function(frame: FrameType) -> str:
    """Describe a function of `torch.nn.functional` by the tensors that it was called with."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = {name: frame.f_locals.get(name) for name in names}
    tensors = [f"{name} {_describe(value)}" for name, value in given.items() if isinstance(value, Tensor)]
    return f"the error is of {code.co_name}, called with {', '.join(tensors)}" if tensors else ""


def _describe(value: Any) -> str:
    """Describe an input by its shapes and types; indices and classes also by their range."""
    text = describe_batch(value)
    is_index = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    if not is_index or value.dtype is torch.bool or value.device.type != "cpu" or not value.numel():
        return text
    return f"{text} from {int(value.min())} to {int(value.max())}"
