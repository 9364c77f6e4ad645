"""One or several optimizers and schedulers, brought into one form and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zae.common.optimizer_state import load_optimizer_state
from zae.common.torch_private import has_step_hooks, is_profiling
from zae.errors import CheckpointMismatch, ConfigError, StepError

__all__ = [
    "are_lazy",
    "as_dict",
    "backward_each",
    "call_factories",
    "check_closures",
    "check_groups",
    "fused_hints",
    "gradient_norm",
    "is_stepped_by_class",
    "label",
    "learning_rates",
    "leaves_kernel_open",
    "like_parameter_layout",
    "mark_copied",
    "mark_stepped",
    "match_layout",
    "normalize",
    "optimizer_for",
    "outside_of",
    "parameters_of",
    "parameters_to_clip",
    "step",
    "track_parameters",
    "unheld",
    "untrack_parameters",
]

_SINGLE = "0"  # The name of an only optimizer, in states and messages.
_AROUND = getattr(Optimizer, "profile_hook_step", lambda function: function)(Optimizer.step).__code__
"""Of the function that torch puts around the ``step`` of every class of optimizers."""
_KNOWN_NAMES = {
    "Optimizer", "RuntimeError", "__class__", "__name__", "_global_optimizer_post_hooks", "_global_optimizer_pre_hooks",
    "_optimizer_step_code", "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "autograd", "cast", "chain",
    "isinstance", "len", "profiler", "record_function", "torch", "tuple", "values",
}  # fmt: skip
# It is so from torch 2.6 to 2.13; one that does anything else is called.
_IS_KNOWN = set(_AROUND.co_names) == _KNOWN_NAMES


def as_dict(value: Any) -> dict[str, Any]:
    """Bring None, one object, a list or a dict of them into a dict."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {str(index): item for index, item in enumerate(value)}
    return {_SINGLE: value}


def label(what: str, given: Any, name: str) -> str:
    """Return how one of several objects is written in a script."""
    if isinstance(given, Mapping):
        return f"{what}[{name!r}]"
    return f"{what}[{name}]" if isinstance(given, (list, tuple)) else what


def is_factory(each: Any) -> bool:
    """Whether what was given is yet to be called: a function, or the class itself."""
    return isinstance(each, type) or not hasattr(each, "state_dict")


def map_entries(value: Any, make: Callable[[str, Any], Any]) -> Any:
    """Apply a function to one object, or to each of a list or a dict, keeping the form."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: make(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [make(str(index), item) for index, item in enumerate(value)]
    return make(_SINGLE, value)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters that an optimizer holds."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def are_lazy(parameters: Iterable[Tensor]) -> bool:
    """Whether some parameters have yet to be made, by the first step."""
    return any(map(nn.parameter.is_lazy, parameters))


def like_parameter_layout(value: Tensor, parameter: Tensor) -> Tensor:
    """Copy what stands beside a parameter number by number into the parameter's order in memory."""
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def match_layout(optimizer: Optimizer) -> None:
    """Lay an optimizer's state out in memory as the parameters are: what was saved is in rows, whatever it was before.

    A fused kernel reads a weight and its state in the order of memory.
    """
    for parameter in parameters_of(optimizer):
        state: Any = optimizer.state.get(parameter)  # Asked by an index, it would begin to hold one.
        for name, value in list(state.items()) if isinstance(state, dict) else ():
            if _is_like(value, parameter) and value.stride() != parameter.stride():
                state[name] = like_parameter_layout(value, parameter)


def _is_like(value: Any, parameter: Tensor) -> bool:
    """Whether an entry of a state is a plain tensor that stands beside its parameter number by number."""
    return (
        type(value) is Tensor
        and value.layout is parameter.layout is torch.strided
        and (value.shape, value.device) == (parameter.shape, parameter.device)
    )


