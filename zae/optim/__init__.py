"""One or several optimizers and schedulers of a trainer: make, normalize, step and inspect them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zae.errors import ConfigError, StepError, kind_of
from zae.optim.optimizer_state import load_optimizer_state
from zae.schedulers.lengths import takes_total_steps
from zae.values.walk import tensors_in

__all__ = [
    "argument_of",
    "as_dict",
    "call_factories",
    "check_closures",
    "check_parameters",
    "gradient_norm",
    "has_lazy",
    "label",
    "learning_rates",
    "make",
    "make_scheduler",
    "mark_copied",
    "mark_stepped",
    "needs_closure",
    "normalize",
    "optimizer_for",
    "parameters_of",
    "parameters_outside",
    "parameters_to_clip",
    "step",
    "takes_model",
    "total_targets",
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


def make(factory: Callable[..., Any], module: nn.Module) -> Any:
    """Call the factory of an optimizer with the model's parameters, or with what the name of its parameter asks for."""
    by_name = {"model": module, "named_parameters": module.named_parameters}
    name = argument_of(factory)
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
    return argument_of(factory) in ("model", "named_parameters")


def argument_of(factory: Callable[..., Any]) -> str:
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


# ----------------------------------------------------------------------------------------------------------- parameters


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters that an optimizer holds."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def has_lazy(parameters: Iterable[Tensor]) -> bool:
    """Return whether some parameters are lazy: the first forward creates them."""
    return any(map(nn.parameter.is_lazy, parameters))


def parameters_outside(optimizer: Optimizer, model: nn.Module) -> list[Tensor]:
    """List the parameters of an optimizer that the model, and its ``state_dict``, do not have."""
    inside = {id(p) for p in model.parameters()}
    return [p for p in parameters_of(optimizer) if id(p) not in inside]


def parameters_to_clip(optimizers: Mapping[str, Optimizer], model: nn.Module) -> list[list[Tensor]]:
    """List the parameters that are clipped together: all for one optimizer, those of each for several.

    They have the model's order, as in ``clip_grad_norm_(model.parameters(), ...)``: the order of a sum of squares
    decides its last bit. Frozen parameters are included, as they may be unfrozen later.
    """
    ordered = list(model.parameters())
    model_ids = {id(p) for p in ordered}
    lists = []
    for optimizer in optimizers.values():
        parameters = parameters_of(optimizer)
        trained_ids = {id(p) for p in parameters}
        # One optimizer clips all of the model, also what it does not hold.
        of_model = ordered if len(optimizers) == 1 else [p for p in ordered if id(p) in trained_ids]
        outside = [p for p in parameters if id(p) not in model_ids]
        lists.append(of_model + outside)
    return lists


# ----------------------------------------------------------------------------------------------- gradients and the step


def normalize(
    counts: list[Any], parameters: Iterable[Tensor], reduce: Callable[[Tensor], Tensor], world_size: int
) -> None:
    """Divide the gradients by the number of targets in the window, over all ranks.

    The gradient of a window is then ``sum(n_i * g_i) / sum(n_i)``: every target has the same weight, in any
    micro-batch and rank. Ranks average their gradients, so the total is divided by the world size too.
    """
    if len(counts) == 1 and world_size == 1:  # A single loss is a mean over its targets.
        return
    total = total_targets(counts, reduce, world_size)
    if total is None:
        return
    for parameter in parameters:  # One by one, as a loop by hand: torch's kernel for many tensors rounds otherwise.
        if parameter.grad is not None:
            parameter.grad.div_(total / world_size)


def total_targets(counts: list[Any], reduce: Callable[[Tensor], Tensor], world_size: int) -> float | None:
    """Return the number of targets in the window, over all ranks; None where the steps count none."""
    missing = sum(count is None for count in counts)
    if missing == len(counts):
        return None
    if missing:
        raise StepError(
            f"train_step returned 'num_targets' for {len(counts) - missing} of the {len(counts)} batches of a window; "
            "return it in all of them, or in none"
        )
    on_device = [count.reshape(()) for count in counts if isinstance(count, Tensor) and not count.is_cpu]
    if len(on_device) == len(counts):  # One wait for the device in a window.
        are_integers = not any(count.is_floating_point() for count in on_device)
        # Float64 adds up as Python does; MPS has none.
        dtype = None if are_integers or on_device[0].is_mps else torch.float64
        counts = [torch.stack(on_device).sum(dtype=dtype)]
    total = float(sum(float(count) for count in counts))
    if world_size > 1:
        total = float(reduce(torch.tensor(total, dtype=torch.float64)))
    if not total > 0:
        raise StepError(
            f"the steps of a window counted {total:g} targets ('num_targets'); return a positive number, and leave "
            "batches without a target out of the data, for instance documents of one token"
        )
    return total


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of the gradients of parameters, as ``clip_grad_norm_`` computes it."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    try:
        return nn.utils.get_total_norm(gradients)
    except NotImplementedError as error:
        sparse = next((gradient for gradient in gradients if gradient.layout is not torch.strided), None)
        if sparse is None:
            raise
        raise ConfigError(
            f"gradient_clip computes the norm of the gradients, and torch has none for a sparse one (of shape "
            f"{tuple(sparse.shape)}); write sparse=False where the embedding is made, or gradient_clip=0"
        ) from error


def learning_rates(optimizers: Mapping[str, Optimizer]) -> dict[str, float]:
    """Return the learning rates: ``lr``, or ``lr/<optimizer>`` and ``lr/<group>`` where there are several.

    Groups without a rate, or with None, are left out: some optimizers adapt it themselves.
    """
    rates: dict[str, float] = {}
    for name, optimizer in optimizers.items():
        prefix = f"lr/{name}" if len(optimizers) > 1 else "lr"
        for index, group in enumerate(optimizer.param_groups):
            if group.get("lr") is not None:
                rates[f"{prefix}/{index}" if index else prefix] = float(group["lr"])
    return rates


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, so that its ``step`` cannot do without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_closures(optimizers: Mapping[str, Optimizer], cls: type) -> None:
    """Refuse an optimizer whose ``step`` needs a closure, unless the user's class overrides the step."""
    user_classes = [c for c in cls.__mro__ if not c.__module__.startswith("zae.")]
    if any(name in vars(c) for c in user_classes for name in ("step_one", "optimizer_step")):
        return
    for name, optimizer in optimizers.items():
        if needs_closure(optimizer):
            raise ConfigError(
                f"optimizer {name} ({type(optimizer).__name__}) evaluates the loss itself, through a closure; override "
                "def step_one(self, optimizer) in your class, with a closure that calls self.gradients(batch), "
                "self.unscale() and self.clip(): docs/howto/optimizers.md has it in full"
            )


def step(optimizer: Optimizer) -> bool:
    """Make the step of an optimizer."""
    optimizer.step()
    return True


def mark_stepped(optimizer: Optimizer) -> None:
    """Record the steps of an optimizer for its scheduler, as an attribute does that pickle leaves out."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    function = type(optimizer).step

    @wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return function(optimizer, *args, **kwargs)

    record._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = record  # type: ignore[method-assign]


def mark_copied(schedulers: Any) -> None:
    """Call `mark_stepped` for the optimizers of all schedulers of a trainer that was copied or unpickled."""
    for scheduler in as_dict(schedulers).values():
        if isinstance(getattr(scheduler, "optimizer", None), Optimizer):
            mark_stepped(scheduler.optimizer)
