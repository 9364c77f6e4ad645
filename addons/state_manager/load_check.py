"""Load the state of a run in memory, before its second step, so that nothing is saved that never loads.

A run that finds out at its first save has trained for an epoch in vain, and one that finds out at a resume, for all of
its time. So the state is encoded, decoded and loaded into copies of the optimizers and schedulers that were made as the
trainer was set up: as a script makes them that is started again. It is done again when training adds a group to an
optimizer. Tensors are shared, not copied, unless code of an optimizer's own class gets them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae import optim, random_state
from zae.checkpoint.encoding import decode, encode, strict_json
from zae.checkpoint.group import Group
from zae.checkpoint.tensor_bytes import dense, separate, shared_memory
from zae.errors import CheckpointError
from zae.loop.addon_state import PARTS, state_mode
from zae.optim.loaded import compares_bits, difference, with_enums
from zae.optim.optimization import Optimization
from zae.optim.optimizer_state import has_hooks, load_optimizer_state, with_inner
from zae.schedulers.lengths import parts_of
from zae.torch_private import has_own_shapes, unsaved_buffers
from zae.values.walk import is_of_zae, is_sharded, leaves_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["LoadCheck"]


class LoadCheck:
    """Loads the state of a run in memory, when its form is new."""

    def __init__(self) -> None:
        self._unloaded: Optimization | None = None
        self._forms: dict[str, Any] = {}  # What a script that is started again has of the model.
        self._checked_structure: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy of a trainer, in another process or for a trial, begins again."""
        return {}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def begin(self, trainer: Trainer) -> None:
        """Copy the optimizers and schedulers, once, as the trainer is set up and before it loads a state."""
        optimization = trainer.optimization
        if self._unloaded is not None and self._is_of(optimization):
            return
        model = trainer.unwrap()
        self._forms = _forms_of(model)
        # What optimizers hold of the model and the trainer is not copied.
        shared: dict[int, Any] = {id(module): module for module in model.modules()} | {id(trainer): trainer}
        self._unloaded = optimization.copy_unloaded(shared)
        self._checked_structure = None

    def _is_of(self, optimization: Optimization) -> bool:
        """Return whether the script has the optimizers that were copied: it may replace them between two runs."""
        return self._unloaded is not None and self._unloaded.optimizer is optimization.optimizer

    def skip(self, optimization: Optimization) -> None:
        """Leave out the state of a run that was resumed: it has just been loaded."""
        self._checked_structure = optimization.structure

    def is_due(self, optimization: Optimization) -> bool:
        """Return whether the state has a form that was not loaded yet."""
        return optimization.structure != self._checked_structure

    def check(self, trainer: Trainer) -> None:
        """Raise CheckpointError if the state of a trainer cannot be saved, or would come back as another one.

        All ranks call it, and each loads what it has itself.
        """
        is_first = self._checked_structure is None
        self._checked_structure = trainer.optimization.structure
        with random_state.isolated(), state_mode(trainer, PARTS):
            state = dict(trainer.state_dict())
        group = Group(trainer.rank, trainer.gather)
        group.together(partial(self._check_own, trainer, state, is_first), trainer.save_path)  # type: ignore[attr-defined]

    def _check_own(self, trainer: Trainer, state: dict[str, Any], is_first: bool) -> None:
        """Encode, decode and load what this rank has of a state."""
        weights = {name: each for name, each in state.pop("model").items() if isinstance(each, Tensor)}
        separate(weights)
        for name, each in weights.items():
            if each.layout is not torch.strided or each.is_quantized:
                dense(each, f"{name} of the model")  # Sparse and quantized tensors are refused.
        _check_extra_state(trainer.unwrap())
        if is_first and not _has_own_loading(type(trainer)):
            _check_forms(trainer.unwrap(), self._forms)
        loaded = _through_file(state, with_parts=trainer.world_size > 1)
        for key, each in state.items():
            if key not in ("optimizer", "scheduler") and (problem := difference(each, loaded[key], key)):
                raise CheckpointError(
                    f"the state of this run would come back as another one: {problem}. Let state_dict() return plain "
                    "values in its place (of an Enum its value), and make them again in load_state_dict()"
                )
        for name, optimizer in trainer.optimizers.items():
            _refuse_shared(optimizer, state["optimizer"][name], f"optimizer[{name!r}]")
        assert self._unloaded is not None  # `begin` has made it.
        for name, unloaded in self._unloaded.schedulers.items():
            _check_functions(name, trainer.schedulers[name], unloaded)
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A copy has taken no step.
            _load_in_memory(trainer, self._unloaded.copy_unloaded({}), state, loaded)


