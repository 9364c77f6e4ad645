"""What training changes in the objects of the user: saved without a line of theirs, and put back at a resume.

A value that has changed since ``on_run_begin`` of the process is in the state: of the task and its class, of the
modules and optimizers of the user's classes, and of the objects that these hold. What the data hold is in the position
of the loader, `zae.data.loader_values`. In the order of a run that is resumed:

    note_loaded      before on_run_begin: the weights, optimizers and schedules that were loaded are marked
    begin            after on_run_begin: the values are marked, and those of the state put back
    keep_over_epoch_hooks
                     before on_epoch_begin, where the resume continues an open epoch: all of them are kept, since hooks
                     begin an epoch anew that was begun before
    open_epoch       right before the first batch: they are put back
    keep_over_validation
                     before a validation, and before on_run_end: what is saved until `release` is the state from
                     before it, since a run that is resumed there makes it again
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zae.compose.introspect import is_add_on, slots_of
from zae.compose.options import options_of
from zae.data.loader_parts import LoaderParts
from zae.errors import CheckpointMismatch
from zae.loop.loaded_parts import LoadedParts, marks_of_loaded, tensors_of
from zae.optim.optimizer_state import with_inner
from zae.user_state.changes import Changes
from zae.user_state.marks import LARGE, mark_of
from zae.user_state.owners import Walk, is_of_user, once_for_a_class
from zae.user_state.values import Maker, Name, Packer
from zae.values.walk import is_of_zae, is_sharded

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["UserState", "check_user_state", "names_of_trainer"]


_log = logging.getLogger("zae")
_ABSENT = "absent"  # In place of the class of a module that was removed.
_MAX_SHOWN = 10


class UserState:
    """What training has changed in the user's objects, beside the data."""

    def __init__(self) -> None:
        self._changes = Changes()
        self._pending: Mapping[str, Any] | None = None  # A state that was loaded, and from which no call continues yet.
        self._continues = False  # Whether a state was put back in whose call of run the run goes on.
        self._set_by_loads: set[Name] = set()  # What optimizers have set that load a state of their own.
        self._marks_of_loaded: object = None  # Over on_run_begin.
        # The values before the hooks that begin an open epoch again, and what was loaded beside them.
        self._before_epoch: Mapping[str, Any] | None = None
        self._loaded_parts: LoadedParts | None = None
        # Those before a validation, or before on_run_end.
        self._before_validation: Mapping[str, Any] | None = None
        self._modules: dict[str, str] | None = None  # The class of each module of the model, as the first run began.

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy continues from: its objects are others."""
        return {"_changes": self._changes, "_pending": self._pending, "_set_by_loads": self._set_by_loads}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    # ------------------------------------------------------------------------------------------------- during a run

    def begin(self, trainer: Trainer, continues: bool) -> None:
        """Mark the values as a call of ``run`` begins, and put back those of a state that it continues from."""
        if self._marks_of_loaded is not None and self._marks_of_loaded != marks_of_loaded(trainer) and trainer.is_main:
            _log.warning(
                "on_run_begin has changed weights, a schedule or the settings of an optimizer after they were loaded, "
                "so that this run differs from an uninterrupted one, in which it is called once: change them before "
                "run(), or only where self.progress_checker.step == 0"
            )
        self._marks_of_loaded = None
        self._before_validation = None
        walk = _walk(trainer, self._changes, is_begin=True)
        packer = Packer(tensors_of(trainer), walk.paths, trainer.device, copies=True, max_bytes=LARGE)
        self._changes.begin(walk, packer)
        if self._modules is None:
            self._modules = _classes_in(walk)
        state = self._pending
        self._pending = None
        self._continues = continues and state is not None
        if state is not None:
            self._put_back(trainer, state, self._set_by_loads)
            if trainer.is_main:
                _warn_of_replaced(state.get("modules", {}), self._modules)

    def note_loaded(self, trainer: Trainer) -> None:
        """Mark what was loaded, where ``on_run_begin`` may change it."""
        continues = trainer.current_run.continuation.is_in_same_call and self._pending is not None
        if continues and _calls_user(type(trainer), "on_run_begin"):
            self._marks_of_loaded = marks_of_loaded(trainer)

    def keep_over_epoch_hooks(self, trainer: Trainer) -> None:
        """Keep the values over the hooks that begin an epoch, where the epoch that goes on was begun before."""
        continues = self._continues
        self._continues = False
        if not continues or not trainer.progress_checker.epoch_batch:
            return
        self._before_epoch = self._read(trainer, copies=True)
        if _calls_user(type(trainer), "on_epoch_begin", "run_epoch"):
            self._loaded_parts = LoadedParts(trainer)

    def open_epoch(self, trainer: Trainer) -> None:
        """Put back what was kept; else note what the hooks have changed."""
        values = self._before_epoch
        if values is None:
            self._changes.note(_walk(trainer, self._changes))
            return
        if self._loaded_parts is not None:
            self._loaded_parts.put_back(trainer)
        self._put_back(trainer, values)
        self._forget_epoch()

    def _forget_epoch(self) -> None:
        self._before_epoch = None
        self._loaded_parts = None

    def keep_over_validation(self, trainer: Trainer) -> None:
        """Keep the values for what is saved until `release`; after a validation that a signal has ended, its own."""
        if self._before_validation is None and "state" in slots_of(type(trainer)):
            self._before_validation = self._read(trainer, copies=True)

    def release(self) -> None:
        """Forget them."""
        self._before_validation = None

    # --------------------------------------------------------------------------------------------- saving and loading

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """Return the values that have changed, and the gradients that are there between two steps."""
        if self._pending is not None:
            return dict(self._pending)
        return dict(self._before_validation) if self._before_validation is not None else self._read(trainer)

    def load_state_dict(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Take a state: it is put back when a call of ``run`` continues from it, and now where none is under way."""
        self._changes.note(_walk(trainer, self._changes))  # What has changed since is not taken for the script's.
        self._pending = dict(state)
        self._before_validation = None
        self._forget_epoch()
        if self._marks_of_loaded is not None:
            self._marks_of_loaded = marks_of_loaded(trainer)
        if not trainer.current_run.is_call:
            self._put_back(trainer, state, self._set_by_loads)

    @contextmanager
    def watching_loads(self, trainer: Trainer) -> Iterator[None]:
        """Note what the optimizers of the user's classes set as they load: it is not put back over that."""
        before = self._marks_of_optimizers(trainer)
        yield
        after = self._marks_of_optimizers(trainer)
        self._set_by_loads = {name for name, mark in after.items() if mark != before.get(name)}

    def _marks_of_optimizers(self, trainer: Trainer) -> dict[Name, object]:
        if not any(is_of_user(type(optimizer)) for optimizer in trainer.optimizers.values()):
            return {}
        walk = _walk(trainer, self._changes)
        places = {name: place for name, place in walk.places.items() if name[0].startswith("optimizer[")}
        return {name: mark_of(place.value, walk.paths) for name, place in places.items()}

    def _read(self, trainer: Trainer, copies: bool = False) -> dict[str, Any]:
        walk = _walk(trainer, self._changes)
        self._changes.note(walk)
        tensors = tensors_of(trainer)
        packer = Packer(tensors, walk.paths, trainer.device, copies)
        state = self._changes.write(walk, packer, says=trainer.is_main)
        if trainer.current_run.activity.batch is None:  # Within a step they are on their way.
            gradients = {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
            if gradients:
                state["gradients"] = {
                    name: gradient.clone() if copies else gradient for name, gradient in gradients.items()
                }
        before = self._modules or {}
        modules = _classes_in(walk) if before else {}
        if modules != before:
            changed = [path for path in modules.keys() | before.keys() if modules.get(path) != before.get(path)]
            state["modules"] = {path: modules.get(path, _ABSENT) for path in changed}
        return state

    def _put_back(self, trainer: Trainer, state: Mapping[str, Any], set_by_loads: Collection[Name] = ()) -> None:
        walk = _walk(trainer, self._changes)
        objects = {path: owner.object for path, owner in walk.owners.items()}
        maker = Maker(tensors_of(trainer), objects, trainer.device)
        self._changes.put_back(walk, state, maker, set_by_loads, says=trainer.is_main)
        gradients = state.get("gradients", {})
        for name, parameter in trainer.unwrap().named_parameters():
            if name in gradients:
                parameter.grad = _in_parts_of(parameter, gradients[name])


def check_user_state(state: Any) -> dict[str, Any]:
    """Return the entry of a state; refuse one that no `UserState` has written."""
    try:
        entries = dict(state or {})
        for entry in entries.get("values", ()):
            is_entry = all(type(entry[key]) is str for key in ("owner", "key")) and "value" in entry
            is_entry &= all(type(entry[key]) is bool for key in ("in place", "of class"))
            if not is_entry or type(entry["was"]) not in (str, type(None)):
                raise TypeError(f"an entry is {entry!r:.80}")
        for owner, key in entries.get("removed", ()):
            if (type(owner), type(key)) != (str, str):
                raise TypeError(f"a name is {owner!r:.40}, {key!r:.40}")
        for part in (entries.get("states", {}), entries.get("gradients", {})):
            if not all(type(key) is str for key in part):
                raise TypeError(f"a name is {next(iter(part))!r:.40}")
        if not all(isinstance(part, Tensor) for part in entries.get("gradients", {}).values()):
            raise TypeError("a gradient is no tensor")
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointMismatch(
            f"the entry 'user_state' of the state is not one that zae has saved ({error}); load another checkpoint, or "
            "the weights alone: apply_weights(path)"
        ) from None
    return entries


class _Options(MutableMapping[str, Any]):
    """The options of a trainer that are numbers, and that training may set: ``gradient_clip``, for instance.

    No texts and no flags: a checkpoint of somebody else is not to choose a folder, or to permit something. Nor is it a
    dict, into which a state may put further names.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # Not by getattr alone: for an attribute that a trainer lacks it looks for the name that was meant.
        present = [
            name for name, is_of_class in _options_by_place(type(trainer)) if is_of_class or name in vars(trainer)
        ]
        self._names = [name for name in present if type(getattr(trainer, name)) in (int, float)]

    def __getitem__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("an option cannot be removed")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@once_for_a_class
def _options_by_place(cls: Any) -> list[tuple[str, bool]]:
    """Return the options of zae and of add-ons, and whether an attribute of a class holds each."""
    return [(name, any(name in vars(base) for base in cls.__mro__)) for name in _options_of_zae(cls)]


def _options_of_zae(cls: Any) -> list[str]:
    """Return the options of zae and of add-ons; those of a task are attributes of its own."""
    return [name for name, (_, owner) in options_of(cls).items() if is_of_zae(owner) or is_add_on(owner)]


def _walk(trainer: Trainer, changes: Changes, is_begin: bool = False) -> Walk:
    """Return the user's objects: the task, the model, and the optimizers."""
    model = trainer.unwrap()
    run = trainer.current_run
    optimizers = trainer.optimization.optimizers
    apart: list[object] = [trainer, vars(trainer)["model"], run.user_loader, run.valid_loader]
    apart += LoaderParts(run.user_loader).by_place.values()
    apart += trainer.optimization.schedulers.values()
    for optimizer in optimizers.values():
        apart += with_inner(optimizer)
    walk = changes.walk([owner for owner in apart if owner is not None], is_begin)
    walk.add_module("model", model, with_tensors=False)  # The first: a task may hold a part of its model.
    walk.add("task", trainer, without=names_of_trainer(type(trainer)))
    options = _Options(trainer)
    walk.add_settings("options", options, options)
    for key, optimizer in optimizers.items():
        if is_of_user(type(optimizer)):
            walk.add(f"optimizer[{key!r}]", optimizer)
    return walk


def _classes_in(walk: Walk) -> dict[str, str]:
    """Return the class of each module of the model; of a lazy one that which its first forward gives it."""
    classes = {}
    for path, owner in walk.owners.items():
        if isinstance(owner.object, nn.Module) and f"{path}.".startswith("model."):
            kind = type(owner.object)
            classes[path] = (getattr(kind, "cls_to_become", None) or kind).__qualname__
    return classes


def _warn_of_replaced(saved: Mapping[str, str], present: Mapping[str, str]) -> None:
    """Warn of modules that training had replaced when the state was saved, and that the script has not replaced."""
    differ = []
    for path, kind in sorted(saved.items()):
        now = present.get(path, _ABSENT)
        if now != kind:
            differ.append(f"{path} was {kind} and is {now}")
    if differ:
        more = f" and {len(differ) - _MAX_SHOWN} more" if len(differ) > _MAX_SHOWN else ""
        _log.warning(
            "training had replaced modules of the model when the state that this run resumes from was saved, and a "
            "checkpoint has no modules: %s%s. This run differs from an uninterrupted one; build the model as it was, "
            "before run()",
            "; ".join(differ[:_MAX_SHOWN]),
            more,
        )


@once_for_a_class
def names_of_trainer(cls: Any) -> frozenset[str]:
    """Return the attributes of a trainer that zae and add-ons set: options, and what their classes declare or annotate.

    A task that has an attribute of the same name shares it with them.
    """
    names = {*_options_of_zae(cls)}
    names.update(("_is_addon", "_partial", "_recipe"))  # What classes have of their composition.
    for base in cls.__mro__:
        if not (is_of_zae(base) or is_add_on(base)):
            continue
        # Those of classes are not among them: a task may have an attribute `slot`, or `index`.
        annotated = inspect.get_annotations(base).items()
        names.update(name for name, kind in annotated if not str(kind).startswith("ClassVar"))
        for kind in ("state_attributes", "rank_state_attributes", "process_attributes"):
            names.update(vars(base).get(kind, ()))
    return frozenset(names)


def _calls_user(cls: type, *hooks: str) -> bool:
    """Return whether one of these hooks calls code of the user: of a class, or callbacks of an add-on."""
    bases = [
        base for base in cls.__mro__ if not is_of_zae(base) or (is_add_on(base) and "on_epoch_begin" in vars(base))
    ]
    return any(hook in vars(base) for base in bases for hook in hooks)


def _in_parts_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a saved gradient as its parameter lies on the ranks, which may be in parts."""
    if is_sharded(parameter) and not is_sharded(gradient):
        from torch.distributed.tensor import distribute_tensor

        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        placements = parameter.placements  # type: ignore[attr-defined]
        return distribute_tensor(gradient.to(parameter.device), mesh, placements, src_data_rank=None)
    return gradient.detach().to(parameter.device, copy=True)
