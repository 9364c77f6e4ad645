"""The weights, optimizers and schedules that were loaded, over the hooks of the user that a resume calls again."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.optim.optimizer_state import load_optimizer_state
from zae.torch_private import unsaved_buffers
from zae.user_state.marks import mark_of
from zae.values.walk import has_same_bits, is_sharded, leaves_of, local_part, map_tensors

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["LoadedParts", "marks_of_loaded", "tensors_of"]


class LoadedParts:
    """Copies of what was loaded into the model, the optimizers and the schedules, to undo what hooks change in them."""

    def __init__(self, trainer: Trainer) -> None:
        self._tensors = {name: _copy(tensor) for name, tensor in tensors_of(trainer).items()}
        self._parameters = dict(trainer.unwrap().named_parameters())
        self._states: list[tuple[Any, dict[str, Any]]] = []  # Of optimizers and schedules.
        if trainer.current_run.continuation.has_returned:
            return  # A guard that goes back within the call may set another rate as the epoch begins.
        for part in (*trainer.optimizers.values(), *trainer.schedulers.values()):
            state = part.state_dict()
            copies = {id(leaf): _copy(leaf) for _, leaf in leaves_of(state) if isinstance(leaf, Tensor)}
            self._states.append((part, copy.deepcopy(state, copies)))

    def put_back(self, trainer: Trainer) -> None:
        """Put all of it back, as far as it has changed."""
        self._put_in_their_places(trainer.unwrap())
        tensors = tensors_of(trainer)  # A hook may have set others in their places.
        for name in tensors.keys() & self._tensors.keys():
            if not _are_equal(tensors[name], self._tensors[name]):
                with torch.no_grad():
                    tensors[name].copy_(self._tensors[name])
        for part, state in self._states:
            if not _are_equal(part.state_dict(), state):
                load_optimizer_state(part, state) if isinstance(part, Optimizer) else part.load_state_dict(state)

    def _put_in_their_places(self, model: nn.Module) -> None:
        """Undo that a hook has let parameters change places: the state has weights and moments by name."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for name, parameter in dict(model.named_parameters()).items():
            if names.get(id(parameter), name) != name and name in self._parameters:
                path, _, key = name.rpartition(".")
                setattr(model.get_submodule(path), key, self._parameters[name])


def marks_of_loaded(trainer: Trainer) -> object:
    """Return the marks of the weights, the schedules and the settings of the optimizers."""
    settings = [optimizer.state_dict()["param_groups"] for optimizer in trainer.optimizers.values()]
    schedules = [scheduler.state_dict() for scheduler in trainer.schedulers.values()]
    return mark_of([*tensors_of(trainer).values(), settings, schedules])


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the tensors that the state of the model has."""
    tensors: dict[str, Tensor] = {}
    visited: set[int] = set()
    for path, module in trainer.unwrap().named_modules():
        unsaved = unsaved_buffers(module)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and name not in unsaved and id(tensor) not in visited:
                visited.add(id(tensor))
                tensors[f"{path}.{name}" if path else name] = tensor
    return tensors


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, on the host where it is whole."""
    is_whole = not (is_sharded(tensor) or tensor.is_meta)
    return tensor.detach().to("cpu", copy=True) if is_whole else tensor.detach().clone()


def _are_equal(value: Any, copied: Any) -> bool:
    """Return whether what this rank has of two values has the same bits."""
    return has_same_bits(map_tensors(local_part, value), map_tensors(local_part, copied))
