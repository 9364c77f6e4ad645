"""What the batches of a loader follow from: the random streams, and the states and values of its parts.

Training changes values in the datasets, the samplers and the ``collate_fn`` of a loader, and in a loader of the user's
class. They have two states, of the epoch's begin and of the present, as random streams have, so they are in the
position of the loader: an order is drawn again from the first, and goes on from the second.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from zae import random_state
from zae.data.loader_state import capture_parts, is_exhausted, parts_of, restore_parts
from zae.data.loaders import unwrap_sampler
from zae.data.sharding import collate_of
from zae.random_state import STREAMS
from zae.torch_private import is_loader_iterator
from zae.user_state.changes import Changes
from zae.user_state.marks import LARGE, mark_of
from zae.user_state.owners import Place, Walk, is_of_user
from zae.user_state.values import Maker, Name, Packer
from zae.values.walk import is_of_zae

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["LoaderStreams", "State"]

_log = logging.getLogger("zae")
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType, type)
_HOST = torch.device("cpu")

State: TypeAlias = "Mapping[str, Any]"
"""What `LoaderStreams.capture` returns."""


class LoaderStreams:
    """The random streams of the process, and the states and values of a loader's parts.

    Attributes
    ----------
    loader : iterable or None
        The loader of the epoch; None before the first one.
    begin : dict or None
        What was captured as the epoch began; None between two epochs.
    """

    def __init__(self) -> None:
        self.loader: Any = None
        self.begin: State | None = None
        self._changes = Changes(opens_lazily=True)  # Which values have changed.
        self._has_warned = False
        self._source: Any = None  # What the run before has read.
        self._trainer: weakref.ref[Trainer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the data out of a copy."""
        return {**vars(self), "loader": None, "begin": None, "_source": None, "_trainer": None}

    def of(self, loader: Any) -> LoaderStreams:
        """Return those of a loader before its first epoch: what has changed once is still saved."""
        streams = LoaderStreams()
        vars(streams).update(vars(self), loader=loader, begin=None)
        return streams

    def begin_run(self, loader: Any, trainer: Trainer) -> None:
        """Mark the values as a run begins; what has changed in other data is not of these."""
        self._trainer = weakref.ref(trainer)
        source = getattr(loader, "dataset", loader)
        if self._source is not None and self._source is not source:
            self._changes = Changes(opens_lazily=True)
        self._source = source
        walk = self._walk(loader, is_begin=True)
        self._changes.begin(walk, Packer({}, walk.paths, _HOST, copies=True, max_bytes=LARGE))
        _warn_of_living_iterators(walk)

    # ----------------------------------------------------------------------------------------------------- capture

    def mark_begin(self) -> None:
        """Note that an epoch begins here."""
        self.begin = self.capture(with_unchanged=True)

    def capture(self, with_unchanged: bool = False) -> dict[str, Any]:
        """Return the present state; to come back to it in this process, with values that only what follows changes."""
        state: dict[str, Any] = {"random": random_state.capture(), "generators": None, "parts": {}, "values": {}}
        if self.loader is not None:
            state["generators"] = random_state.capture_generators(self.loader)
            state["parts"] = capture_parts(self.loader)
            state["values"] = {"values": self.capture_values(self.loader, with_unchanged)}
        return state

    def capture_values(self, loader: Any, with_unchanged: bool = False) -> list[Any]:
        """Return the values that have changed, or all small ones besides."""
        walk = self.note(loader)
        unchanged = self._changes.unchanged(walk) if with_unchanged else []
        trainer = self._trainer() if self._trainer is not None else None
        says = trainer is not None and trainer.is_main
        changed = self._changes.write(walk, Packer({}, walk.paths, _HOST, copies=True), says=says)
        return [*unchanged, *changed.get("values", ())]

    def with_changed(self, state: State | None) -> dict[str, Any] | None:
        """Return a captured state with those values alone that training has changed: the others are the script's."""
        if state is None:
            return None
        changed = [entry for entry in values_in(state) if (entry["owner"], entry["key"]) in self._changes.names]
        others = {key: entry for key, entry in state.items() if key != "values"}
        return {**others, "values": {"values": changed}} if changed else others

    def note(self, loader: Any) -> Walk:
        """Note which values have changed; return the walk that has looked at them."""
        walk = self._walk(loader)
        new = self._changes.note(walk)
        if new and not self._has_warned and getattr(loader, "persistent_workers", False) and loader.num_workers:
            self._warn_of_workers(walk, new)
        return walk

    # ----------------------------------------------------------------------------------------------------- restore

    def take(self, state: State | None) -> None:
        """Note the names of values in a state that is loaded: what has changed once is saved for good."""
        self._changes.names |= {(entry["owner"], entry["key"]) for entry in values_in(state or {})}

    def restore(self, state: State, only_streams: bool = False, with_values: bool = True) -> bool:
        """Restore a captured state, and return whether a part has loaded a state of its own."""
        random_state.restore(state["random"])
        if state["generators"] is not None:
            random_state.restore_generators(self.loader, state["generators"])
        with_values = with_values and bool(state.get("values"))
        marks = _marks(self._walk(self.loader)) if with_values else {}
        has_loaded = restore_parts(self.loader, state["parts"], only_streams)
        if with_values:
            self.restore_values(self.loader, state, marks)
        return has_loaded

    def rewind(self, state: State, with_values: bool = True) -> None:
        """Restore the beginning of an epoch, also where a sampler loads a state of the end of the previous one."""
        if self.restore(state, with_values=with_values):
            at_end = is_exhausted(self.loader)
            if at_end is not None:
                self.restore(state, only_streams=at_end, with_values=with_values and not at_end)

    def restore_values(self, loader: Any, state: State, marks: Mapping[Name, object] | None = None) -> None:
        """Put values back, but those that their object has set itself since they had these marks."""
        walk = self._walk(loader)
        present = _marks(walk) if marks else {}
        set_by_parts = {name for name, mark in (marks or {}).items() if name in present and present[name] != mark}
        maker = Maker({}, {path: owner.object for path, owner in walk.owners.items()}, _HOST)
        names = set(self._changes.names)
        self._changes.put_back(walk, state.get("values", {}), maker, set_by_parts, says=True)
        self._changes.names = names

    # ------------------------------------------------------------------------------------------------ what is there

    def _walk(self, loader: Any, is_begin: bool = False) -> Walk:
        """Return the parts of a loader that are of the user's classes, and what they hold."""
        known = parts_of(loader)
        parts = _own_parts(loader, known)
        trainer = self._trainer() if self._trainer is not None else None
        # Data may hold the trainer and what is in it, whose state the trainer has.
        known_objects = [] if trainer is None else [trainer, *trainer.unwrap().modules(), *trainer.optimizers.values()]
        # The states of random streams are captured beside the values.
        streams = [value for part in parts.values() for value in vars(part).values() if isinstance(value, STREAMS)]
        walk = self._changes.walk([*known_objects, *known.values(), *parts.values(), *streams], is_begin)
        for place, part in parts.items():
            # What a class of a library keeps to itself, it computes.
            private = () if is_of_user(type(part)) else [name for name in vars(part) if name.startswith("_")]
            walk.add(place, part, without=frozenset(private))
        # One that Accelerate has prepared is a DataLoader without these attributes.
        if isinstance(loader, DataLoader) and "collate_fn" in vars(loader) and "loader.collate_fn" not in parts:
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


def values_in(state: State) -> list[Any]:
    """Return the values in a captured state."""
    return list(state.get("values", {}).get("values", ()))


def _marks(walk: Walk) -> dict[Name, object]:
    """Return the marks of the values, to see what a part sets as it loads a state of its own."""
    return {name: mark_of(place.value, walk.paths) for name, place in walk.places.items()}


def _own_parts(loader: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a loader that have attributes, by place; itself and its ``collate_fn`` if of a user."""
    loader = unwrap_sampler(loader)
    parts = {f"loader.{place}": part for place, part in known.items()}
    for place, part in (("loader.collate_fn", collate_of(loader)), ("loader", loader)):
        if is_of_user(type(part)):
            parts[place] = part
    own: dict[int, tuple[str, Any]] = {}
    for place, part in parts.items():
        has_attributes = hasattr(part, "__dict__") and not is_of_zae(type(part))
        if has_attributes and not isinstance(part, (torch.nn.Module, *_FUNCTIONS)):
            own.setdefault(id(part), (place, part))
    return dict(own.values())


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
