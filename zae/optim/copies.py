"""Copies of optimizers, and what a copied or unpickled one has lost."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from zae.optim.factories import as_dict
from zae.optim.optimizer_state import with_inner

__all__ = ["copy_optimizer", "mark_copied"]


def copy_optimizer(optimizer: Optimizer, memo: dict[int, Any] | None = None, **instead: Any) -> Optimizer:
    """Return a deep copy of an optimizer; ``copy.deepcopy`` leaves out the attributes of a subclass."""
    memo = {} if memo is None else memo
    twin = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    # The copy has no hooks of the step, and neither a scheduler nor a trainer follows it.
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        instead.setdefault(name, OrderedDict())
    attributes = {
        key: value for key, value in vars(optimizer).items() if key not in (*instead, "step", "add_param_group")
    }
    for hooks in attributes.values():
        if not isinstance(hooks, dict):
            continue
        for hook in hooks.values():
            owner = getattr(hook, "__self__", optimizer)
            if owner is not optimizer:  # What a hook is a method of is not copied.
                memo[id(owner)] = owner
    for inner in with_inner(optimizer)[1:]:
        if id(inner) not in memo:
            copy_optimizer(inner, memo)
    vars(twin).update(copy.deepcopy(attributes, memo), **instead)
    return twin


def mark_copied(schedulers: Any) -> None:
    """Call `_mark_stepped` for the optimizers of all schedulers of a trainer that was copied or unpickled."""
    for scheduler in as_dict(schedulers).values():
        if isinstance(getattr(scheduler, "optimizer", None), Optimizer):
            _mark_stepped(scheduler.optimizer)


def _mark_stepped(optimizer: Optimizer) -> None:
    """Let an optimizer note for its scheduler that it steps, as torch does by an attribute that pickle leaves out."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    function = type(optimizer).step

    @wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return function(optimizer, *args, **kwargs)

    record._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = record  # type: ignore[method-assign]
