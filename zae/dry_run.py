"""What `zae.plan` tries out on copies, so that nothing that is the trainer's own is touched."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from zae import optim, rng, scheduling
from zae.optimizer_modes import has_modes
from zae.optimizer_state import copy_optimizer
from zae.walk import tensors_in

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["simulated", "states_after_a_step"]


def simulated(trainer: Trainer, total_steps: int | None = None) -> tuple[dict[str, Optimizer], dict[str, Any]]:
    """Copy optimizers without their parameters, and schedulers that drive the copies.

    Parameters
    ----------
    trainer : Trainer
        Set up or not; factories are called, with copies.
    total_steps : int, optional
        The planned number of optimizer steps, for a scheduler's factory that asks for it.

    Returns
    -------
    optimizers, schedulers : dict
        By name.
    """
    with rng.isolated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A scheduler of a copy sees no optimizer step.
        twins: dict[str, Optimizer] = {}
        memo: dict[int, Any] = {}
        for name, optimizer in optim.named(trainer.optimizer).items():
            if not isinstance(optimizer, Optimizer):
                optimizer = optimizer([nn.Parameter(p.detach()) for p in trainer._module.parameters()])
            twins[name] = _twin(optimizer)
            memo[id(optimizer)] = twins[name]
        schedulers = {}
        for name, scheduler in optim.named(trainer.scheduler).items():
            if optim.is_factory(scheduler):
                made = scheduling.call_factory(scheduler, optim.driven_by(twins, name), lambda: total_steps)
            else:
                made = copy.deepcopy(scheduler, dict(memo))
            schedulers[name] = made
        return twins, schedulers


def _twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer with the same groups and settings, and one number in place of the parameters of each type."""
    twin = SGD([torch.zeros(1)], lr=0.0)
    twin.defaults = {**optimizer.defaults, "twin_of": type(optimizer).__name__}
    twin.param_groups = [
        {"params": [torch.zeros(1, dtype=d) for d in types]}
        | {name: _copied(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
        for types in [{p.dtype for p in group["params"]}]
    ]
    return twin


def _copied(value: Any) -> Any:
    """Copy a setting of a group: a rate that is a tensor is written in place, by schedulers for instance."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else copy.copy(value)


def states_after_a_step(trainer: Trainer) -> dict[str, Any]:
    """Return what each optimizer is going to keep.

    Parameters
    ----------
    trainer : Trainer
        Before or after training.

    Returns
    -------
    dict of str to object
        Before the first step, tensors without data.
    """
    states = {}
    for name, optimizer in optim.named(trainer.optimizer).items():
        if not isinstance(optimizer, Optimizer):
            with rng.isolated():
                optimizer = optimizer([nn.Parameter(p.detach()) for p in trainer._module.parameters()])
        states[name] = optimizer.state or _state_of_a_step(optimizer)
    return states


def _state_of_a_step(optimizer: Optimizer) -> Any:
    """What an optimizer keeps after its first step, which is tried on tensors without data."""
    # What else it holds is copied, large tensors without their data: a step may change it in place.
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in tensors_in(vars(optimizer))
                            if each.dim()}  # fmt: skip
    for parameter in optim.parameters_of(optimizer):
        memo[id(parameter)] = shape = torch.zeros_like(parameter, device="meta").requires_grad_()
        shape.grad = torch.zeros_like(shape)
    try:
        twin = copy_optimizer(optimizer, memo, state=defaultdict(dict))
        for group in twin.param_groups:
            group.update(foreach=False, fused=False)
        with rng.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if has_modes(optimizer):
                twin.train()  # type: ignore[attr-defined]
            type(optimizer).step(twin)
    except Exception:
        return [p for group in optimizer.param_groups for p in group["params"]] * 2  # As much as Adam keeps.
    return twin.state
