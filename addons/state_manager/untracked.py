"""Find what a run changes and checkpoints lack: in the task, model, optimizers and data, and what functions read.

As a run begins, each value that training could change is given a fingerprint; when a state is read, again. What differs
is named in the state, and the run that resumes from it warns of it. So the order of this file: the comparison
(`UntrackedState`), which values there are (`_values_of` and the sources below it), and the fingerprint of a value.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from zae import optim
from zae.common import random_state
from zae.common.torch_private import forward_pre_hooks, unsaved_buffers, version_of
from zae.common.walk import is_of_library, is_of_zae, names_in, names_read_by, sample
from zae.compose.introspect import recipe_of
from zae.compose.options import options_of
from zae.data.loader_state import STREAMS, functions_of, parts_of, read_stream, streams_of
from zae.data.loaders import is_stateful
from zae.optim.state import with_inner

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["UntrackedState"]

_log = logging.getLogger("zae")
_DEEP = 4  # Objects in objects: an environment in a replay, and its random stream.
_SHALLOW = 2
_LOOKS = 1000  # Objects that are examined in all.
_MANY = 64  # Elements of a tensor, or entries of a list, that are compared.
_MOST = 1 << 16  # Numbers of an array, or of a list, that are compared.
_SHOWN = 10
_NUMBERS = (bool, int, float, complex, np.generic, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)
_KINDS = (bool, int, float, Tensor, np.ndarray, *STREAMS, *_CONTAINERS)
_CLOSED = (type, ModuleType, FunctionType, MethodType, Iterator, DataLoader, Dataset, Sampler, logging.Logger)

_OF_STEP = (  # Methods that compute a step, and do not only look at it.
    *("train_step", "gradients", "micro_step", "to_device", "scale_loss", "backward", "normalize", "clip"),
    *("should_step", "optimizer_step", "step_one", "scheduler_step"),
)
_OF_OPTIMIZERS = ("state", "param_groups", "defaults", "param_names")  # What torch saves, or sets itself.
_OF_LOADER = "loader."
_OF_MODULES = frozenset(vars(nn.Module()))  # What each module has.
_SAMPLERS = ("sampler", "batch_sampler")
_GONE = "absent"  # In place of the class of a module that was removed.

_Named: TypeAlias = "Iterator[tuple[str, Any]]"
_Fingerprints: TypeAlias = "dict[str, object]"


class UntrackedState:
    """Finds what has changed since the run began and is not in the state.

    It compares the attributes of the task and of its class, unless that has a ``state_dict``, those of optimizers that
    save with torch's ``state_dict`` alone, those of samplers and datasets without a state, and in the model's modules
    numbers, random streams, and tensors that are not persistent buffers; and what methods of the task, functions of the
    loader and of a schedule read from a closure, from the globals of their module, and of the user's modules and
    classes there. Private attributes are those of the task that its methods name, and those of the user's own samplers
    and modules. Of large values it compares a sample.

    Attributes
    ----------
    names : list of str
        What the state that was loaded lacks.
    modules : dict
        The class of each module that training had replaced, added or removed when that state was saved.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.modules: dict[str, str] = {}
        self._begun: _Fingerprints | None = None
        self._begun_modules: dict[str, str] = {}
        self._begun_data: tuple[int, int] | None = None  # Of the present call of run.
        self._watched: _Watched | None = None

    def begin(self, trainer: Trainer) -> None:
        """Record all values as a run begins; the first time after a resume, warn of what the checkpoint lacks."""
        model = trainer.unwrap()
        present = _classes_in(model)
        is_first = self._begun is None
        if is_first and trainer.is_main:
            _warn_of_lacking(self.names)
            _warn_of_replaced(self.modules, present)
        self._begin_data(trainer, model)
        is_lazy = any(isinstance(each, LazyModuleMixin) for each in model.modules())
        # A lazy module becomes one of another class, with other attributes, in its first forward.
        if is_first and not is_lazy and not optim.has_lazy(model.parameters()):
            self._begun = self._fingerprints(trainer, model)
            self._begun_modules = present

    def _begin_data(self, trainer: Trainer, model: nn.Module) -> None:
        """Compare the data with those of this call of ``run``, where the script gives it another loader."""
        loader = trainer.current_run.user_loader
        # By id: the trainer holds the loader of the call before.
        present = (id(loader), id(getattr(loader, "dataset", None)))
        if self._begun is not None and present != self._begun_data:
            for name in [name for name in self._begun if name.startswith(_OF_LOADER)]:
                del self._begun[name]
            for name, fingerprint in self._fingerprints(trainer, model).items():
                if name.startswith(_OF_LOADER):
                    self._begun[name] = fingerprint
        self._begun_data = present

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """Name what has changed since this run began, or the one that it resumed."""
        names, modules = self.names, self.modules
        if self._begun is not None:
            model = trainer.unwrap()
            names = self._changed(self._begun, self._fingerprints(trainer, model))
            modules = self._replaced(_classes_in(model))
        found: dict[str, Any] = {}
        if names:
            found["unsaved"] = list(names)
        if modules:
            found["replaced"] = dict(sorted(modules.items()))
        return found

    def _changed(self, begun: _Fingerprints, now: _Fingerprints) -> list[str]:
        """Return the names of values that are others than when the run began, or had changed before it."""
        changed = {name for name in now if name not in begun or begun[name] != now[name]}
        return sorted(changed | (now.keys() & set(self.names)))

    def _replaced(self, now: Mapping[str, str]) -> dict[str, str]:
        """Return the class of each module that is of another one than when the run began, or that was before it."""
        found = {path: kind for path, kind in self.modules.items() if now.get(path, _GONE) == kind}
        for path in now.keys() | self._begun_modules.keys():
            if now.get(path) != self._begun_modules.get(path):
                found[path] = now.get(path, _GONE)
        return found

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take what the state that was loaded names."""
        self.names = list(saved.get("unsaved", ()))
        self.modules = dict(saved.get("replaced", {}))

    def _fingerprints(self, trainer: Trainer, model: nn.Module) -> _Fingerprints:
        """Map the name of each value to a fingerprint that is equal while the value has not changed."""
        if self._watched is None or self._watched.cls is not type(trainer):
            self._watched = _Watched.of(type(trainer))
        loader = trainer.current_run.user_loader
        fingerprint_of = _Fingerprint(_saved_elsewhere(trainer, model, loader), _memory_of(model))
        found: _Fingerprints = {}
        for name, value, depth in _values_of(trainer, model, loader, self._watched):
            # For instance a thread fills it: the state is saved without its fingerprint.
            with contextlib.suppress(Exception):
                found[name] = fingerprint_of(value, depth)
        return found


def _warn_of_lacking(names: list[str]) -> None:
    """Warn of what had changed when the state was saved, and is not in it."""
    if names:
        _log.warning(
            "the state that this run resumes from lacks %s, which had changed when it was saved: where training "
            "reads it, this run may differ from an uninterrupted one, unless it is computed again, as a cache is. "
            "Save it in state_dict() and load_state_dict() of your class, or as a buffer of the model; "
            "docs/howto/resume.md says what is saved",
            ", ".join(map(repr, names[:_SHOWN])) + _more_than_shown(names),
        )


def _warn_of_replaced(saved: Mapping[str, str], present: Mapping[str, str]) -> None:
    """Warn of modules that training had replaced when the state was saved, and that the script has not replaced."""
    differ = []
    for path, kind in saved.items():
        now = present.get(path, _GONE)
        if now != kind:
            differ.append(f"{path} was {kind} and is {now}")
    if differ:
        _log.warning(
            "training had replaced modules of the model when the state that this run resumes from was saved, and a "
            "checkpoint has no modules: %s%s. This run differs from an uninterrupted one; build the model as it was, "
            "before run()",
            "; ".join(differ[:_SHOWN]),
            _more_than_shown(differ),
        )


def _more_than_shown(found: Collection[object]) -> str:
    return f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""


def _classes_in(model: nn.Module) -> dict[str, str]:
    """Return the class of each module of a model, by its path."""
    return {path: _class_of(each).__qualname__ for path, each in model.named_modules(prefix="model")}


def _class_of(module: nn.Module) -> type:
    """Return the class of a module; of a lazy one that which its first forward gives it."""
    becomes = getattr(module, "cls_to_become", None) if isinstance(module, LazyModuleMixin) else None
    return becomes or type(module)


# ------------------------------------------------------------------------------------------- which values there are


def _values_of(trainer: Trainer, model: nn.Module, loader: Any, watched: _Watched) -> Iterator[tuple[str, Any, int]]:
    """Yield the name of each value that is compared, the value, and how deep to look into it."""
    parts = parts_of(loader)
    optimization = trainer.optimization
    for name, value in watched.values_of(trainer):
        yield name, value, _DEEP
    for name, value in _of_model(model):
        yield name, value, _SHALLOW
    for key, optimizer in optimization.optimizers.items():
        for name, value in _of_optimizer(f"optimizer[{key!r}]", optimizer):
            yield name, value, _DEEP
    for name, value in _of_data(parts):
        yield name, value, _SHALLOW
    functions = [*watched.methods, *functions_of(loader, parts)]
    for key, scheduler in optimization.schedulers.items():
        functions += [(f"scheduler[{key!r}]", each) for each in _lambdas_of(scheduler)]
    for name, value in _read_by(functions):
        yield name, value, _SHALLOW


def _saved_elsewhere(trainer: Trainer, model: nn.Module, loader: Any) -> set[int]:
    """Return the ids of the objects that the state has otherwise, or that are not read again."""
    saved: list[object] = [trainer, vars(trainer)["model"], *model.modules(), loader]
    for optimizer in trainer.optimization.optimizers.values():
        saved += with_inner(optimizer)
    saved += trainer.optimization.schedulers.values()
    saved += streams_of(loader)
    saved += random_state.generators_of(loader)
    return set(map(id, saved))


class _Watched(NamedTuple):
    """Which attributes of a task are compared: the same ones for all objects of a class."""

    cls: type
    place: str  # The name of the task.
    users: list[type]  # The classes that are not zae's, the task first.
    methods: list[tuple[str, Callable[..., Any]]]  # Of these classes, by their places.
    named: set[str]  # What their methods name.
    in_step: set[str]  # What those name that compute a step, and the methods that they call.
    declared: set[str]  # What zae knows: an option, an annotation, what an add-on declares.
    has_own_state: bool  # A class of the user saves a state of its own.

    @classmethod
    def of(cls, task: type) -> _Watched:
        """Examine a class."""
        users = [each for each in task.__mro__ if each is not object and not is_of_zae(each)]
        methods: list[tuple[str, Callable[..., Any]]] = []
        named: set[str] = set()
        for user in users:
            for name, value in vars(user).items():
                named |= names_in(value)
                if isinstance(value, FunctionType):
                    methods.append((f"{user.__name__}.{name}", value))
        declared = {name for name, (_, taker) in options_of(task).items() if is_of_zae(taker)}
        for each in task.__mro__:
            for kind in ("state_attributes", "rank_state_attributes", "process_attributes"):
                declared.update(vars(each).get(kind, ()))
            if is_of_zae(each):
                declared.update(vars(each).get("__annotations__", ()))
        return cls(
            cls=task,
            place=recipe_of(task)[0].__name__,
            users=users,
            methods=methods,
            named=named,
            in_step=_named_in_step(users),
            declared=declared,
            has_own_state=any("state_dict" in vars(each) and "layer" not in vars(each) for each in users),
        )

    def values_of(self, trainer: Trainer) -> _Named:
        """Yield the attributes of a task and of its class, the private ones that a method of the user names."""
        if self.has_own_state:
            return
        found: dict[str, Any] = {}
        for each in reversed(self.users):
            for name, value in vars(each).items():
                if name in self.named and isinstance(value, _KINDS):
                    found[name] = value
        for name, value in sorted((found | vars(trainer)).items()):
            if name.startswith("_") and (name not in self.named or name.startswith("__")):
                continue
            if name.startswith("_") and isinstance(value, float) and name not in self.in_step:
                continue  # A time, or another number of the user's own that is shown.
            if name not in self.declared and not is_of_zae(type(value)):
                yield f"{self.place}.{name}", value


def _named_in_step(users: list[type]) -> set[str]:
    """Return what the methods of a user name that compute a step, with the methods of the user that they call."""
    found = set[str]()
    left = list(_OF_STEP)
    while left:
        method = left.pop()
        for user in users:
            new = names_in(vars(user).get(method)) - found
            found |= new
            left += new
    return found


def _of_model(model: nn.Module) -> _Named:
    """Yield what modules contain beside parameters, persistent buffers and the state that they save themselves."""
    for place, module in model.named_modules(prefix="model"):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            continue
        computed = _OF_MODULES | _computed_in_forward(module)
        is_users = not is_of_library(type(module))
        for name, value in vars(module).items():
            if isinstance(value, _KINDS) and name not in computed and (is_users or not name.startswith("_")):
                yield f"{place}.{name}", value
        for name in unsaved_buffers(module):
            yield f"{place}.{name}", getattr(module, name)


def _computed_in_forward(module: nn.Module) -> set[str]:
    """Return the attributes that torch computes of parameters in each forward: by weight_norm, spectral_norm, prune."""
    hooks = [each for each in forward_pre_hooks(module) if type(each).__module__.startswith("torch.nn.utils")]
    names = [getattr(each, key, None) for each in hooks for key in ("name", "_tensor_name")]
    return {name for name in names if isinstance(name, str)}


def _of_data(parts: Mapping[str, Any]) -> _Named:
    """Yield the attributes of samplers and datasets that have no state of their own: private ones of samplers alone."""
    for place, part in parts.items():
        if is_stateful(part) or not hasattr(part, "__dict__"):
            continue
        setter = getattr(part, "set_epoch", None)  # What it sets, a resume sets again.
        given = {"epoch"} | names_in(setter) if callable(setter) else set()
        # What the samplers of a library keep to themselves, they compute.
        shows_all = place in _SAMPLERS and not is_of_library(type(part))
        for name, value in vars(part).items():
            if (shows_all or not name.startswith("_")) and name not in given:
                yield f"{_OF_LOADER}{place}.{name}", value


def _read_by(functions: list[tuple[str, Callable[..., Any]]]) -> _Named:
    """Yield what functions of the user read from a closure, or from the globals of the script."""
    for place, function in functions:
        for name, value in names_read_by(function).items():
            if isinstance(value, nn.Module) or not (isinstance(value, (*_CLOSED, str)) or callable(value)):
                yield f"{name} (read by {place})", value


def _lambdas_of(scheduler: object) -> list[Callable[..., Any]]:
    """Return the functions of a schedule, and of the schedules in it, as SequentialLR has them."""
    found = list(getattr(scheduler, "lr_lambdas", None) or ())
    for inner in getattr(scheduler, "_schedulers", ()):
        found += _lambdas_of(inner)
    return found


def _of_optimizer(place: str, optimizer: Optimizer) -> _Named:
    """Yield what an optimizer keeps beside the state that torch saves, unless it has a way of its own to save."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return
    if getattr(optimizer, "_optimizer_state_dict_post_hooks", None):
        return
    for name, value in vars(optimizer).items():
        if name not in _OF_OPTIMIZERS and not name.startswith("_"):
            yield f"{place}.{name}", value


