"""Names of weights in the plain module, without the prefixes of wrappers around it or around a part of it.

``torch.compile(model)`` names a weight ``_orig_mod.weight``, and ``DataParallel`` and ``DistributedDataParallel`` name
it ``module.weight``. Checkpoints use the names of the module itself, so that plain PyTorch can load them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = [
    "fit_name",
    "fit_state",
    "named_parameters",
    "own_names",
    "plain_names",
    "plain_state",
    "without_wrappers",
]

_COMPILED = "_orig_mod"
_WRAPPERS = (_COMPILED, "module")


def _inner_name(module: nn.Module) -> str:
    """Return the name of the module inside a wrapper of torch; empty for any other module."""
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return "module"
    # The class that torch.compile returns is private; no other module has only this child.
    return _COMPILED if [name for name, _ in module.named_children()] == [_COMPILED] else ""


def without_wrappers(module: nn.Module) -> nn.Module:
    """Return the module inside one or several wrappers; a plain one itself.

    Examples
    --------
    >>> layer = nn.Linear(1, 1)
    >>> without_wrappers(DataParallel(layer)) is layer, without_wrappers(layer) is layer
    (True, True)
    """
    while (name := _inner_name(module)) and isinstance(inner := getattr(module, name), nn.Module):
        module = inner
    return module


def plain_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map names of parameters, or keys of the ``state_dict``, of a module with wrappers to plain names.

    Examples
    --------
    >>> plain_names(nn.Sequential(DataParallel(nn.Linear(1, 1))), ["0.module.weight"])
    {'0.module.weight': '0.weight'}
    """
    prefixes = []
    for path, each in module.named_modules(remove_duplicate=False):
        if inner := _inner_name(each):
            prefixes.append((f"{path}.{inner}." if path else f"{inner}.", f"{path}." if path else ""))
    prefixes.sort(key=lambda pair: -len(pair[0]))  # A wrapper within another one first.
    made = {}
    for name in names:
        plain = name
        for prefix, shorter in prefixes:
            if plain.startswith(prefix):
                plain = shorter + plain[len(prefix) :]
        made[name] = plain
    return made


def own_names(module: nn.Module) -> dict[str, str]:
    """Map plain names to the keys of a module's ``state_dict``."""
    return {plain: own for own, plain in plain_names(module, module.state_dict()).items()}


def plain_state(module: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return the ``state_dict`` of a module under plain names.

    Examples
    --------
    >>> list(plain_state(nn.Sequential(DataParallel(nn.Linear(1, 1)))))
    ['0.weight', '0.bias']
    """
    state = module.state_dict(keep_vars=keep_vars)
    plain = plain_names(module, state)
    if all(name == own for own, name in plain.items()):
        return state
    return OrderedDict((plain[own], value) for own, value in state.items())


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by their plain names."""
    parameters = dict(module.named_parameters())
    plain = plain_names(module, parameters)
    return {plain[own]: parameter for own, parameter in parameters.items()}


def fit_name(name: str, known: Mapping[str, Any]) -> str:
    """Return the known plain name that a saved one stands for, without wrappers; the name itself if none fits.

    Examples
    --------
    >>> fit_name("_orig_mod.0.module.weight", {"0.weight": None}), fit_name("bias", {"0.weight": None})
    ('0.weight', 'bias')
    """
    parts = name.split(".")
    while name not in known and parts[0] in _WRAPPERS and parts[1:]:
        parts = parts[1:]
        if (shorter := ".".join(parts)) in known:
            return shorter
    if name in known:
        return name
    bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return bare if bare in known else name


def fit_state(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the keys that a module loads, whatever wrappers the saved module had."""
    known, own = own_names(module), module.state_dict()
    made: dict[str, Tensor] = {}
    for name, value in weights.items():
        key = name if name in own else known.get(fit_name(name, known), name)
        made[name if key in made else key] = value  # Two of one name are refused later.
    return made
