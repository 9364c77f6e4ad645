"""Look up private names of torch and of its datasets, each with a fallback where a release does not have it.

No other module reads them. A name is looked up when it is used, so that a missing one cannot fail an import.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.errors import ConfigError

__all__ = [
    "accelerator",
    "alike",
    "arrange_buckets",
    "call_hooks",
    "call_instead",
    "call_of",
    "can_arrange_buckets",
    "check_reducer",
    "compiled_graphs",
    "compiler",
    "count_devices",
    "default_store",
    "end_by_kill",
    "find",
    "fingerprint_of",
    "forward_pre_hooks",
    "found_overflow",
    "has_bf16_of_x86",
    "has_gradient_hooks",
    "has_loading_hooks",
    "has_own_loading",
    "has_own_shapes",
    "in_place",
    "is_compiled",
    "is_loader_iterator",
    "is_profiling",
    "is_view",
    "move_module",
    "overflow_flags",
    "shut_down_workers",
    "unsaved_buffers",
    "version_of",
]

_calls = itertools.count()


def find(module: str, name: str) -> Any:
    """Return a name of a module of torch, which may be dotted, or None where this torch does not have it."""
    try:
        return operator.attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        return None


# ------------------------------------------------------------------------------------------------ modules and tensors


def fingerprint_of(dataset: Any) -> str | None:
    """Return the fingerprint of a dataset, its own or that of a Hugging Face one; None if it has none."""
    for name in ("fingerprint", "_fingerprint"):
        with contextlib.suppress(Exception):  # It may be a property, which is computed from a file that is gone.
            fingerprint = getattr(dataset, name, None)
            if isinstance(fingerprint, str):
                return fingerprint
    return None


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; always 0 where torch does not say."""
    return int(getattr(tensor, "_version", 0))


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor may share the memory of another one."""
    ask = getattr(tensor, "_is_view", None)
    return True if ask is None else bool(ask())


@contextmanager
def call_instead(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Call a function instead of a module, where torch supports it; the function may call `call_of` the module.

    The wrappers around the module, and its type, do not change.
    """
    state = vars(module)
    name = "_compiled_call_impl"
    if not (hasattr(nn.Module, name) and hasattr(nn.Module, "_call_impl")):
        yield
        return
    before = state.get(name)
    state[name] = function
    try:
        yield
    finally:
        state[name] = before


def is_compiled(module: nn.Module) -> bool:
    """Whether ``compile()`` was called on a module."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_by_hand(module: Any) -> bool:
    """Whether a module was compiled in place, or is what ``torch.compile`` returned."""
    return hasattr(module, "_orig_mod") or is_compiled(module)


def call_of(module: nn.Module) -> Callable[..., Any]:
    """Return the call of a module with its hooks, without the function of `call_instead`."""
    return module._call_impl


def call_hooks(module: nn.Module) -> str:
    """Return which kind of hook a call of a module runs beside its forward; "" if it has none."""
    kinds = {
        "_forward_pre_hooks": "forward pre hook",
        "_forward_hooks": "forward hook",
        "_backward_pre_hooks": "backward pre hook",
        "_backward_hooks": "backward hook",
    }
    return next((kind for name, kind in kinds.items() if getattr(module, name, None)), "")


def has_own_loading(module: nn.Module) -> bool:
    """Return whether code outside of torch runs when weights are loaded into a module itself."""
    kind = type(module)
    try:
        methods = (kind.set_extra_state, kind.load_state_dict, kind._load_from_state_dict)
        hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    except AttributeError:
        return True
    return any(hooks) or any(not getattr(method, "__module__", "").startswith("torch.") for method in methods)


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, with the parameters that it has, whatever the device.

    To an accelerator that torch has no name for, ``module.to`` gives it new ones. Optimizers that a script has made
    then keep the old ones, and tied weights are tied no more.
    """
    can_set_data = getattr(torch, "_has_compatible_shallow_copy_type", lambda *pair: True)
    elsewhere = [parameter for parameter in module.parameters() if parameter.device.type != device.type]
    before = torch.__future__.get_swap_module_params_on_conversion()
    if elsewhere and not can_set_data(elsewhere[0], torch.empty(0, device=device)):
        _refuse_what_is_lost(module, device)
        torch.__future__.set_swap_module_params_on_conversion(True)  # Or `module.to` makes new parameters.
    try:
        module.to(device)
    except RuntimeError as error:
        if "swap" in str(error):
            error.add_note(
                "zae: a graph, or a weak reference of the script, holds this parameter, and torch cannot move it then; "
                f"write model.to('{device}') where the model is made, before its optimizer"
            )
        raise
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _refuse_what_is_lost(module: nn.Module, device: torch.device) -> None:
    """Refuse parameters of which torch would lose something, where it exchanges their tensors as they move."""
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"{name} has no shape yet, and torch cannot move such a parameter to {device.type!r}; call the model "
                "with one batch before the trainer is made"
            )
        if has_gradient_hooks(parameter):
            raise ConfigError(
                f"a hook is registered on {name}, and torch loses the hook as it moves the parameter to "
                f"{device.type!r}; write model.to('{device}') before the hook is registered"
            )


def has_own_shapes(module: nn.Module) -> bool:
    """Return whether the class of a module may accept weights of other shapes than the module has."""
    try:
        return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    except AttributeError:
        return True


