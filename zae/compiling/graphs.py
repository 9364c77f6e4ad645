"""What a compiled step is made for and must not share: shapes, hooks, memory, the optimizer's kernel, the compiler."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from zae.common.device import leading_dimension
from zae.common.optim import laid_out, leaves_kernel_open, parameters_of
from zae.common.torch_private import compiler, has_gradient_hooks
from zae.common.walk import fields_of, is_dataclass
from zae.composition.introspect import slots_of
from zae.data.loaders import length_of
from zae.errors import ConfigError, did_you_mean
from zae.preview.explain import owners_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = [
    "GUARDS",
    "TRACES",
    "WITH_KERNEL",
    "add_gradients",
    "by_kernel",
    "check_compiler",
    "detached",
    "fits_kernel",
    "full_of",
    "hold",
    "is_full",
    "is_fusible",
    "is_off",
    "options_of",
    "reason_of",
    "refusals",
    "shapes_of",
    "to_copy",
    "wait_for",
    "why_not",
]

_FUSED = (SGD, Adam, AdamW)  # Whose fused kernels have been held against the loop by hand.
WITH_KERNEL = tuple(kind.__name__ for kind in _FUSED)
"""The names of the optimizers that step by their fused kernel."""
GUARDS: dict[str, Any] = {
    "config.skip_nnmodule_hook_guards": False,
    "config.use_numpy_random_stream": True,
    "variables.RandomVariable._supported_fn_names": frozenset(),
}
"""Have a graph look whether its modules have the hooks that they had: else those that come later are never called. And
have it hold no number of NumPy's stream, or of a ``random.Random``: torch 2.13 would draw the first from its own, and
take the others for constants."""
TRACES = {"config.trace_autograd_ops": True, **GUARDS}
"""Follow ``torch.autograd.grad`` too."""
_holders: dict[str, tuple[int, Any]] = {}  # How many trainers need a setting, and what it was before them.


def check_compiler(mode: str, backend: Any) -> None:
    """Refuse a backend that is none, and a torch that makes no graph of a gradient.

    Parameters
    ----------
    mode : str
        "model" needs no gradient in the graph.
    backend : str or callable
        What ``torch.compile`` is to be given.

    Raises
    ------
    ConfigError
        With what there is.

    Examples
    --------
    >>> check_compiler("graph", "inductor")
    """
    backends = torch.compiler.list_backends(())
    if not isinstance(backend, str) and not callable(backend):
        raise ConfigError(
            f"compile_backend={backend!r}; it must be the name of a backend of torch.compile, or a function"
        )
    if isinstance(backend, str) and backend not in backends:
        raise ConfigError(
            f"compile_backend={backend!r} is not a backend of torch.compile{did_you_mean(backend, backends)}; "
            f"available: {', '.join(backends)}"
        )
    if mode != "model" and not hasattr(compiler("config"), "trace_autograd_ops"):
        raise ConfigError(
            f"compile_mode={mode!r} needs a torch that traces torch.autograd.grad, and torch {torch.__version__} does "
            "not; update torch, or write compile_mode='model'"
        )


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
    if is_dataclass(batch):
        return tuple(shapes_of(each) for each in fields_of(batch).values())
    if isinstance(batch, (str, int, float, type(None))):
        return batch
    held = getattr(batch, "__dict__", {})  # Only what it holds itself: what is further within may lead back to it.
    return type(batch), *((name, shapes_of(value)) for name, value in held.items() if isinstance(value, Tensor))


def full_of(loader: Any, world_size: int) -> tuple[int | None, int]:
    """Ask a loader for what tells a full batch from the short one at an epoch's end.

    Parameters
    ----------
    loader : iterable
        As the user gave it.
    world_size : int
        How many ranks share it.

    Returns
    -------
    (int or None, int)
        The samples of a full batch, and the batches of an epoch of this rank, 0 where that is not known.

    Examples
    --------
    >>> full_of([torch.ones(4, 2), torch.ones(1, 2)], 1)
    (4, 2)
    """
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(loader, (list, tuple)) and loader:
        size = leading_dimension(loader[0])
    return size if isinstance(size, int) else None, (length_of(loader) or 0) if world_size == 1 else 0


def is_full(batch: Any, size: int | None, length: int, before: int, count: int) -> bool:
    """Whether a batch is of the shape to be compiled, wherever a run begins.

    Its first dimension need not be that of its samples: it is full, too, where another comes after it in the epoch.

    Parameters
    ----------
    batch : object
        What the loader gave.
    size, length
        As `full_of` gives them.
    before, count : int
        The batches of the epoch before this window, and those of the window.

    Examples
    --------
    >>> [is_full(torch.ones(3, 4, 2), 4, 5, before, 1) for before in (3, 4)]
    [True, False]
    """
    if leading_dimension(batch) == size or before + count < length:
        return True
    return length <= count and (size is None or length > 0)  # Alone in its epoch, or nobody knows.


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


def why_not(trainer: Trainer, add_on: type) -> str | None:
    """Name what a graph of forward and backward would leave out.

    Parameters
    ----------
    trainer : Trainer
        Set up.
    add_on : type
        The one that makes the graph: what is inside of it would not be called.

    Returns
    -------
    str or None
        None where it holds them.

    Examples
    --------
    >>> from zae import Trainer
    >>> from zae.addons import CompileAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> _ = model.bias.register_hook(lambda gradient: 2 * gradient)
    >>> trainer = Task.add_on(CompileAddon)(model, "cpu", optimizer=SGD, compile_mode="model")
    >>> trainer.setup()
    >>> why_not(trainer, CompileAddon)
    'hooks of the gradient of bias'
    """
    cls = type(trainer)
    hooked = [name for name, p in trainer.unwrap().named_parameters() if has_gradient_hooks(p)]
    inside = cls.__mro__[cls.__mro__.index(add_on) + 1 :]
    owners = [("backward", owner) for owner in owners_of(cls, "backward")]
    owners += [("micro_step", owner) for owner in owners_of(cls, "micro_step") if owner in inside]
    own = [f"{name}() of {each.__name__}" for name, each in owners if not each.__module__.startswith("zae.")]
    parallel = getattr(slots_of(cls).get("parallel"), "__name__", None)
    reasons: dict[str, Any] = {
        f"several ranks ({parallel})": trainer.world_size > 1,
        f"{len(trainer.optimizers)} optimizers": len(trainer.optimizers) > 1,
        "a float16 loss scale": getattr(trainer, "precision", None) == "fp16",
        f"hooks of the gradient of {', '.join(hooked)}": hooked,
        " and ".join(own): own,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def to_copy(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], others: Sequence[Any]) -> set[int]:
    """Find gradients that no ``.grad`` may be: in memory that is not their own, or in another order than the parameter.

    Autograd gives each ``.grad`` its own memory, in the parameter's order; a graph hands out what it has. Clipping
    would change something else, or the same twice, and a fused kernel goes through weight and gradient number by
    number, wherever they lie.

    Parameters
    ----------
    parameters, gradients : sequence of Tensor
        As many of both.
    others : sequence
        What else must stay as it is; what is no tensor is passed over.

    Returns
    -------
    set of int
        The places of the gradients that have to be copied: another parameter may come to stand there.

    Examples
    --------
    >>> weight, gradient = torch.nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3)
    >>> to_copy([weight], [gradient], []), to_copy([weight], [gradient], [gradient])
    (set(), {0})
    >>> to_copy([weight], [torch.ones(3, 2).t()], [])
    {0}
    """
    taken = {each.untyped_storage().data_ptr() for each in (*parameters, *others) if _has_memory(each)}
    found = set()
    for at, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is None or not _has_memory(gradient):
            continue
        place = gradient.untyped_storage().data_ptr()
        # One that is expanded has steps of 0, and a parameter has none.
        if place in taken or _steps(gradient) != _steps(parameter):
            found.add(at)
        taken.add(place)
    return found


def _steps(value: Tensor) -> list[int]:
    """How far apart in memory the entries of each dimension are that has several."""
    return [step for step, size in zip(value.stride(), value.shape) if size > 1]


def add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], copied: set[int]) -> None:
    """Add what a graph gave to each ``.grad``, as a backward does.

    Parameters
    ----------
    parameters, gradients : sequence of Tensor
        As many of both.
    copied : set of int
        As `to_copy` gives it.

    Examples
    --------
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> add_gradients([weight], [torch.ones(2)], set())
    >>> weight.grad
    tensor([1., 1.])
    """
    for at, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if at in copied and gradient is not None:
            gradient = laid_out(gradient, parameter)
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad += gradient


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
        leaves_kernel_open(group) and all(parameter.is_cpu for parameter in group["params"])
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
    # Its state is a defaultdict: asked by an index, it would begin to hold what is asked for.
    return len({optimizer.state.get(parameter, {}).get("momentum_buffer") is None for parameter, _ in held}) < 2


@contextmanager
def by_kernel(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Have optimizers step by their fused kernels for a while; it is no lasting setting of theirs.

    Parameters
    ----------
    optimizers : iterable of Optimizer
        Those that have one; where it does not take the gradients that there are, it is left alone.

    Examples
    --------
    >>> optimizer = SGD([torch.nn.Parameter(torch.ones(1))])
    >>> with by_kernel([optimizer]):
    ...     print(optimizer.param_groups[0]["fused"])
    True
    """
    groups = [group for each in optimizers if fits_kernel(each) for group in each.param_groups]
    before = [(group["fused"], group["foreach"]) for group in groups]
    for group in groups:
        group["fused"], group["foreach"] = True, False
    try:
        yield
    finally:
        for group, kept in zip(groups, before):
            group["fused"], group["foreach"] = kept