def parameters_to_clip(optimizers: Mapping[str, Optimizer], model: nn.Module) -> list[list[Tensor]]:
    """List what is clipped together: all parameters for one optimizer, each optimizer's own for several.

    They stand in the model's order, as in ``clip_grad_norm_(model.parameters(), ...)``: the order of a sum of
    squares decides its last bit. A frozen one has no gradient to clip, until it is thawed.
    """
    ordered = list(model.parameters())
    seen = {id(p) for p in ordered}
    if len(optimizers) == 1:
        return [ordered + [p for o in optimizers.values() for p in parameters_of(o) if id(p) not in seen]]
    lists = []
    for optimizer in optimizers.values():
        held = parameters_of(optimizer)
        mine = {id(p) for p in held}
        lists.append([p for p in ordered if id(p) in mine] + [p for p in held if id(p) not in seen])
    return lists


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of the gradients of parameters, as ``clip_grad_norm_`` computes it."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def backward_each(losses: Mapping[str, Tensor], optimizers: Mapping[str, Optimizer], **kwargs: Any) -> None:
    """Differentiate each loss by the parameters of the optimizer of its name; they may share a graph."""
    last = list(losses)[-1]
    for name, loss in losses.items():
        inputs = [p for p in parameters_of(optimizers[str(name)]) if p.requires_grad]
        if inputs:  # Else all of them are frozen for the time being.
            loss.backward(**{"inputs": inputs, "retain_graph": name != last, **kwargs})


def check_closures(optimizers: Mapping[str, Optimizer], cls: type) -> None:
    """Refuse an optimizer whose ``step`` wants a closure, unless the user's class steps it itself."""
    own = [c for c in cls.__mro__ if not c.__module__.startswith("zae.")]
    if any(name in vars(c) for c in own for name in ("step_one", "optimizer_step")):
        return
    for name, optimizer in optimizers.items():
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"optimizer {name} ({type(optimizer).__name__}) evaluates the loss itself, through a closure; override "
                "the step in your class: def step_one(self, optimizer): optimizer.step(closure); return True"
            )


def outside_of(optimizer: Optimizer, model: nn.Module) -> list[Tensor]:
    """List the parameters of an optimizer that are not the model's: no ``state_dict`` of the model has them."""
    own = {id(p) for p in model.parameters()}
    return [p for p in parameters_of(optimizer) if id(p) not in own]


