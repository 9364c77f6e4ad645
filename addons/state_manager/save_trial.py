"""Try in memory, after the first step of a run, whether its state can be saved and resumed from.

A run that finds out at its first save has trained for an epoch in vain, and one that finds out at a resume, for all of
its time. So the state is encoded and decoded once, and loaded into copies of the optimizers and schedulers that were
made before they had a state, as a script makes them when it is started again. Tensors are shared, not copied, unless
code of an optimizer's own class gets them.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae import optim
from zae.checkpoint.encoding import decode, encode, strict_json
from zae.checkpoint.folder import Group
from zae.checkpoint.tensor_bytes import byte_count, dense, separate, shared_memory
from zae.common import random_state
from zae.common.torch_private import has_own_shapes, unsaved_buffers
from zae.common.walk import is_of_zae, is_sharded, leaves_of
from zae.errors import CheckpointError
from zae.loop.addon_state import PARTS, state_mode
from zae.optim.state import (
    copy_optimizer,
    difference,
    has_hooks,
    has_own_loading,
    load_optimizer_state,
    with_enums,
    with_inner,
)
from zae.optimizers.quantized import flatten_states, quantize_states

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["SaveTrial"]

_SMALL = 64 << 20
"""Bytes up to which tensors are copied for a trial, and compared bit by bit."""


class SaveTrial:
    """Tries the state of a run once.

    A run that was resumed has loaded its state from a checkpoint, and tries nothing.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._has_begun = False
        self._optimizers: dict[str, Optimizer] = {}
        self._schedulers: dict[str, Any] = {}
        self._tensors: dict[str, Any] = {}  # What a script that is started again has of the model.

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy of a trainer, in another process or for a trial, begins again."""
        return {}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def begin(self, trainer: Trainer, is_resumed: bool) -> None:
        """Copy the optimizers and schedulers of a run that begins."""
        if self._has_begun:
            return
        self._has_begun = True
        self.is_due = not is_resumed
        if is_resumed:
            return
        self._tensors = _forms_of(trainer.unwrap())
        # What they hold of the model and the trainer is not copied.
        shared: dict[int, Any] = {id(each): each for each in trainer.unwrap().modules()} | {id(trainer): trainer}
        for name, optimizer in trainer.optimizers.items():
            twin = _attempt(partial(_copy_blank, optimizer, dict(shared)))
            if twin is not None:
                self._optimizers[name] = twin
                shared[id(optimizer)] = twin
        for name, scheduler in trainer.schedulers.items():
            if id(scheduler.optimizer) in shared:
                twin = _attempt(partial(copy.deepcopy, scheduler, dict(shared)))
                if twin is not None:
                    self._schedulers[name] = twin

    def try_state(self, trainer: Trainer) -> None:
        """Raise CheckpointError if the state of a trainer cannot be saved, or would come back as another one.

        All ranks call it, and each tries what it has itself.
        """
        self.is_due = False
        with random_state.isolated(), state_mode(trainer, PARTS):
            state = dict(trainer.state_dict())
        group = Group(trainer.rank, trainer.gather)
        group.together(partial(self._try_all, trainer, state), trainer.save_path)  # type: ignore[attr-defined]
        self._optimizers.clear()
        self._schedulers.clear()

    def _try_all(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Encode, decode and load what this rank has of a state."""
        weights = {name: each for name, each in state.pop("model").items() if isinstance(each, Tensor)}
        separate(weights)
        for name, each in weights.items():
            if each.layout is not torch.strided or each.is_quantized:
                dense(each, f"{name} of the model")  # Sparse and quantized tensors are refused.
        _check_extra_state(trainer.unwrap())
        if not _has_own_loading(type(trainer)):
            _check_forms(trainer.unwrap(), self._tensors)
        found = _through_file(state, with_parts=trainer.world_size > 1)
        for key, each in state.items():
            if key in ("optimizer", "scheduler"):
                continue
            if problem := difference(each, found[key], key):
                raise CheckpointError(
                    f"the state of this run would come back as another one: {problem}. Let state_dict() return plain "
                    "values in its place (of an Enum its value), and make them again in load_state_dict()"
                )
        for name, optimizer in trainer.optimizers.items():
            _refuse_subclasses(state["optimizer"][name], f"optimizer[{name!r}]")
            self._try_optimizer(name, optimizer, state["optimizer"][name], found["optimizer"][name])
        for name, scheduler in trainer.schedulers.items():
            self._try_scheduler(name, scheduler, state["scheduler"][name], found["scheduler"][name])

    def _try_optimizer(self, name: str, optimizer: Optimizer, state: Any, found: Any) -> None:
        """Load the state of an optimizer into a copy of it, and compare."""
        where = f"optimizer[{name!r}]"
        kind = type(optimizer).__name__
        views = shared_memory([*leaves_of(state, where)])
        if views:
            raise CheckpointError(
                f"{views[0]} and {views[1]} of {kind} are views of the same memory, and would be two tensors after a "
                "resume; keep one of them in the state, and make the other one a view of it in each step"
            )
        blank = self._optimizers.get(name)
        if blank is None or any(map(is_sharded, optim.parameters_of(optimizer))):
            return
        twin = _attempt(partial(copy_optimizer, blank, {id(each): each for each in optim.parameters_of(blank)}))
        if twin is None:
            return
        values = copy.deepcopy(found) if has_own_loading(optimizer) else found
        compares = _bytes_in(state) <= _SMALL

        def load() -> str:
            load_optimizer_state(twin, quantize_states(values))
            return difference(state, flatten_states(twin.state_dict()), where, compares)

        if problem := _problem(load):
            raise CheckpointError(
                f"optimizer {name} ({kind}) does not load its own state: {problem}. A run could not be resumed from "
                f"it; let {kind}.load_state_dict restore what its state_dict returns"
            )
        for inner, loaded in zip(with_inner(optimizer)[1:], with_inner(twin)[1:]):
            is_compared = inner.state is optimizer.state
            if is_compared or type(inner).state_dict is not Optimizer.state_dict or not has_hooks(inner):
                continue
            inside = f"the state of the {type(inner).__name__} in it"
            saved = flatten_states(inner.state_dict())
            restored = flatten_states(loaded.state_dict())
            if problem := difference(saved, restored, inside, compares):
                raise CheckpointError(
                    f"optimizer {name} ({kind}) does not save all of its state: {problem}. A run could not be resumed "
                    f"from it; let {kind}.state_dict return that of the {type(inner).__name__} as well, and "
                    "load_state_dict load it"
                )

    def _try_scheduler(self, name: str, scheduler: Any, state: Any, found: Any) -> None:
        """Load the state of a scheduler into a copy of it, and compare."""
        twin = self._schedulers.get(name)
        kind = type(scheduler).__name__
        if twin is None:
            return

        def load() -> str:
            twin.load_state_dict(with_enums(copy.deepcopy(found), twin.state_dict()))
            return difference(state, twin.state_dict(), f"scheduler[{name!r}]")

        if problem := _problem(load):
            raise CheckpointError(
                f"scheduler {name} ({kind}) does not load its own state: {problem}. A run could not be resumed from "
                f"it; let {kind}.load_state_dict restore what its state_dict returns"
            )