# ------------------------------------------------------------------------------------------ the fingerprint of a value


class _Fingerprint:
    """Turns a value into a fingerprint that can be kept and compared; None for a value that cannot be examined."""

    def __init__(self, inside: set[int], memory: set[int]) -> None:
        self._inside = inside  # The ids of what is saved elsewhere.
        self._memory = memory  # Where the weights lie: a view of them is saved.
        self._left = _LOOKS

    def __call__(self, value: Any, depth: int) -> object:
        self._left -= 1
        if isinstance(value, _NUMBERS):
            return repr(value)
        if isinstance(value, (str, bytes)):
            return (len(value), value[:_LOOKS])
        if id(value) in self._inside:
            return None
        if isinstance(value, (Tensor, np.ndarray)):
            is_view = isinstance(value, Tensor) and _address(value) in self._memory
            return None if is_view else _part_of(value)
        if isinstance(value, STREAMS):
            return _rng_state(value)
        if not depth or self._left < 0 or isinstance(value, _CLOSED):
            return None
        if isinstance(value, _CONTAINERS):
            return self._entries(value, depth - 1)
        if is_of_zae(type(value)) or not hasattr(value, "__dict__"):
            return None
        own = {name: each for name, each in vars(value).items() if not name.startswith("_")}
        weights = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else []
        return [[_part_of(each) for each in weights], self._entries(own, depth - 1)]

    def _entries(self, value: Any, depth: int) -> list[object]:
        entries = value.values() if isinstance(value, Mapping) else value
        if len(value) <= _MANY:
            return [self(each, depth) for each in list(entries)]
        if not isinstance(value, (list, tuple)) or not isinstance(value[0], (*_NUMBERS, str)):
            return [len(value), self(value[-1], depth) if isinstance(value, (list, tuple, deque)) else None]
        return [len(value), hash(tuple(value[:: max(1, len(value) // _MOST)]))]


def _memory_of(model: nn.Module) -> set[int]:
    """Return where the parameters and persistent buffers of a model lie in memory."""
    unsaved = {id(getattr(module, name)) for module in model.modules() for name in unsaved_buffers(module)}
    return {_address(each) for each in (*model.parameters(), *model.buffers()) if id(each) not in unsaved} - {0}


def _address(value: Tensor) -> int:
    try:
        return value.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # A tensor that consists of others, or lies in parts on the ranks.
        return 0


def _part_of(value: Any) -> object:
    """Return the fingerprint of a tensor or an array: its elements, or some of a large one, and its version."""
    try:
        if isinstance(value, np.ndarray):
            is_in_file = isinstance(value, np.memmap) or isinstance(value.base, np.memmap)
            part = sample(value, _MANY if is_in_file else _MOST)
            return (value.shape, hashlib.sha256(part.tobytes()).digest())
        part = sample(value.detach(), _MANY).contiguous()
        is_large = part.numel() < value.numel()
        fingerprint = part.view(torch.uint8).cpu().numpy().tobytes()
        return (tuple(value.shape), fingerprint, version_of(value) if is_large else None)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None  # Sparse, nested, on the device "meta".


def _rng_state(stream: Any) -> object:
    """Return the state of a random stream in a comparable form."""
    state = read_stream(stream)
    return state.numpy().tobytes() if isinstance(state, Tensor) else repr(state)
