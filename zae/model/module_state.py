"""What a model is beside its tensors: what is frozen, what stays in evaluation mode, and the order of its tensors."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from zae.errors import CheckpointMismatch
from zae.model.weights import named_parameters, plain_names, plain_state
from zae.values.strides import (
    check_strides,
    contiguous_strides,
    copy_with_strides,
    is_laid_out,
    repeat_again,
    strides_to_save,
)
from zae.values.walk import is_sharded

__all__ = ["check_module", "load_broadcasts", "load_flags", "load_strides", "read_module"]

_log = logging.getLogger("zae")
_SHOWN = 5


def read_module(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], in_training: Collection[nn.Module] | None
) -> dict[str, Any]:
    """Return what is frozen, what stays in evaluation mode, and the order of tensors in memory.

    ``in_training`` has the modules in training mode, where an evaluation has changed it.
    """
    evaluating = []
    for path, part in _named_modules(module).items():
        trains = part.training if in_training is None else part in in_training
        if not trains:
            evaluating.append(path)
    return {
        "frozen": [name for name, part in parameters.items() if not part.requires_grad],
        "evaluating": evaluating,
        "strides": _read_strides(module),
    }


def _read_strides(module: nn.Module) -> dict[str, list[int]] | None:
    """Return the strides of tensors that are not contiguous; None where this rank has only parts of the tensors."""
    strides_by_name = {}
    for name, tensor in plain_state(module, keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        if is_sharded(tensor):
            return None
        strides = strides_to_save(tensor)
        if strides is not None:
            strides_by_name[name] = list(strides)
    return strides_by_name


def check_module(entry: Any) -> None:
    """Refuse an entry that `read_module` does not return."""
    lists: list[Any] = [None]
    if isinstance(entry, Mapping):
        lists = [entry.get("frozen"), entry.get("evaluating")]
    strides = entry.get("strides") if isinstance(entry, Mapping) else None
    are_names = all(isinstance(names, list) and {str}.issuperset(map(type, names)) for names in lists)
    if not are_names or not isinstance(strides, (Mapping, type(None))):
        raise CheckpointMismatch(
            f"the entry 'module' of the state is {entry!r:.60}, not what is frozen and evaluating; load another "
            "checkpoint, or the weights alone: apply_weights(path)"
        )


def load_strides(module: nn.Module, entry: Mapping[str, Any]) -> None:
    """Give the tensors of a model the order in memory that they had when they were saved; their values stay.

    Raise ValueError or TypeError, before any is changed, for strides that a tensor cannot have.
    """
    changed = list(_in_other_order(module, entry))
    for tensor, strides in changed:
        check_strides(tensor.shape, strides)
    for tensor, strides in changed:
        if 0 not in strides:
            # The model, the optimizers and the engine keep the same tensor.
            tensor.data = copy_with_strides(tensor.detach(), strides)


def load_broadcasts(module: nn.Module, entry: Mapping[str, Any]) -> None:
    """Make views again of tensors that repeated some of their elements; it comes after their values are loaded."""
    for tensor, strides in _in_other_order(module, entry):
        if 0 in strides:
            repeat_again(tensor, strides)


def _in_other_order(module: nn.Module, entry: Mapping[str, Any]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield the tensors of a model that had another order in memory when they were saved, with their strides then."""
    saved = entry["strides"]
    for name, tensor in plain_state(module, keep_vars=True).items():
        if saved is None or not isinstance(tensor, Tensor) or not is_laid_out(tensor) or not tensor.numel():
            continue
        strides = tuple(saved.get(name) or contiguous_strides(tensor.shape))
        if len(strides) == tensor.dim() and strides != tensor.stride():
            yield tensor, strides


def load_flags(
    module: nn.Module, entry: Mapping[str, Any], in_training: list[nn.Module] | None, is_main: bool
) -> list[nn.Module] | None:
    """Freeze and unfreeze parameters, set the mode of each module; return the modules to put into training mode later.

    That is None where the modules are in training mode now, as for ``in_training``.
    """
    frozen, evaluating = set(entry["frozen"]), set(entry["evaluating"])
    changed = []
    for name, parameter in named_parameters(module).items():
        can_train = parameter.is_floating_point() or parameter.is_complex()
        is_trained = can_train and name not in frozen
        if parameter.requires_grad != is_trained and parameter.is_leaf:
            parameter.requires_grad_(is_trained)
            changed.append(name)
    if changed and is_main:
        further = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        _log.warning(
            "the checkpoint sets requires_grad of %s, as training had left it; the script has the opposite",
            ", ".join(changed[:_SHOWN]) + further,
        )
    trained = [part for path, part in _named_modules(module).items() if path not in evaluating]
    if in_training is not None:
        return trained
    for submodule in module.modules():
        submodule.training = False
    for part in trained:
        part.training = True
    return None


def _named_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by their plain names, without the wrappers of torch; the model itself is ''."""
    modules = {f"{path}." if path else "": part for path, part in module.named_modules()}
    plain = plain_names(module, modules)
    return {plain[path].rstrip("."): module for path, module in modules.items()}
