"""Note on an error where in a run it was raised, with which batch, and in which call of a module or of torch.

Nothing is done for it before there is an error: the frames of its traceback hold what was called, and with what.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zae.data.loaders import describe
from zae.data.workers import add_to_text, dead_workers
from zae.device import is_out_of_memory
from zae.errors import ZaeError, did_you_mean
from zae.values.describe import describe_batch

if TYPE_CHECKING:
    from zae.loop.run import Run

__all__ = ["add_notes"]

_MODULE_CALLS = ("_call_impl", "_wrapped_call_impl")  # The methods of nn.Module behind ``module(...)``.
_MAX_PARAMETERS = 8  # Parameters of a module.
_KERNEL_ERRORS = ("CUDA error", "HIP error", "cuDNN error")
"""How the messages begin of accelerator errors that are plain RuntimeErrors, those of its libraries for instance."""


def add_notes(error: BaseException, run: Run) -> None:
    """Note on an exception the epoch, step and batch it was raised in, or the loader that raised it.

    What a kernel does wrong may be raised by a later call, in a later step: then nothing is said to be its cause.
    """
    if not isinstance(error, Exception):
        return
    _add_hint(error, run.trainer)
    progress = run.trainer.progress_checker
    place = f"in epoch {progress.epoch + 1}, step {progress.step + 1} (batch {progress.epoch_batch + 1})"
    if run.activity.loader_use == "evaluation":
        place = f"in an evaluation after step {progress.step}"
    place = f"{place}, on {run.trainer.device}"
    is_late = _may_be_late(error)
    call = ""
    try:
        note = _describe_place(error, place, run)
        if run.activity.batch is not None and not is_late and not isinstance(error, ZaeError):
            call = _describe_failed_call(error, run.trainer.unwrap())
    except Exception as other:  # Raised by an object of the user that is described here; the first error matters.
        note = f"{place}; what is known of it could not be described ({type(other).__name__}: {other})"
    if note and is_late:
        note = f"noticed {note}. {_why_late()}"
    if not note or f"zae: {note}" in getattr(error, "__notes__", ()) or note in str(error):
        return
    if call:
        error.add_note(f"zae: {call}")
    has_died = "DataLoader worker (pid" in str(error) or " is dead: " in note
    if not (has_died and add_to_text(error, f"a worker of a loader has died {note}")):
        error.add_note(f"zae: {note}")


def _may_be_late(error: Exception) -> bool:
    """Return whether an accelerator may have failed in an earlier call than the one that has raised the error."""
    waits_for_kernels = torch.version.cuda and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
    if waits_for_kernels or is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    is_of_torch = isinstance(error, getattr(torch, "AcceleratorError", ()))  # From torch 2.8 on.
    return is_of_torch or str(error).startswith(_KERNEL_ERRORS)


def _why_late() -> str:
    """Say what an error of an accelerator does not tell, and how to find it out."""
    remedy = "set the environment variable CUDA_LAUNCH_BLOCKING=1, and it is raised by the call that fails"
    text = "An accelerator reports an error late: a call before this one, or an earlier step, may be its cause"
    return f"{text}; {remedy}" if torch.version.cuda else text


def _describe_place(error: Exception, place: str, run: Run) -> str:
    """Describe the batch, or the loader that was asked for one; return "" outside of steps and loaders."""
    is_of_worker = "DataLoader worker" in str(error)  # torch raises it anywhere, in a step too.
    failed_at = run.trainer.loader_position.failed_at if run.activity.loader_use == "epoch" else None
    if run.activity.batch is not None and not is_of_worker and failed_at is None:
        return f"{place}; the batch was {describe_batch(run.activity.batch)}"
    if not run.activity.is_loading and not is_of_worker:
        return ""
    progress = run.trainer.progress_checker
    workers = getattr(run.activity.loader, "num_workers", 0)
    moment = f"while batch {failed_at or progress.epoch_batch + 1} of epoch {progress.epoch + 1} was asked for"
    if run.activity.loader_use == "evaluation":
        moment = f"while a batch was asked for in an evaluation after step {progress.step}"
    of_workers = f", num_workers={workers}" if workers else ""
    return f"{moment}, from {describe(run.activity.loader)}{of_workers}{dead_workers(error)}"


def _add_hint(error: Exception, trainer: Any) -> None:
    """Add a note to an error of a step that takes the trainer for something else."""
    if isinstance(error, TypeError) and re.search(r"\blog\(\) (got an unexpected keyword|missing)", str(error)):
        error.add_note("zae: to record a number of a batch, return it from the step: return {'loss': loss, 'x': value}")
    if isinstance(error, AttributeError) and error.obj is trainer and type(error) is AttributeError:
        near = did_you_mean(str(error.name), [name for name in dir(trainer) if name[0] != "_"]).removeprefix("; ")
        hint = f"set self.{error.name} in __init__, before it is used; the model is self.model"
        error.add_note(f"zae: {near or hint}")


def _describe_failed_call(error: BaseException, model: nn.Module) -> str:
    """Return what was called innermost, with the shapes of its parameters and of its input; "" for no such call."""
    function: FrameType | None = None
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        called = frame.f_locals.get("self")
        if frame.f_code.co_name in _MODULE_CALLS and isinstance(called, nn.Module):
            return _describe_module(called, model, frame.f_locals)
        if frame.f_globals.get("__name__") == "torch.nn.functional":
            function = frame  # The outermost: losses call others of the same name.
    return "" if function is None else _describe_function(function)


def _describe_module(module: nn.Module, model: nn.Module, arguments: Mapping[str, Any]) -> str:
    """Describe a module by its name in the model and its parameters, and what it was called with."""
    name = next((name for name, value in model.named_modules() if value is module), "")
    title = f"{name} ({type(module).__name__})" if name else type(module).__name__
    shapes = [f"{key} {list(value.shape)}" for key, value in module.named_parameters(recurse=False)]
    shapes += ["..."] if len(shapes) > _MAX_PARAMETERS else []
    parameters = f", with the parameters {', '.join(shapes[:_MAX_PARAMETERS])}" if shapes else ""
    inputs = [_describe(argument) for argument in arguments.get("args", ())]
    inputs += [f"{key}={_describe(value)}" for key, value in arguments.get("kwargs", {}).items()]
    return f"the error is of {title}{parameters}; its input was {', '.join(inputs) or 'nothing'}"


def _describe_function(frame: FrameType) -> str:
    """Describe a function of `torch.nn.functional` by the tensors that it was called with."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: frame.f_locals.get(name) for name in names}
    tensors = [f"{name} {_describe(value)}" for name, value in arguments.items() if isinstance(value, Tensor)]
    return f"the error is of {code.co_name}, called with {', '.join(tensors)}" if tensors else ""


def _describe(value: Any) -> str:
    """Describe an input by its shapes and types; indices and classes also by their range."""
    text = describe_batch(value)
    is_index = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    if not is_index or value.dtype is torch.bool or value.device.type != "cpu" or not value.numel():
        return text
    return f"{text} from {int(value.min())} to {int(value.max())}"
