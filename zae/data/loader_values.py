"""What training changes in the parts of a loader: values of its datasets, its samplers and its collate function."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from zae.data.loader_parts import LoaderParts
from zae.data.loaders import unwrap_sampler
from zae.random_state import STREAMS
from zae.torch_private import is_loader_iterator
from zae.user_state.changes import Changes
from zae.user_state.marks import LARGE, mark_of
from zae.user_state.owners import Place, Walk, is_of_user
from zae.user_state.values import Maker, Name, Packer
from zae.values.walk import is_of_zae

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["LoaderValues", "values_in"]

_log = logging.getLogger("zae")
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType, type)
_HOST = torch.device("cpu")


class LoaderValues:
    """The values in the parts of a run's loaders, of which those that have changed once are saved for good."""

    def __init__(self) -> None:
        self._changes = Changes(opens_lazily=True)
        self._has_warned = False
        self._source: Any = None  # The data of the run before.
        self._batches: list[int] | None = None  # The ids of those in a list, as the run begins.
        self._trainer: weakref.ref[Trainer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the data out of a copy."""
        return {**vars(self), "_source": None, "_batches": None, "_trainer": None}

    def begin(self, loader: Any, trainer: Trainer) -> None:
        """Mark the values as a run begins; what has changed in other data is not of these."""
        self._trainer = weakref.ref(trainer)
        source = getattr(loader, "dataset", loader)
        if self._source is not None and self._source is not source:
            self._changes = Changes(opens_lazily=True)
        self._source = source
        self._batches = [*map(id, loader)] if isinstance(loader, list) else None
        walk = self._walk(LoaderParts(loader), is_begin=True)
        self._changes.begin(walk, Packer({}, walk.paths, _HOST, copies=True, max_bytes=LARGE))
        _warn_of_living_iterators(walk)

    def capture(self, parts: LoaderParts, with_unchanged: bool = False) -> list[Any]:
        """Return the values that have changed, or all small ones besides."""
        walk = self.note(parts)
        unchanged = self._changes.unchanged(walk) if with_unchanged else []
        trainer = self._trainer() if self._trainer is not None else None
        says = trainer is not None and trainer.is_main
        changed = self._changes.write(walk, Packer({}, walk.paths, _HOST, copies=True), says=says)
        return [*unchanged, *changed.get("values", ())]

    def note(self, parts: LoaderParts) -> Walk:
        """Note which values have changed; return the walk that has looked at them."""
        walk = self._walk(parts)
        new = self._changes.note(walk)
        loader = parts.loader
        if new and not self._has_warned and getattr(loader, "persistent_workers", False) and loader.num_workers:
            self._warn_of_workers(walk, new)
        if self._batches is not None and isinstance(loader, list) and [*map(id, loader)] != self._batches:
            self._batches = None
            _log.warning(
                "training has changed the list of batches that run() was given, and no checkpoint has it: a resume "
                "begins with the list of the script. Let a DataLoader shuffle, or a class with __iter__ that draws a "
                "new order from the list in each epoch"
            )
        return walk

    def note_saved(self, state: Mapping[str, Any] | None) -> None:
        """Note the names of the values in a state that is loaded."""
        self._changes.names |= {(entry["owner"], entry["key"]) for entry in values_in(state or {})}

    def without_unchanged(self, state: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return a captured state with those values alone that training has changed: the others are the script's."""
        if state is None:
            return None
        changed = [entry for entry in values_in(state) if (entry["owner"], entry["key"]) in self._changes.names]
        others = {key: entry for key, entry in state.items() if key != "values"}
        return {**others, "values": {"values": changed}} if changed else others

    def marks(self, parts: LoaderParts) -> dict[Name, object]:
        """Return the marks of the values, by which `put_back` sees what a part sets as it loads a state of its own."""
        return _marks_in(self._walk(parts))

    def put_back(self, loader: Any, state: Mapping[str, Any], marks: Mapping[Name, object] | None = None) -> None:
        """Put the values of a state back, but those that their object has set itself since they had these marks."""
        walk = self._walk(LoaderParts(loader))
        present = _marks_in(walk) if marks else {}
        set_by_parts = {name for name, mark in (marks or {}).items() if name in present and present[name] != mark}
        maker = Maker({}, {path: owner.object for path, owner in walk.owners.items()}, _HOST)
        names = set(self._changes.names)
        self._changes.put_back(walk, state.get("values", {}), maker, set_by_parts, says=True)
        self._changes.names = names

    def _walk(self, parts: LoaderParts, is_begin: bool = False) -> Walk:
        """Return the parts of a loader that are of the user's classes, and what they hold."""
        owners = _owners_in(parts)
        trainer = self._trainer() if self._trainer is not None else None
        # Data may hold the trainer and what is in it, whose state the trainer has.
        of_trainer = [] if trainer is None else [trainer, *trainer.unwrap().modules(), *trainer.optimizers.values()]
        # The states of random streams are captured beside the values.
        streams = [value for owner in owners.values() for value in vars(owner).values() if isinstance(value, STREAMS)]
        walk = self._changes.walk([*of_trainer, *parts.by_place.values(), *owners.values(), *streams], is_begin)
        for place, owner in owners.items():
            # What a class of a library keeps to itself, it computes.
            private = () if is_of_user(type(owner)) else [name for name in vars(owner) if name.startswith("_")]
            walk.add(place, owner, without=frozenset(private))
        # One that Accelerate has prepared is a DataLoader without these attributes.
        loader = parts.loader
        if isinstance(loader, DataLoader) and "collate_fn" in vars(loader) and "loader.collate_fn" not in owners:
            walk.places["loader", "collate_fn"] = Place(vars(loader), "collate_fn")
        return walk

    def _warn_of_workers(self, walk: Walk, names: Iterable[Name]) -> None:
        """Warn of attributes of a dataset that are set here, while its workers keep copies."""
        for owner, key in sorted(names):
            if owner.startswith(("loader.dataset", "loader.collate_fn")) and not owner.startswith("loader.dataset."):
                value = walk.places[owner, key].value
                if isinstance(value, Tensor) and value.is_shared():
                    continue
                self._has_warned = True
                _log.warning(
                    "%s.%s has changed in this process, and the workers of the loader, which persist, never see it: "
                    "each keeps the copy that it began with. Write persistent_workers=False, or a tensor that is "
                    "shared: torch.zeros(1).share_memory_()",
                    owner,
                    key,
                )
                return


def values_in(state: Mapping[str, Any]) -> list[Any]:
    """Return the values in a captured state."""
    return list(state.get("values", {}).get("values", ()))


def _marks_in(walk: Walk) -> dict[Name, object]:
    """Return the marks of the values that a walk has reached."""
    return {name: mark_of(place.value, walk.paths) for name, place in walk.places.items()}


def _owners_in(parts: LoaderParts) -> dict[str, Any]:
    """Return the parts of a loader that have attributes, by place; itself and its ``collate_fn`` if of a user."""
    objects = {f"loader.{place}": part for place, part in parts.by_place.items()}
    for place, part in (("loader.collate_fn", parts.collate), ("loader", unwrap_sampler(parts.loader))):
        if is_of_user(type(part)):
            objects[place] = part
    owners: dict[int, tuple[str, Any]] = {}
    for place, part in objects.items():
        has_attributes = hasattr(part, "__dict__") and not is_of_zae(type(part))
        if has_attributes and not isinstance(part, (torch.nn.Module, *_FUNCTIONS)):
            owners.setdefault(id(part), (place, part))
    return dict(owners.values())


def _warn_of_living_iterators(walk: Walk) -> None:
    """Warn of a loader that keeps an iterator, with its workers, over the epochs."""
    for owner in walk.owners.values():
        for name, value in owner.store.items():
            if is_loader_iterator(value) and name != "_iterator":
                _log.warning(
                    "the %s keeps an iterator over its epochs (%s): what that has read ahead is in no checkpoint, and "
                    "a resume gets other batches. Write a torch.utils.data.DataLoader with persistent_workers=True, "
                    "which keeps its workers as well",
                    type(owner.object).__name__,
                    name,
                )
