"""Read what older versions have saved of optimizers and schedulers in wrappers that were removed since."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zae.model.weights import fit_name, fit_state, named_parameters
from zae.optim.optimization import Optimization

__all__ = ["convert_wrapped"]

_log = logging.getLogger("zae")
_REMOVED_WRAPPERS = ("MasterWeights", "Schedule")
"""The classes that zae once put around an optimizer and around a scheduler of a LightningModule."""
_COPY_KEY = "master"
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def convert_wrapped(
    state: Mapping[str, Any], optimization: Optimization, module: nn.Module, is_main: bool
) -> Mapping[str, Any]:
    """Return a state in which no optimizer and no scheduler is in a wrapper that zae no longer has."""
    present = {"optimizer": optimization.optimizers, "scheduler": optimization.schedulers}
    settings: dict[str, dict[str, Any]] = {}
    unwrapped = []
    for kind, by_name in state["records"].get("settings", {}).items():
        settings[kind] = dict(by_name)
        for name, saved in by_name.items():
            part = present[kind].get(name)
            if saved["class"] in _REMOVED_WRAPPERS and type(part).__name__ != saved["class"]:
                settings[kind][name] = {"class": type(part).__name__}
                unwrapped.append((kind, name))
    if not unwrapped:
        return state
    converted = {**state, "records": {**state["records"], "settings": settings}}
    return _use_copies(converted, [name for kind, name in unwrapped if kind == "optimizer"], module, is_main)


def _use_copies(
    state: Mapping[str, Any], names: Collection[str], module: nn.Module, is_main: bool
) -> Mapping[str, Any]:
    """Return a state whose weights are the float32 copies that these optimizers of a model in bfloat16 have stepped."""
    named = named_parameters(module)
    copies: dict[int, Tensor] = {}  # By the ids of the parameters.
    optimizers = dict(state["optimizer"])
    for name in names:
        order = itertools.chain(*state["order"][name])
        parameters = [named.get(fit_name(key, named)) for key in order]
        optimizers[name] = _without_copies(optimizers[name], parameters, copies)
    if not copies:
        return state
    weights = fit_state(module, state["model"])
    for key, parameter in module.state_dict(keep_vars=True).items():
        if key in weights and weights[key].dtype in _LOW_PRECISION:
            weights[key] = copies.get(id(parameter), weights[key]).to(parameter.dtype)
    if is_main:
        is_rounded = any(parameter.dtype in _LOW_PRECISION for parameter in named.values())
        _log.warning(
            "the state has float32 copies of the weights in bfloat16, which zae no longer keeps: %s",
            "the weights are these, rounded; without dtype=, and with precision='bf16', they stay in float32"
            if is_rounded
            else "the weights are these now",
        )
    return {**state, "model": weights, "optimizer": optimizers}


def _without_copies(
    saved: Mapping[str, Any], parameters: Iterable[nn.Parameter | None], copies: dict[int, Tensor]
) -> dict[str, Any]:
    """Return the state of an optimizer in the types of its parameters, and add the copies in it to ``copies``."""
    indices = itertools.chain(*(group["params"] for group in saved["param_groups"]))
    places = dict(zip(indices, parameters))
    by_index = {}
    for index, values in saved["state"].items():
        parameter = places.get(index)
        if parameter is not None and _COPY_KEY in values:
            copies[id(parameter)] = values[_COPY_KEY]
            values = {key: _cast(key, value, parameter) for key, value in values.items() if key != _COPY_KEY}
        by_index[index] = values
    return {**saved, "state": by_index}


def _cast(key: str, value: Any, parameter: nn.Parameter) -> Any:
    """Return an entry of a state in the type of its parameter, as torch does when it loads a state."""
    is_cast = key != "step" and isinstance(value, Tensor) and value.is_floating_point()
    return value.to(parameter.dtype) if is_cast else value
