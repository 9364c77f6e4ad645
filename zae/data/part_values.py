"""The values that training changes in the parts of a loader: its datasets, samplers, ``collate_fn``, and the loader.

They have two states, of the epoch's begin and of the present, as the random streams in these parts have, so they are in
the position of the loader: an order is drawn again from the first, and goes on from the second.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zae.data.loader_state import parts_of
from zae.data.loaders import Proxy
from zae.data.sharding import collate_of
from zae.random_state import STREAMS
from zae.torch_private import is_loader_iterator
from zae.user_state.changes import Changes
from zae.user_state.marks import LARGE, mark_of
from zae.user_state.owners import Walk, is_of_user
from zae.user_state.values import Maker, Name, Packer
from zae.values.walk import is_of_zae

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["PartValues"]

_log = logging.getLogger("zae")
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType, type)
_HOST = torch.device("cpu")


class PartValues:
    """The values in the parts of a loader, and which of them have changed."""

    def __init__(self) -> None:
        self._changes = Changes()
        self._has_warned = False
        self._source: Any = None  # What the run before has read.
        self._trainer: weakref.ref[Trainer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the data out of a copy."""
        return {**vars(self), "_source": None, "_trainer": None}

    def begin(self, loader: Any, trainer: Trainer) -> None:
        """Mark the values as a run begins; what has changed in other data is not of these."""
        self._trainer = weakref.ref(trainer)
        source = getattr(loader, "dataset", loader)
        if self._source is not None and self._source is not source:
            self._changes = Changes()
        self._source = source
        walk = self._walk(loader, is_begin=True)
        self._changes.begin(walk, Packer({}, walk.paths, _HOST, copies=True, max_bytes=LARGE))
        _warn_of_living_iterators(loader)

    def note(self, loader: Any) -> Walk:
        """Note which values have changed; return the walk that has looked at them."""
        walk = self._walk(loader)
        new = self._changes.note(walk)
        if new and not self._has_warned and getattr(loader, "persistent_workers", False) and loader.num_workers:
            self._warn_of_workers(walk, new)
        return walk

    def capture(self, loader: Any, with_unchanged: bool) -> dict[str, Any]:
        """Return the values that have changed, or all small ones besides."""
        walk = self.note(loader)
        unchanged = self._changes.unchanged(walk) if with_unchanged else []
        changed = self._changes.write(walk, Packer({}, walk.paths, _HOST, copies=True), says=False)
        return {"values": [*unchanged, *changed.get("values", ())]}

    def changed_in(self, captured: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of captured values that training has changed: the others are the script's."""
        names = self._changes.names
        return {
            "values": [record for record in captured.get("values", ()) if (record["owner"], record["key"]) in names]
        }

    def take(self, captured: Mapping[str, Any]) -> None:
        """Note the names of values in a state that is loaded: what has changed once is saved for good."""
        self._changes.names |= {(record["owner"], record["key"]) for record in captured.get("values", ())}

    def restore(self, loader: Any, captured: Mapping[str, Any], loaded: Mapping[Name, object]) -> None:
        """Put values back, but those that their object has set itself since they had the marks of ``loaded``."""
        walk = self._walk(loader)
        places = walk.places
        set_by_parts = {
            name for name in loaded if name in places and mark_of(places[name].value, walk.paths) != loaded[name]
        }
        maker = Maker({}, {path: each.object for path, each in walk.owners.items()}, _HOST)
        before = set(self._changes.names)
        self._changes.put_back(walk, captured, maker, set_by_parts, says=True)
        self._changes.names = before

    def marks(self, loader: Any) -> dict[Name, object]:
        """Return the marks of the values, to see what a part sets as it loads a state of its own."""
        walk = self._walk(loader)
        return {name: mark_of(place.value, walk.paths) for name, place in walk.places.items()}

    def _walk(self, loader: Any, is_begin: bool = False) -> Walk:
        """Return the parts of a loader that are of the user's classes, and what they hold."""
        known = parts_of(loader)
        parts = _own_parts(loader, known)
        trainer = self._trainer() if self._trainer is not None else None
        # Data may hold the trainer and what is in it, whose state the trainer has.
        known_objects = [] if trainer is None else [trainer, *trainer.unwrap().modules(), *trainer.optimizers.values()]
        apart = [*known_objects, *known.values(), *parts.values(), *_streams_in(parts)]
        walk = self._changes.walk(apart, is_begin)
        for place, part in parts.items():
            # What a class of a library keeps to itself, it computes.
            private = () if is_of_user(type(part)) else [name for name in vars(part) if name.startswith("_")]
            walk.add(place, part, without=frozenset(private))
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


def _own_parts(loader: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a loader that have attributes, by place; itself and its ``collate_fn`` if of a user."""
    while isinstance(loader, Proxy):
        loader = loader.passed
    parts = {f"loader.{place}": part for place, part in known.items()}
    collate = collate_of(loader)
    if is_of_user(type(collate)):
        parts["loader.collate_fn"] = collate
    if is_of_user(type(loader)):
        parts["loader"] = loader
    found: dict[str, Any] = {}
    for place, part in parts.items():
        is_known = any(part is each for each in found.values())
        has_attributes = hasattr(part, "__dict__") and not is_of_zae(type(part))
        if has_attributes and not is_known and not isinstance(part, (torch.nn.Module, *_FUNCTIONS)):
            found[place] = part
    return found


def _streams_in(parts: Mapping[str, Any]) -> list[Any]:
    """Return the random streams that the parts hold: `zae.data.loader_state` has their states."""
    return [value for part in parts.values() for value in vars(part).values() if isinstance(value, STREAMS)]


def _warn_of_living_iterators(loader: Any) -> None:
    """Warn of a loader that keeps an iterator, with its workers, over the epochs."""
    for part in _own_parts(loader, parts_of(loader)).values():
        for name, value in getattr(part, "__dict__", {}).items():
            if is_loader_iterator(value) and name != "_iterator":
                _log.warning(
                    "the %s keeps an iterator over its epochs (%s): what that has read ahead is in no checkpoint, and "
                    "a resume gets other batches. Write a torch.utils.data.DataLoader with persistent_workers=True, "
                    "which keeps its workers as well",
                    type(part).__name__,
                    name,
                )
