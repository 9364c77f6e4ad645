"""What a compiled step is made for and must not share: shapes, hooks, memory, the optimizer's kernel, the compiler."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from zae.optim import leaves_kernel_open, parameters_of

__all__ = [
    "WITH_KERNEL",
    "detached",
    "fits_kernel",
    "graphs_made",
    "has_hooks",
    "is_fusible",
    "judge",
    "options_of",
    "refusals",
    "shapes_of",
    "sharing",
    "trace_gradients",
    "wait_for",
]

_log = logging.getLogger("zae")
_TRIAL = 20  # Steps of each kind that are timed; the first half of a kind, which is slower, does not count.
_FUSED = (SGD, Adam, AdamW)  # Whose fused kernels have been held against the loop by hand.
WITH_KERNEL = tuple(kind.__name__ for kind in _FUSED)
"""The names of the optimizers that step by their fused kernel."""
_tracers = 0
_traced_before: Any = None


def shapes_of(batch: Any) -> Any:
    """Describe what a graph is compiled for: the shapes and types in a batch, and its plain values.

    Parameters
    ----------
    batch : object
        What a loader gave.

    Returns
    -------
    object
        Equal for two batches that one graph computes.

    Examples
    --------
    >>> shapes_of([torch.ones(2, 3), "train"])
    (((2, 3), torch.float32), 'train')
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, shapes_of(value)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return tuple(map(shapes_of, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return tuple(shapes_of(getattr(batch, each.name, None)) for each in dataclasses.fields(batch))
    return batch if isinstance(batch, (str, int, float, type(None))) else type(batch)


def detached(value: Any) -> Any:
    """Return what a step returned without its graph, which the compiler would prepare to differentiate.

    Parameters
    ----------
    value : object
        Tensors, or dicts, lists and tuples of them.

    Examples
    --------
    >>> detached({"loss": torch.ones(1, requires_grad=True) * 2})["loss"].requires_grad
    False
    """
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(each) for key, each in value.items()}
    return type(value)(map(detached, value)) if type(value) in (list, tuple) else value


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody waits for a parameter's gradient: a graph calls nobody.

    Examples
    --------
    >>> has_hooks(torch.nn.Parameter(torch.ones(1)))
    False
    """
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def sharing(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], others: Sequence[Any]) -> set[int]:
    """Find gradients in memory that is not their own: clipping would change something else, or the same twice.

    Autograd gives each ``.grad`` its own memory; a graph hands out what it has.

    Parameters
    ----------
    parameters, gradients : sequence of Tensor
        As many of both.
    others : sequence
        What else must stay as it is; what is no tensor is passed over.

    Returns
    -------
    set of int
        The ``id`` of each parameter whose gradient has to be copied.

    Examples
    --------
    >>> weight, gradient = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    >>> sharing([weight], [gradient], []), sharing([weight], [gradient], [gradient]) == {id(weight)}
    (set(), True)
    """
    taken = {each.untyped_storage().data_ptr() for each in (*parameters, *others) if _has_memory(each)}
    found = set()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or not _has_memory(gradient):
            continue
        place = gradient.untyped_storage().data_ptr()
        expanded = any(step == 0 and size > 1 for step, size in zip(gradient.stride(), gradient.shape))
        if place in taken or expanded:
            found.add(id(parameter))
        taken.add(place)
    return found


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 0


def is_fusible(optimizer: Optimizer) -> bool:
    """Whether an optimizer can step by its fused kernel, on the CPU, and nobody has chosen another one for it.

    Examples
    --------
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> is_fusible(SGD([weight])), is_fusible(SGD([weight], foreach=True)), is_fusible(torch.optim.Rprop([weight]))
    (True, False, False)
    """
    return type(optimizer) in _FUSED and all(
        leaves_kernel_open(group)
        and all(parameter.is_cpu and parameter.is_floating_point() for parameter in group["params"])
        for group in optimizer.param_groups
    )


def fits_kernel(optimizer: Optimizer) -> bool:
    """Whether the fused kernel takes the gradients there are: no sparse ones, and momentum of all or of none.

    Examples
    --------
    >>> fits_kernel(SGD([torch.nn.Parameter(torch.ones(1))]))
    True
    """
    held = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    if any(gradient.is_sparse for _, gradient in held):
        return False
    if type(optimizer) is not SGD:
        return True
    return len({optimizer.state[parameter].get("momentum_buffer") is None for parameter, _ in held}) < 2


def graphs_made() -> int:
    """Count the graphs that this process has compiled.

    Examples
    --------
    >>> graphs_made() >= 0
    True
    """
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def refusals() -> tuple[type[Exception], ...]:
    """List what the compiler raises instead of a graph; nothing has been computed then.

    Examples
    --------
    >>> issubclass(torch._dynamo.exc.Unsupported, refusals())
    True
    """
    errors = torch._dynamo.exc
    limit = getattr(errors, "FailOnRecompileLimitHit", None)  # No TorchDynamoException, for all its name.
    return (errors.TorchDynamoException, *([] if limit is None else [limit]))


def options_of(backend: Any, fallback_random: bool) -> dict[str, Any]:
    """Return what ``torch.compile`` is told.

    Parameters
    ----------
    backend : str or callable
        A backend.
    fallback_random : bool
        Whether inductor is to draw random numbers as the eager step does.

    Examples
    --------
    >>> options_of("inductor", True)["options"]
    {'fallback_random': True}
    """
    options: dict[str, Any] = {"backend": backend, "dynamic": False}
    if fallback_random and backend == "inductor":
        options["options"] = {"fallback_random": True}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        # Else all trainers of a process share the few graphs that one function may have.
        options["isolate_recompiles"] = True
    return options


def trace_gradients(change: int) -> None:
    """Have the compiler follow torch.autograd.grad while any trainer needs it: the setting is one of the process.

    Parameters
    ----------
    change : int
        1 when a trainer begins, -1 when it ends; the last one puts back what was.

    Examples
    --------
    >>> before = torch._dynamo.config.trace_autograd_ops
    >>> trace_gradients(1)
    >>> trace_gradients(-1)
    >>> torch._dynamo.config.trace_autograd_ops == before
    True
    """
    global _tracers, _traced_before
    config: Any = torch._dynamo.config
    if not _tracers:
        _traced_before = config.trace_autograd_ops
    _tracers += change
    config.trace_autograd_ops = True if _tracers else _traced_before


def wait_for(device: torch.device) -> None:
    """Let an accelerator finish, so that the clock tells the truth.

    Examples
    --------
    >>> wait_for(torch.device("cpu"))
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def judge(trial: Mapping[str, list[float]], report: dict[str, Any]) -> None:
    """Keep the faster of two steps, once there are enough times of both, and say what was found.

    Parameters
    ----------
    trial : mapping
        Seconds of "compiled" and of "eager" steps.
    report : dict
        Has "compile_seconds" and "graphs", and is given the medians, "pays_after" and "kept".

    Examples
    --------
    >>> report = {"kept": "compiled", "compile_seconds": 6.0, "graphs": 1}
    >>> judge({"compiled": [1.0] * 20, "eager": [3.0] * 20}, report)
    >>> report["kept"], report["pays_after"]
    ('compiled', 4)
    """
    if min(map(len, trial.values())) < _TRIAL:
        return
    for kind, times in trial.items():
        report[kind] = median(times[len(times) // 2 :])
    gain = report["eager"] - report["compiled"]
    report["pays_after"] = int(report["compile_seconds"] / gain) + 1 if gain > 0 else None
    report["kept"] = "compiled" if gain > 0 else "eager"
    _log.info("compile_mode='auto' keeps the %(kept)s step: %(compiled).3g s compiled, %(eager).3g s eager; "
              "compiled in %(compile_seconds).1f s, %(graphs)d graphs, pays after %(pays_after)s steps",
              report)  # fmt: skip
