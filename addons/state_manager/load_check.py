"""Load the state of a run in memory, before its second step, so that nothing is saved that never loads.

A run that finds out at its first save has trained for an epoch in vain, and one that finds out at a resume, for all of
its time. So the state is encoded, decoded and loaded into copies of the optimizers and schedulers that were made as the
trainer was set up: as a script makes them that is started again. The model must have the form of that moment, too. It
is done again when training adds a group to an optimizer. Tensors are shared, not copied, unless code of an optimizer's
own class gets them.
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
from zae.checkpoint.encoding import decode, encode
from zae.checkpoint.group import Group
from zae.checkpoint.json_text import strict_json
from zae.checkpoint.tensor_bytes import dense, separate, shared_memory
from zae.errors import CheckpointError
from zae.loop.addon_state import PARTS, state_mode
from zae.optim.optimization import Optimization
from zae.optim.optimizer_state import difference, has_hooks, load_optimizer_state, with_enums, with_inner
from zae.schedulers.lengths import parts_of
from zae.torch_private import has_own_shapes, unsaved_buffers
from zae.values.walk import is_of_zae, is_sharded, leaves_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["LoadCheck"]


class LoadCheck:
    """Loads the state of a run in memory, when its structure is new."""

    def __init__(self) -> None:
        self._unloaded: Optimization | None = None
        self._form: dict[str, Any] = {}  # Of the model, as a script that is started again has it.
        self._checked_structure: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy of a trainer, in another process or for a trial, begins again."""
        return {}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def begin(self, trainer: Trainer) -> None:
        """Copy the optimizers and schedulers as the trainer is set up, before it loads a state."""
        optimization = trainer.optimization
        if self._unloaded is not None and self._unloaded.optimizer is optimization.optimizer:
            return  # The script may have replaced them between two runs.
        model = trainer.unwrap()
        self._form = _form_of(model)
        # What optimizers hold of the model and the trainer is not copied.
        shared: dict[int, Any] = {id(module): module for module in model.modules()} | {id(trainer): trainer}
        self._unloaded = optimization.copy_unloaded(shared)
        self._checked_structure = None

    def skip(self, optimization: Optimization) -> None:
        """Leave out the state of a run that was resumed: it has just been loaded."""
        self._checked_structure = optimization.structure

    def is_due(self, optimization: Optimization) -> bool:
        """Return whether the state has a structure that was not loaded yet."""
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
        model = trainer.unwrap()
        unloaded = self._unloaded
        assert unloaded is not None  # `begin` has made it.
        _check_weights(model, state.pop("model"))
        if is_first and not _has_own_loading(type(trainer)):
            _check_form(model, self._form)
        loaded = _through_file(state, with_parts=trainer.world_size > 1)
        for key, entry in state.items():
            if key not in ("optimizer", "scheduler") and (problem := difference(entry, loaded[key], key)):
                raise CheckpointError(
                    f"the state of this run would come back as another one: {problem}. Let state_dict() return plain "
                    "values in its place (of an Enum its value), and make them again in load_state_dict()"
                )
        for name, optimizer in trainer.optimizers.items():
            _refuse_shared(optimizer, state["optimizer"][name], f"optimizer[{name!r}]")
        for name, scheduler in unloaded.schedulers.items():
            _check_functions(name, trainer.schedulers[name], scheduler)
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A copy has taken no step.
            twin = unloaded.copy_unloaded({})
            for kind, copies in (("optimizer", twin.optimizers), ("scheduler", twin.schedulers)):
                loaded[kind] = {name: loaded[kind][name] for name in copies}
                for name, copied in copies.items():
                    _check_same(f"{kind} {name}", copied, state[kind][name], loaded[kind][name])
            _load_in_memory(trainer, twin, loaded)


def _through_file(state: Any, with_parts: bool) -> Any:
    """Return what a checkpoint gives back of a state; tensors share the memory of those in it."""
    structure, tensors = encode(state, with_parts=with_parts)
    return decode(strict_json(json.dumps(structure, allow_nan=False).encode(), "state.json"), tensors)


def _check_same(name: str, owner: Any, state: Any, loaded: Any) -> None:
    """Refuse an optimizer, or a scheduler, whose state a checkpoint gives back as another one."""
    loaded = with_enums(loaded, owner.state_dict())
    kind, _, key = name.partition(" ")
    if problem := difference(state, loaded, f"{kind}[{key!r}]"):
        raise CheckpointError(
            f"the state of {name} ({type(owner).__name__}) would come back as another one: {problem}. Let its "
            "state_dict() return plain values, and make the others again in load_state_dict()"
        )


