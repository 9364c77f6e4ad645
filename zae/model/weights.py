"""The weights of a model: their names without the prefixes of wrappers, and loading them, all or nothing.

``torch.compile(model)`` names a weight ``_orig_mod.weight``, and ``DataParallel`` and ``DistributedDataParallel`` name
it ``module.weight``. Checkpoints use the names of the module itself, so that plain PyTorch can load them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zae.errors import CheckpointMismatch
from zae.torch_private import has_own_loading, has_own_shapes
from zae.values.strides import has_own_elements, repeat_again
from zae.values.walk import is_sharded, redistribute_like

__all__ = [
    "check_types",
    "extra_names",
    "fit_name",
    "fit_state",
    "fit_weights",
    "is_half_weight",
    "load_fitted",
    "named_parameters",
    "own_names",
    "plain_names",
    "plain_state",
    "without_wrappers",
]

_log = logging.getLogger("zae")
_SHOWN = 10
_COMPILED = "_orig_mod"
_WRAPPERS = (_COMPILED, "module")
_OUTER = (*_WRAPPERS, "model")  # In a LightningModule the model is mostly self.model.


def _inner_name(module: nn.Module) -> str:
    """Return the name of the module inside a wrapper of torch; empty for any other module."""
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return "module"
    # The class that torch.compile returns is private; no other module has only this child.
    return _COMPILED if [*module._modules] == [_COMPILED] else ""


def without_wrappers(module: nn.Module) -> nn.Module:
    """Return the module inside one or several wrappers; a plain one itself."""
    while module._modules and (name := _inner_name(module)):  # A wrapper has a module inside.
        inner = getattr(module, name)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def plain_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map names of parameters, or keys of the ``state_dict``, of a module with wrappers to plain names."""
    prefixes = []
    for path, part in module.named_modules(remove_duplicate=False):
        if part._modules and (inner := _inner_name(part)):  # A wrapper has a module inside.
            prefixes.append((f"{path}.{inner}." if path else f"{inner}.", f"{path}." if path else ""))
    prefixes.sort(key=lambda pair: -len(pair[0]))  # A wrapper within another one first.
    names_in_use = {}
    for name in names:
        plain = name
        for prefix, shorter in prefixes:
            if plain.startswith(prefix):
                plain = shorter + plain[len(prefix) :]
        names_in_use[name] = plain
    return names_in_use


def own_names(module: nn.Module) -> dict[str, str]:
    """Map plain names to the keys of a module's ``state_dict``."""
    return {plain: name for name, plain in plain_names(module, module.state_dict()).items()}


