"""What `zae.preview.plan` tries out on copies, so that nothing that is the trainer's own is touched."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from zae.common import optim, random_state
from zae.common.optimizer_modes import has_modes
from zae.common.optimizer_state import copy_optimizer
from zae.common.walk import tensors_in

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["states_after_a_step"]


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
            with random_state.isolated():
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
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if has_modes(optimizer):
                twin.train()  # type: ignore[attr-defined]
            type(optimizer).step(twin)
    except Exception:
        return [p for group in optimizer.param_groups for p in group["params"]] * 2  # As much as Adam keeps.
    return twin.state