def _load_in_memory(trainer: Trainer, twin: Optimization, state: Mapping[str, Any], loaded: dict[str, Any]) -> None:
    """Load a state, as it comes back from a file, into copies of the optimizers and schedulers."""
    for kind, several in (("optimizer", twin.optimizers), ("scheduler", twin.schedulers)):
        loaded[kind] = {name: loaded[kind][name] for name in several}
        for name, each in several.items():
            found = with_enums(loaded[kind][name], each.state_dict())
            compares = compares_bits(found)
            if problem := difference(state[kind][name], found, f"{kind}[{name!r}]", compares=compares):
                raise CheckpointError(
                    f"the state of {kind} {name} ({type(each).__name__}) would come back as another one: {problem}. "
                    f"Let its state_dict() return plain values, and make the others again in load_state_dict()"
                )

    def load_optimizer(name: str, values: Any) -> None:
        optimizer = twin.optimizers[name]
        if not any(map(is_sharded, optim.parameters_of(optimizer))):
            load_optimizer_state(optimizer, values)
            _check_inner(name, trainer.optimizers[name], optimizer)

    try:
        twin.prepare(loaded, trainer.unwrap(), True, load_optimizer, keeps_best=True)()
    except Exception as error:
        why = str(error) if isinstance(error, CheckpointError) else f"its load raises {type(error).__name__}: {error}"
        names = ", ".join(type(each).__name__ for each in (*twin.optimizers.values(), *twin.schedulers.values()))
        raise CheckpointError(f"a checkpoint of this run would not load ({names}): {why}") from error


def _check_functions(name: str, scheduler: Any, unloaded: Any) -> None:
    """Refuse a schedule whose function for a group that was added is another one: a state holds no functions."""
    for each, begun in zip([scheduler, *parts_of(scheduler)], [unloaded, *parts_of(unloaded)]):
        functions = getattr(each, "lr_lambdas", [])
        added = functions[len(getattr(begun, "lr_lambdas", [])) :]
        if added and any(function is not functions[0] for function in functions):
            raise CheckpointError(
                f"scheduler {name} ({type(each).__name__}) has got a function in lr_lambdas for a group that training "
                "has added, and a checkpoint of it would not load: it holds no functions. Use one function for all "
                "groups, the same object, or give the optimizer all of its groups, and the scheduler their functions, "
                "as they are made"
            )


def _check_inner(name: str, optimizer: Optimizer, twin: Optimizer) -> None:
    """Refuse an optimizer that does not save the state of one that it wraps."""
    kind = type(optimizer).__name__
    for inner, loaded in zip(with_inner(optimizer)[1:], with_inner(twin)[1:]):
        is_compared = inner.state is optimizer.state
        if is_compared or type(inner).state_dict is not Optimizer.state_dict or not has_hooks(inner):
            continue
        inside = f"the state of the {type(inner).__name__} in it"
        state = inner.state_dict()
        if problem := difference(state, loaded.state_dict(), inside, compares=compares_bits(state)):
            raise CheckpointError(
                f"optimizer {name} ({kind}) does not save all of its state: {problem}. Let {kind}.state_dict return "
                f"that of the {type(inner).__name__} as well, and load_state_dict load it"
            )


def _through_file(state: Any, with_parts: bool) -> Any:
    """Return what a checkpoint gives back of a state; tensors share the memory of those in it."""
    structure, tensors = encode(state, with_parts=with_parts)
    return decode(strict_json(json.dumps(structure, allow_nan=False).encode(), "state.json"), tensors)


def _refuse_shared(optimizer: Optimizer, state: Any, where: str) -> None:
    """Refuse tensors of other classes than torch's own, and views of the same memory."""
    leaves = [*leaves_of(state, where)]
    for path, value in leaves:
        if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter) and not is_sharded(value):
            raise CheckpointError(
                f"{path} is a {type(value).__name__}, and a checkpoint contains plain tensors, so that it would be "
                "a torch.Tensor after a resume; keep its parts in the state instead, each as a torch.Tensor"
            )
    if views := shared_memory(leaves):
        raise CheckpointError(
            f"{views[0]} and {views[1]} of {type(optimizer).__name__} are views of the same memory, and would be two "
            "tensors after a resume; keep one of them in the state, and make the other one a view of it in each step"
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
    forms: dict[str, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        is_free = has_own_shapes(module) or any(getattr(module, "_load_state_dict_pre_hooks", ()))
        unsaved = unsaved_buffers(module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                forms[prefix + name] = None if is_free else ()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in unsaved:
                is_open = is_free or nn.parameter.is_lazy(buffer)
                forms[prefix + name] = None if is_open else (tuple(buffer.shape), buffer.dtype)
    return forms


def _check_forms(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Refuse tensors that the first step has made, removed, or given another shape or type."""
    now = _forms_of(model)
    for name in [*now, *(name for name in before if name not in now)]:
        one = before.get(name, "absent")
        other = now.get(name, "absent")
        if one is None or other is None or one == other:
            continue
        if "absent" in (one, other):
            change = "was made" if one == "absent" else "was removed"
        else:
            change = "; ".join(f"was {was} and is {now}" for was, now in zip(one, other, strict=True) if was != now)
        raise CheckpointError(
            f"{name} of the model {change} in the first step. A script that is started again has that of before, which "
            "no checkpoint of this run fits. Make it in __init__ of its module, with this shape and type; register a "
            "buffer that need not be saved with persistent=False; or bring the model to this form in "
            "load_state_dict() of your class, before super()"
        )