def unsaved_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers of a module itself that are not in its ``state_dict``."""
    names = getattr(module, "_non_persistent_buffers_set", None)
    if names is not None:
        return list(names)
    saved = module.state_dict()
    return [name for name, _ in module.named_buffers(recurse=False) if name not in saved]


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return what is called before each forward of a module."""
    hooks = getattr(module, "_forward_pre_hooks", {})
    return list(hooks.values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether hooks are called when the gradient of a parameter has been computed."""
    try:
        return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
    except AttributeError:
        return True


def alike(rows: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield the columns of rows of tensors, in groups of one type and one device: `in_place` takes a column."""
    groups: dict[Any, list[tuple[Tensor, ...]]] = {}
    for row in rows:
        kind = tuple((type(tensor), tensor.device, tensor.dtype, tensor.layout, tensor.is_nested) for tensor in row)
        groups.setdefault(kind, []).append(row)
    for group in groups.values():
        yield tuple(map(list, zip(*group)))


def in_place(method: str, tensors: list[Tensor], argument: list[Tensor] | float, **options: Any) -> None:
    """Call ``add_``, ``copy_`` or ``mul_`` of each tensor of a group: in one kernel where torch has one for them.

    The argument is a number, or a list with a tensor for each of them. There is no ``div_``: with a
    number it multiplies by the reciprocal on CUDA, and the kernel for many tensors divides, which rounds otherwise.
    """
    others = argument if isinstance(argument, list) else []
    of_many = {"add_": "_foreach_add_", "copy_": "_foreach_copy_", "mul_": "_foreach_mul_"}
    together = getattr(torch, of_many[method], None)
    if together is not None and all(map(_is_plain, (tensors[0], *others[:1]))):
        together(tensors, argument, **options)
        return
    for index, tensor in enumerate(tensors):
        getattr(tensor, method)(others[index] if others else argument, **options)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the functions of torch for many tensors take a tensor: no subclass, sparse or nested one."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


# ------------------------------------------------------------------------------------------------ optimizers


def has_loading_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks of an optimizer may change the state that is loaded into it."""
    try:
        return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)
    except AttributeError:
        return True


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors in which a scaler notes that a gradient of an optimizer is not finite, one for each device."""
    read_flags = getattr(scaler, "_found_inf_per_device", None)
    return [] if read_flags is None else list(read_flags(optimizer).values())


def found_overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Return whether a scaler found a gradient of an optimizer that is not finite when it unscaled them."""
    read_flags = getattr(scaler, "_found_inf_per_device", None)
    if read_flags is not None:
        return any(flag.item() for flag in read_flags(optimizer).values())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if not bool(values.isfinite().all()):
                return True
    return False


# ------------------------------------------------------------------------------------------------ state of the process


def is_profiling() -> bool:
    """Return whether a profiler is active."""
    try:
        return torch.autograd._profiler_enabled()
    except AttributeError:
        return True


def has_bf16_of_x86() -> bool:
    """Return whether an x86 processor has instructions for bfloat16; False where it is unknown."""
    asks = [getattr(torch.cpu, name, bool) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(ask() for ask in asks)


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this build of torch supports, or None; the machine may not have one."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # How torch 2.6 says that there is none.
        return None


def count_devices(kind: str, *needed: str, begun: bool = False) -> int:
    """Return how many devices of a kind this process can use.

    That is 0 where the module of torch lacks a needed function, and, with ``begun``, where it is not in use yet.
    """
    module: Any = getattr(torch, kind, None)
    if not all(hasattr(module, name) for name in ("is_available", "device_count", *needed)):
        return 0
    is_there = getattr(module, "is_initialized", module.is_available) if begun else module.is_available
    return int(module.device_count()) if is_there() else 0


# ------------------------------------------------------------------------------------------------ the compiler


def compiler(name: str) -> Any:
    """Return a name of ``torch._dynamo``, or None."""
    return find("torch._dynamo", name)


def inductor_modes() -> dict[str | None, dict[str, Any]]:
    """Return the options of each mode of ``torch.compile``."""
    ask = find("torch._inductor", "list_mode_options")
    return {} if ask is None else ask()


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled.

    Where torch does not count them, each call returns a larger number, as if a graph had been compiled.
    """
    counters = compiler("utils.counters")
    return next(_calls) if counters is None else int(counters["stats"]["unique_graphs"])


# ------------------------------------------------------------------------------------- ranks and their gradients


def default_store() -> Any:
    """Return the store of the process group, over which all ranks can write and read keys, or None."""
    read = find("torch.distributed.distributed_c10d", "_get_default_store")
    return None if read is None else read()


def can_arrange_buckets() -> bool:
    """Return whether `arrange_buckets` has an effect."""
    reducer = find("torch.distributed", "Reducer")
    return hasattr(reducer, "_push_all_rebuilt_params") and hasattr(reducer, "_rebuild_buckets")


def arrange_buckets(reducer: Any) -> None:
    """Arrange the buckets of gradients by the order of the parameters, before the first step, if torch supports it."""
    if can_arrange_buckets():
        reducer._push_all_rebuilt_params()
        reducer._rebuild_buckets()


def check_reducer(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Raise the error of torch for a step with gradients that were not averaged; its next forward raises it too."""
    getattr(wrapper, "_check_reducer_finalized", lambda: None)()


# ------------------------------------------------------------------------------------------------ workers of a loader


def is_loader_iterator(value: Any) -> bool:
    """Return whether a value is what ``iter`` returns of a DataLoader; False where torch has no class for it."""
    base = find("torch.utils.data.dataloader", "_BaseDataLoaderIter")
    return base is not None and isinstance(value, base)


def shut_down_workers(iterator: Any) -> None:
    """End the workers of a DataLoader iterator; without the name, torch ends them when it frees the iterator."""
    getattr(iterator, "_shutdown_workers", lambda: None)()


def end_by_kill(worker: Any) -> None:
    """Let a process of multiprocessing, which survives SIGTERM, be ended by SIGKILL where SIGTERM was meant to end it.

    torch does so for a worker that hangs, and Python at its exit for all that are left, which it then waits for.
    """
    started = getattr(worker, "_popen", None)
    if started is not None:
        started.terminate = started.kill