def _through_file(state: Any, with_parts: bool) -> Any:
    """Return what a checkpoint gives back of a state; tensors share the memory of those in it."""
    structure, tensors = encode(state, with_parts=with_parts, in_place=True)
    return decode(strict_json(json.dumps(structure, allow_nan=False).encode(), "state.json"), tensors)


def _problem(load: Callable[[], str]) -> str:
    """Return what a load has changed, or the error that it raises."""
    try:
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A copy has taken no step.
            return load()
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}"


def _attempt(make: Callable[[], Any]) -> Any:
    """Return a copy, or None: not everything can be copied, and then it is not loaded."""
    try:
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()
    except Exception:
        return None


def _copy_blank(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer with other parameters, which take no memory if they are large."""
    held = optim.parameters_of(optimizer)
    is_small = byte_count(*held) <= _SMALL
    for each in held:
        if not nn.parameter.is_lazy(each):
            value = each.detach()
            value = value.clone() if is_small or is_sharded(each) else value.new_zeros(()).expand(each.shape)
            memo[id(each)] = nn.Parameter(value, each.requires_grad)
    own = [each for _, each in leaves_of(vars(optimizer), "") if isinstance(each, Tensor) and id(each) not in memo]
    if byte_count(*own) > _SMALL:  # Mostly nothing: the state is made in the first step.
        memo |= {id(each): each for each in own}
    return copy_optimizer(optimizer, memo)


def _bytes_in(state: Any) -> int:
    return byte_count(*(each for _, each in leaves_of(state, "") if isinstance(each, Tensor)))


def _refuse_subclasses(state: Any, where: str) -> None:
    """Refuse tensors of other classes than torch's own."""
    for path, value in leaves_of(state, where):
        if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter) and not is_sharded(value):
            raise CheckpointError(
                f"{path} is a {type(value).__name__}, and a checkpoint contains plain tensors, so that it would be "
                "a torch.Tensor after a resume; keep its parts in the state instead, each as a torch.Tensor"
            )


def _check_extra_state(model: nn.Module) -> None:
    """Refuse a module whose extra state would be saved and could not be loaded."""
    for path, module in model.named_modules():
        kind = type(module)
        saves = kind.get_extra_state is not nn.Module.get_extra_state
        if saves and kind.set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(
                f"{path or 'the model'} ({kind.__name__}) has get_extra_state() and no set_extra_state(): what it "
                f"saves could not be loaded; write {kind.__name__}.set_extra_state(self, state)"
            )


def _has_own_loading(cls: type) -> bool:
    """Return whether a user's class of trainers loads its state with code of its own, which may prepare the model."""
    return any("load_state_dict" in vars(each) for each in cls.__mro__ if not is_of_zae(each))


def _forms_of(model: nn.Module) -> dict[str, Any]:
    """Return what has to be the same in a model that a checkpoint is loaded into: names, of buffers shapes and types.

    Tensors of modules that load in their own way are None, and lazy ones too.
    """
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        is_free = has_own_shapes(module) or any(getattr(module, "_load_state_dict_pre_hooks", ()))
        unsaved = unsaved_buffers(module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[prefix + name] = None if is_free else ()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in unsaved:
                is_open = is_free or nn.parameter.is_lazy(buffer)
                found[prefix + name] = None if is_open else (tuple(buffer.shape), buffer.dtype)
    return found


def _check_forms(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Refuse tensors that the first step has made, removed, or given another shape or type."""
    now = _forms_of(model)
    for name in [*now, *(name for name in before if name not in now)]:
        one = before.get(name, "absent")
        other = now.get(name, "absent")
        if one is None or other is None or one == other:
            continue
        if "absent" in (one, other):
            what = "was made" if one == "absent" else "was removed"
        else:
            what = "; ".join(f"was {was} and is {now}" for was, now in zip(one, other, strict=True) if was != now)
        raise CheckpointError(
            f"{name} of the model {what} in the first step. A script that is started again has that of before, which "
            "no checkpoint of this run fits. Make it in __init__ of its module, with this shape and type; register a "
            "buffer that need not be saved with persistent=False; or bring the model to this form in "
            "load_state_dict() of your class, before super()"
        )