def unheld(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Name the parameters of a model that want a gradient and that no optimizer holds."""
    held = {id(p) for optimizer in optimizers.values() for p in parameters_of(optimizer)}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]


def _follow_parameters(optimizer: Optimizer) -> None:
    """Bring an optimizer's state to the device that its parameters have been moved to since."""
    if any(
        isinstance(value, Tensor) and value.dim() and value.device != parameter.device
        for parameter, state in optimizer.state.items()
        for value in state.values()
    ):
        load_optimizer_state(optimizer, optimizer.state_dict())


def normalize(
    counts: list[Any], parameters: Iterable[Tensor], reduce: Callable[[Tensor], Tensor], world_size: int
) -> None:
    """Divide the gradients by the number of targets in the window, over all ranks.

    The gradient of a window is then ``sum(n_i * g_i) / sum(n_i)``: every target weighs alike, whichever micro-batch
    and rank it was in. Ranks average their gradients, so the total is divided by the world size too.
    """
    absent = sum(count is None for count in counts)
    if absent == len(counts):
        return
    if absent:
        raise StepError(
            f"train_step returned 'num_targets' for {len(counts) - absent} of the {len(counts)} batches of a window; "
            "return it always, or never"
        )
    away = [count.reshape(()) for count in counts if isinstance(count, Tensor) and not count.is_cpu]
    if len(away) == len(counts) and not any(count.is_floating_point() for count in away):
        counts = [torch.stack(away).sum()]  # Exact, and the host waits for the device once, not for each.
    total = float(sum(float(count) for count in counts))
    if world_size > 1:
        total = float(reduce(torch.tensor(total, dtype=torch.float64))) / world_size
    if not total > 0:
        raise StepError(f"the steps of a window counted {total:g} targets in all ('num_targets'); there must be some")
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(total)


def check_groups(name: str, optimizer: Optimizer, state: Any) -> None:
    """Refuse an optimizer's state that belongs to other parameters, before anything is loaded."""
    entries = state.get("state") if isinstance(state, Mapping) and "param_groups" in state else None
    if not isinstance(entries, Mapping) or not all(isinstance(each, Mapping) for each in entries.values()):
        raise CheckpointMismatch(f"the state of optimizer {name} is not one of a torch optimizer")
    saved = [len(group["params"]) for group in state["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        grew = saved[: len(present)] == present
        raise CheckpointMismatch(
            f"optimizer {name} ({type(optimizer).__name__}) has parameter groups of {present} parameters, but the "
            f"state was saved with {saved}; build it as it was"
            + (" (a group that training has added: in load_state_dict() of your class, before super())" if grew else "")
            + ", or load only the weights: apply_weights(path)"
        )
    for group, other in zip(optimizer.param_groups, state["param_groups"]):
        # A newer torch has settings that an older one had not; that each lacks some of the other's is another class.
        lacks, leaves = sorted(set(optimizer.defaults) - set(other)), sorted(set(other) - set(group))
        if lacks and leaves:
            raise CheckpointMismatch(
                f"optimizer {name} is {type(optimizer).__name__}, whose settings {', '.join(lacks)} the state does not "
                f"have; it has {', '.join(leaves)}: it is of another class. Build it as it was, or load only the "
                "weights: apply_weights(path)"
            )


def learning_rates(optimizers: Mapping[str, Optimizer]) -> dict[str, float]:
    """Name the learning rates: ``lr``, or ``lr/<optimizer>`` and ``lr/<group>`` where there are several.

    An optimizer that finds its rate itself has None for one, or none at all, and is left out.
    """
    rates: dict[str, float] = {}
    for name, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            parts = ["lr", *([name] if len(optimizers) > 1 else []), *([str(index)] if index else [])]
            if group.get("lr") is not None:
                rates["/".join(parts)] = float(group["lr"])
    return rates


def leaves_kernel_open(group: Mapping[str, Any]) -> bool:
    """Whether a group's optimizer has an exact fused kernel, and the user has not chosen a kernel."""
    unset = group.get("fused", False) is None and group.get("foreach") is None
    exact = all(_is_exact(p) for p in group["params"] if p.is_cpu)
    return unset and exact and not (group.get("capturable") or group.get("differentiable"))


def _is_exact(parameter: Tensor) -> bool:
    """Whether a fused kernel of the CPU steps a parameter as the optimizer does by itself.

    That of SGD leaves most weights in half precision as they were, in torch 2.13, and all take a parameter for one
    block of memory: of one with gaps, they would step what lies between.
    """
    if parameter.dtype not in (torch.float32, torch.float64):
        return False
    return nn.parameter.is_lazy(parameter) or _is_block(parameter)


def step(optimizer: Optimizer) -> bool:
    """Make the step of an optimizer, beneath what torch puts around it where that has nothing to do.

    Around the ``step`` of every class torch puts a function that opens a range for the profiler and calls hooks: some
    40 microseconds, a tenth of a small model's step (docs/performance.md). Without a profiler and without hooks,
    what it would call is called: the class's own ``step``. A ``step`` that somebody has put on the optimizer, or around
    that of its class, is called as ever.
    """
    around: Any = type(optimizer).step
    own = vars(optimizer).get("step")
    if (  # `is_stepped_by_class`, without the call: this comes with every step.
        not _IS_KNOWN
        or getattr(around, "__code__", None) is not _AROUND
        or not (own is None or _only_notes(own, around))
        or has_step_hooks(optimizer)
        or is_profiling()
    ):
        optimizer.step()
        return True
    if own is not None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # What a scheduler looks at.
    around.__wrapped__(optimizer)
    return True


def is_stepped_by_class(optimizer: Optimizer) -> bool:
    """Whether nothing is around the step of an optimizer's class but what torch, and a scheduler, put there."""
    around, own = type(optimizer).step, vars(optimizer).get("step")
    return getattr(around, "__code__", None) is _AROUND and (own is None or _only_notes(own, around))


def _only_notes(own: Any, around: Any) -> bool:
    """Whether a ``step`` on an optimizer is a scheduler's, or of `mark_stepped`: it notes that it was called."""
    is_known = getattr(getattr(own, "__code__", None), "co_filename", "") in _NOTING
    return is_known and getattr(own, "__wrapped__", None) is around


def mark_stepped(optimizer: Optimizer) -> None:
    """Let a scheduler see again that its optimizer steps, which torch notes on the instance and pickle leaves out."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    function = type(optimizer).step

    @wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return function(optimizer, *args, **kwargs)

    noting._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = noting  # type: ignore[method-assign]


def mark_copied(schedulers: Any) -> None:
    """Do so for the optimizers of all schedulers of a trainer that was copied or unpickled; a factory has none yet."""
    for scheduler in as_dict(schedulers).values():
        if isinstance(getattr(scheduler, "optimizer", None), Optimizer):
            mark_stepped(scheduler.optimizer)


# Where the functions are from that note a step.
_NOTING = (LRScheduler.__init__.__code__.co_filename, mark_stepped.__code__.co_filename)


def _is_block(value: Tensor) -> bool:
    """Whether a tensor fills a block of memory, in whatever order of its dimensions."""
    return torch.empty_like(value, device="meta").stride() == value.stride()


def fused_hints(optimizers: Mapping[str, Optimizer]) -> dict[str, str]:
    """Name the optimizers whose fused kernel is off because nobody said anything of it."""
    kinds = dict.fromkeys(
        optimizer.defaults["twin_of"]
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        if leaves_kernel_open(group)
        if group.get("momentum") != 0  # Of plain gradient descent there is nothing to fuse.
    )
    text = "has a fused kernel, which takes less time a step and rounds otherwise"
    return {kind: f"{kind} {text}: {kind}(..., fused=True)" for kind in kinds}


def track_parameters(
    optimizers: Mapping[str, Optimizer], model: nn.Module
) -> tuple[list[list[Tensor]], list[Tensor], list[Optimizer]]:
    """List what is clipped together, all parameters, and the optimizers that override ``zero_grad``.

    The lists of parameters follow ``optimizer.add_param_group`` until `untrack_parameters` is called.
    """
    clipped, everything = _lists(optimizers, model)

    def add(optimizer: Optimizer, group: dict[str, Any]) -> None:
        type(optimizer).add_param_group(optimizer, group)
        clipped[:], everything[:] = _lists(optimizers, model)

    for optimizer in optimizers.values():  # On the object: to look for new groups in every step would take time there.
        vars(optimizer)["add_param_group"] = partial(add, optimizer)
    return clipped, everything, [o for o in optimizers.values() if type(o).zero_grad is not Optimizer.zero_grad]


def _lists(optimizers: Mapping[str, Optimizer], model: nn.Module) -> tuple[list[list[Tensor]], list[Tensor]]:
    held = [p for optimizer in optimizers.values() for p in parameters_of(optimizer)]
    everything = {id(p): p for p in (*model.parameters(), *held)}
    return parameters_to_clip(optimizers, model), list(everything.values())


def untrack_parameters(optimizers: Mapping[str, Optimizer]) -> None:
    """Leave the optimizers as they were before `track_parameters`."""
    for optimizer in optimizers.values():
        vars(optimizer).pop("add_param_group", None)


def optimizer_for(optimizers: Mapping[str, Optimizer], name: str) -> Optimizer:
    """Return what a scheduler's factory is called with: the optimizer of its name; of a list, the only one there is."""
    if name.isdecimal() and list(optimizers) == [_SINGLE]:
        return optimizers[_SINGLE]
    if not optimizers:
        raise ConfigError(f"scheduler {name} has no optimizer; give the trainer one, or leave the scheduler out")
    if name not in optimizers:
        raise ConfigError(f"scheduler {name!r} has no optimizer of that name; give both as dicts with the same keys")
    return optimizers[name]


def _call(factory: Callable[..., Any], argument: Any) -> Any:
    return factory(argument)


def call_factories(
    value: Any, argument: Callable[[str], Any], kind: type, what: str, call: Callable[..., Any] = _call
) -> Any:
    """Call the factories among one or several objects."""

    def make(name: str, each: Any) -> Any:
        if isinstance(each, Optimizer):
            _follow_parameters(each)
        if isinstance(each, (Optimizer, LRScheduler, ReduceLROnPlateau)):
            return each
        made = call(each, argument(name))
        if not isinstance(made, (kind, ReduceLROnPlateau)):
            raise ConfigError(
                f"the function given as {label(what, value, name)} returned a {type(made).__name__}; return a torch "
                f"{kind.__name__}"
            )
        return made

    return map_entries(value, make)