def _load_in_memory(trainer: Trainer, twin: Optimization, loaded: Mapping[str, Any]) -> None:
    """Load a state, as it comes back from a file, into copies of the optimizers and schedulers."""

    def load_optimizer(name: str, values: Any) -> None:
        optimizer = twin.optimizers[name]
        if not any(map(is_sharded, optim.parameters_of(optimizer))):
            load_optimizer_state(optimizer, values)
            _check_inner(name, trainer.optimizers[name], optimizer)

    try:
        twin.prepare(loaded, trainer.unwrap(), True, load_optimizer, keeps_best=True)()
    except Exception as error:
        reason = f"its load raises {type(error).__name__}: {error}"
        if isinstance(error, CheckpointError):
            reason = str(error)
        names = ", ".join(type(part).__name__ for part in (*twin.optimizers.values(), *twin.schedulers.values()))
        raise CheckpointError(f"a checkpoint of this run would not load ({names}): {reason}") from error


def _check_functions(name: str, scheduler: Any, unloaded: Any) -> None:
    """Refuse a schedule whose function for a group that was added is another one: a state holds no functions."""
    for part, begun in zip([scheduler, *parts_of(scheduler)], [unloaded, *parts_of(unloaded)]):
        functions = getattr(part, "lr_lambdas", [])
        added = functions[len(getattr(begun, "lr_lambdas", [])) :]
        if added and any(function is not functions[0] for function in functions):
            raise CheckpointError(
                f"scheduler {name} ({type(part).__name__}) has got a function in lr_lambdas for a group that training "
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
        if problem := difference(state, loaded.state_dict(), inside):
            raise CheckpointError(
                f"optimizer {name} ({kind}) does not save all of its state: {problem}. Let {kind}.state_dict return "
                f"that of the {type(inner).__name__} as well, and load_state_dict load it"
            )


def _refuse_shared(optimizer: Optimizer, state: Any, root: str) -> None:
    """Refuse tensors of other classes than torch's own, and views of the same memory."""
    leaves = [*leaves_of(state, root)]
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


def _has_own_loading(cls: type) -> bool:
    """Return whether a user's class of trainers loads its state with code of its own, which may prepare the model."""
    return any("load_state_dict" in vars(base) for base in cls.__mro__ if not is_of_zae(base))


# --------------------------------------------------------------------------------------------- the form of the model


def _form_of(model: nn.Module) -> dict[str, Any]:
    """Return what has to be the same in a model that a checkpoint is loaded into: names, of buffers shapes and types.

    Tensors of modules that load in their own way are None, and lazy ones too.
    """
    form: dict[str, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        is_free = has_own_shapes(module) or any(getattr(module, "_load_state_dict_pre_hooks", ()))
        unsaved = unsaved_buffers(module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                form[prefix + name] = None if is_free else ()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in unsaved:
                is_open = is_free or nn.parameter.is_lazy(buffer)
                form[prefix + name] = None if is_open else (tuple(buffer.shape), buffer.dtype)
    return form


def _check_form(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Refuse tensors that the first step has made, removed, or given another shape or type."""
    present = _form_of(model)
    for name in [*present, *(name for name in before if name not in present)]:
        old = before.get(name, "absent")
        new = present.get(name, "absent")
        if old is None or new is None or old == new:
            continue
        if "absent" in (old, new):
            change = "was made" if old == "absent" else "was removed"
        else:
            change = "; ".join(f"was {a} and is {b}" for a, b in zip(old, new, strict=True) if a != b)
        raise CheckpointError(
            f"{name} of the model {change} in the first step. A script that is started again has that of before, which "
            "no checkpoint of this run fits. Make it in __init__ of its module, with this shape and type; register a "
            "buffer that need not be saved with persistent=False; or bring the model to this form in "
            "load_state_dict() of your class, before super()"
        )


def _check_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Refuse weights without bytes of their own, and a module whose extra state could not be loaded."""
    tensors = {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    separate(tensors)
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            dense(tensor, f"{name} of the model")  # Sparse and quantized tensors are refused.
    for path, module in model.named_modules():
        kind = type(module)
        saves = kind.get_extra_state is not nn.Module.get_extra_state
        if saves and kind.set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(
                f"{path or 'the model'} ({kind.__name__}) has get_extra_state() and no set_extra_state(): what it "
                f"saves could not be loaded; write {kind.__name__}.set_extra_state(self, state)"
            )
