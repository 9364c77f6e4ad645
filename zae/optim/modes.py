"""Switch optimizers between train and eval modes: schedule-free ones evaluate with other weights than they train with.

Such an optimizer (Defazio et al. 2024, "The Road Less Scheduled") has the methods ``train`` and ``eval``, which
exchange the weights in the model. Switching back and forth changes the last bits, so the training weights are copied
before an evaluation, and restored after it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.null_context import NULL_CONTEXT

__all__ = ["begin_training", "both_weights", "evaluation_weights", "treat_as_evaluation", "treat_as_training"]


def _with_modes(optimizers: Mapping[str, Any]) -> list[Any]:
    """List the optimizers that evaluate with other weights than they train with: they have ``train`` and ``eval``."""
    with_modes = []
    for optimizer in optimizers.values():
        methods = [getattr(optimizer, name, None) for name in ("train", "eval")]
        if isinstance(optimizer, Optimizer) and all(map(callable, methods)):
            with_modes.append(optimizer)
    return with_modes


def begin_training(optimizers: Mapping[str, Any]) -> None:
    """Put the training weights into the model where an optimizer is in its evaluation mode."""
    for optimizer in _with_modes(optimizers):
        with torch.no_grad():
            optimizer.train()


def treat_as_evaluation(optimizers: Mapping[str, Any]) -> None:
    """Treat the weights that were just loaded into the model as the evaluation weights."""
    for optimizer in _with_modes(optimizers):
        copies = _copies(optimizer)
        with torch.no_grad():
            optimizer.eval()
            _put_back(copies)


def treat_as_training(optimizers: Mapping[str, Any]) -> None:
    """Treat the weights and the state that were just loaded as training weights and their state."""
    for optimizer in _with_modes(optimizers):
        # Without a state there is nothing to exchange: only the mode is set.
        state = optimizer.state
        optimizer.state = defaultdict(dict)
        try:
            optimizer.train()
        finally:
            optimizer.state = state


def evaluation_weights(optimizers: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context with the evaluation weights in the model, which then restores the training weights bitwise.

    The optimizers may be in either mode; the mode is restored as well.
    """
    with_modes = _with_modes(optimizers)
    return _evaluation_weights(with_modes) if with_modes else NULL_CONTEXT


@contextmanager
def _evaluation_weights(optimizers: list[Any]) -> Iterator[None]:
    present = [(optimizer, _copies(optimizer), _flags(optimizer)) for optimizer in optimizers]
    changed = optimizers
    try:
        with torch.no_grad():
            for optimizer in optimizers:
                optimizer.eval()
        # One that was in this mode already stays in it.
        changed = [optimizer for optimizer, weights, flags in present if _has_changed(optimizer, weights, flags)]
        yield
    finally:
        with torch.no_grad():
            for optimizer in changed:
                optimizer.train()
            for _, weights, _ in present:
                _put_back(weights)


def _has_changed(optimizer: Any, weights: list[tuple[Tensor, Tensor]], flags: list[dict[str, Any]]) -> bool:
    """Return whether an optimizer has another mode, or other weights, than were kept."""
    if _flags(optimizer) != flags:
        return True
    return not all(torch.equal(parameter, value) for parameter, value in weights)


def _copies(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Copy the weights of an optimizer, except weights of lazy layers, which do not exist yet."""
    copies = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not nn.parameter.is_lazy(parameter):
                copies.append((parameter, parameter.detach().clone()))
    return copies


def _put_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    for parameter, value in copies:
        parameter.copy_(value)


def _flags(optimizer: Any) -> list[dict[str, Any]]:
    """Return the plain settings of an optimizer, its mode among them."""
    flags = []
    for settings in (vars(optimizer), *optimizer.param_groups):
        flags.append({key: value for key, value in settings.items() if isinstance(value, (bool, int, str))})
    return flags


def both_weights(
    optimizers: Mapping[str, Any], model_state: Callable[[], dict[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the evaluation weights, and the training weights that differ from them.

    Without modes, the first are the tensors of the model itself, and the second are empty.
    """
    if not _with_modes(optimizers):
        return model_state(), {}
    with evaluation_weights(optimizers):
        weights = copy.deepcopy(model_state())  # Tied ones stay tied.
    training_weights = {}
    for key, value in model_state().items():
        if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
            continue
        if value.is_meta or not torch.equal(value, weights[key]):
            training_weights[key] = value
    return weights, training_weights