def refusals() -> tuple[type[Exception], ...]:
    """List what the compiler raises instead of a graph; nothing has been computed then.

    Examples
    --------
    >>> issubclass(compiler("exc.Unsupported"), refusals())
    True
    """
    # The second is not derived from the first.
    kinds = (compiler("exc.TorchDynamoException"), compiler("exc.FailOnRecompileLimitHit"))
    return tuple(kind for kind in kinds if kind is not None)


def reason_of(refusal: Exception) -> str:
    """Say why the compiler makes no graph, in its words or, where it has none, in ours.

    Parameters
    ----------
    refusal : Exception
        One of `refusals`.

    Examples
    --------
    >>> reason_of(compiler("exc.Unsupported")("cannot follow print"))
    'torch.compile refuses it: cannot follow print'
    """
    if type(refusal).__name__ == "FailOnRecompileLimitHit":
        return (
            "torch.compile had to make a new graph of it again and again: it reads a Python value that changes from "
            "step to step, a counter for instance (TORCH_LOGS=recompiles tells which)"
        )
    return f"torch.compile refuses it: {str(refusal).strip()[:500]}"


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


def is_off() -> bool:
    """Whether somebody has switched torch.compile off: what it is given would run as it stands.

    Examples
    --------
    >>> with torch.compiler.set_stance("force_eager"):
    ...     is_off()
    True
    """
    by_name = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    return by_name or bool(compiler("config.disable")) or compiler("eval_frame._stance.stance") == "force_eager"


def hold(change: int, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Have the compiler go by some settings while any trainer needs them: they are those of the process.

    Parameters
    ----------
    change : int
        1 when a trainer begins, -1 when it ends; the last one puts back what was.
    settings : mapping of str to object
        `GUARDS` or `TRACES`: values by their places in ``torch._dynamo``.

    Returns
    -------
    mapping of str to object
        What this trainer needs from now on.

    Examples
    --------
    >>> before = compiler("config.trace_autograd_ops")
    >>> held = hold(1, TRACES)
    >>> hold(-1, held)
    {}
    >>> compiler("config.trace_autograd_ops") == before
    True
    """
    for place, value in settings.items():
        path, _, name = place.rpartition(".")
        owner = compiler(path)
        if not hasattr(owner, name):  # Another torch's compiler.
            continue
        count, before = _holders.get(place, (0, None))
        before = before if count else getattr(owner, name)
        _holders[place] = (count + change, before)
        setattr(owner, name, value if count + change else before)
    return settings if change > 0 else {}


def wait_for(device: torch.device) -> None:
    """Let an accelerator finish, so that the clock tells the truth.

    Examples
    --------
    >>> wait_for(torch.device("cpu"))
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