def plain_state(module: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return the ``state_dict`` of a module under plain names."""
    state = module.state_dict(keep_vars=keep_vars)
    plain = plain_names(module, state)
    if not all(name == own for own, name in plain.items()):
        state = OrderedDict((plain[own], value) for own, value in state.items())
    if not keep_vars and any(map(is_sharded, state.values())):
        _join_tied(module, state)
    return state


def _join_tied(module: nn.Module, state: dict[str, Any]) -> None:
    """Let the names of a tied parameter have one tensor, as a ``state_dict`` does not: it is then gathered once."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = plain_names(module, parameters)
    first_names: dict[nn.Parameter, str] = {}
    for own_name, parameter in parameters.items():
        name = names[own_name]
        first = first_names.setdefault(parameter, name)
        if first != name and first in state and name in state:
            state[name] = state[first]


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by their plain names."""
    parameters = dict(module.named_parameters())
    plain = plain_names(module, parameters)
    return {plain[own]: parameter for own, parameter in parameters.items()}


def fit_name(name: str, known: Mapping[str, Any]) -> str:
    """Return the known plain name that a saved one stands for, without wrappers; the name itself if none fits."""
    parts = name.split(".")
    while name not in known and parts[0] in _OUTER and parts[1:]:
        parts = parts[1:]
        if (shorter := ".".join(parts)) in known:
            return shorter
    if name in known:
        return name
    bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return bare if bare in known else name


def fit_state(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the keys that a module loads, whatever wrappers the saved module had."""
    present = module.state_dict()
    known = {plain: key for key, plain in plain_names(module, present).items()}
    fitted: dict[str, Tensor] = {}
    for name, value in weights.items():
        key = name if name in present else known.get(fit_name(name, known), name)
        fitted[name if key in fitted else key] = value  # Two of one name are refused later.
    return fitted


# ------------------------------------------------------------------------------------------------------- loading


def fit_weights(
    module: nn.Module, weights: Mapping[str, Tensor], strict: bool, needed: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return weights under the keys that a module loads; refuse those of another model.

    ``needed`` are the keys that must be there, if not all.
    """
    present = module.state_dict()
    fitted = _tensors_in(present)
    weights = fit_state(module, weights)
    extra = [key for key in extra_names(present) if key not in weights]
    if extra:
        _log.warning("%s stays as it is: files of weights contain tensors alone", ", ".join(extra[:_SHOWN]))
    missing = [key for key in present if key not in (*weights, *extra) and (needed is None or key in needed)]
    unexpected = [key for key in weights if key not in present]
    shapes = [
        f"{key} is {_shape_of(value)} and must be {tuple(fitted[key].shape)}"
        for key, value in weights.items()
        if key in fitted and _shape_of(value) != tuple(fitted[key].shape)
        if not _accepts(module, key.rpartition(".")[0], weights)
    ]
    # With strict=False too, or torch would raise in the middle of loading.
    wrong = {"of another shape": shapes} | ({"missing": missing, "unexpected": unexpected} if strict else {})
    parts = [
        f"{len(v)} {k} ({', '.join(v[:_SHOWN])}{', ...' if len(v) > _SHOWN else ''})" for k, v in wrong.items() if v
    ]
    if parts:
        raise CheckpointMismatch(
            f"the weights do not fit {type(module).__name__}: {'; '.join(parts)}; nothing was loaded. "
            "Build the model as it was saved, or load "
            + ("the others: apply_weights(those others, strict=False)" if shapes else "what fits with strict=False")
        )
    if not strict and (missing or unexpected):
        _log.warning("weights missing: %s; unexpected: %s", missing[:_SHOWN], unexpected[:_SHOWN])
    return weights


def extra_names(state: Mapping[str, Any]) -> list[str]:
    """Return the keys of a ``state_dict`` that are no tensors: what a ``get_extra_state`` has returned."""
    return [key for key, value in state.items() if not isinstance(value, Tensor)]


def load_fitted(module: nn.Module, weights: Mapping[str, Tensor], strict: bool) -> Any:
    """Load whole weights that fit, of which a rank keeps its shards, and leaves out what other ranks hold (meta).

    If a module has its own loading code and it fails, the weights from before are restored.
    """
    present = module.state_dict()
    if away := {key for key, tensor in present.items() if isinstance(tensor, Tensor) and tensor.is_meta}:
        weights = {key: value for key, value in weights.items() if key not in away}
        strict = False
    weights = {key: redistribute_like(value, present.get(key)) for key, value in weights.items()}
    present = present if any(map(has_own_loading, module.modules())) else {}
    before = {key: copy.deepcopy(value) for key, value in present.items() if not nn.parameter.is_lazy(value)}
    extra = {key: present[key] for key in extra_names(present) if key not in weights}
    try:
        with _writable(module):
            return module.load_state_dict({**weights, **extra}, strict=strict)
    except BaseException:
        if before:
            with contextlib.suppress(Exception):  # Its code may fail again; the rest is restored.
                module.load_state_dict(before, strict=False)
        raise


@contextlib.contextmanager
def _writable(module: nn.Module) -> Iterator[None]:
    """Give each element of expanded tensors its own place, which loading needs, and make them views again after it."""
    expanded = []
    for tensor in module.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor) and not has_own_elements(tensor):
            expanded.append((tensor, tensor.stride()))
    for parameter, _ in expanded:
        parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
    try:
        yield
    finally:
        for parameter, strides in expanded:
            repeat_again(parameter, strides)


def check_types(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights of another dtype than the model's: they would be rounded silently."""
    present = _tensors_in(module.state_dict())
    wrong = [
        f"{key} was {value.dtype} and is {present[key].dtype}"
        for key, value in weights.items()
        if key in present and present[key].dtype != value.dtype
    ]
    if wrong:
        raise CheckpointMismatch(
            f"{len(wrong)} weights of {type(module).__name__} have another type ({'; '.join(wrong[:_SHOWN])}); nothing "
            "was loaded. Build the model as it was saved, or take the weights alone: apply_weights(path)"
        )


def _shape_of(value: Any) -> Any:
    """Return the shape of a tensor; the type of anything else, which torch would refuse in the middle of loading."""
    return tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _accepts(module: nn.Module, path: str, weights: Mapping[str, Tensor]) -> bool:
    """Return whether a module loads weights of other shapes with its own code, as observers do; a copy tries it."""
    prefix = f"{path}." if path else ""
    below = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    try:
        owner = module.get_submodule(path)
        if not has_own_shapes(owner):
            return False
        copy.deepcopy(owner).load_state_dict(below, strict=False)
    except (AttributeError, RuntimeError):
        return False
    return True


def _tensors_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state, without the parameters of a lazy module, which have no shape yet."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and not nn.parameter.is_lazy(value)}


def is_half_weight(value: Tensor) -> bool:
    """Return whether a tensor is a parameter in half precision, whose average is in float32."""
    return isinstance(value, nn.Parameter) and value.dtype in (torch.bfloat16, torch.float16)


def has_lazy(parameters: Iterable[Tensor]) -> bool:
    """Return whether some parameters are lazy: the first forward creates them."""
    return any(map(nn.parameter.is_lazy, parameters))
