"""What has changed of the values that a walk finds: noted, written into a state, and put back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from zae.user_state.marks import mark_of
from zae.user_state.owners import MAX_PLACES, STATE, Place, Walk, can_have, is_of_user
from zae.user_state.values import PLAIN, Absent, Maker, Name, NotSaved, Packer, fill, same_kind

__all__ = ["Changes"]

_log = logging.getLogger("zae")
_LARGE_TO_SAY = 32 << 20
_SHOWN = 10


class _Beginning(NamedTuple):
    """A value as a run began."""

    mark: object
    kind: str
    object: Callable[[], Any]  # The object itself, or None where it is gone.
    written: Any  # Its form in a state, in a list; None where it is large, or cannot be saved.


class Changes:
    """Which values training has changed since a run began, and what they were.

    Once changed, a value is saved for good: it may come back to what it was by chance, and be changed again by a hook.

    Parameters
    ----------
    opens_lazily : bool
        Whether what no checkpoint can hold is reported only where a function, or a value without attributes, takes the
        place of another one: a dataset opens a file, fills a cache, or makes a loader of its own as it is read, and
        does so again after a resume.

    Attributes
    ----------
    names : set
        The names of the values that have changed, in this process or in those that it continues.
    """

    def __init__(self, opens_lazily: bool = False) -> None:
        self.names: set[Name] = set()
        self._opens_lazily = opens_lazily
        self._has_begun = False
        self._beginnings: dict[Name, _Beginning] = {}
        self._dicts: dict[str, dict[str, Any]] = {}  # Those that were looked at by their keys, by path.
        self._objects: dict[str, Callable[[], Any]] = {}  # The owners, by path.
        self._reported: set[Name] = set()
        self._has_reported_omitted = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the names: a copy has other objects, and marks are of this process."""
        return {"names": set(self.names), "opens_lazily": self._opens_lazily}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["opens_lazily"])  # type: ignore[misc]
        self.names = state["names"]

    # ------------------------------------------------------------------------------------------------- during a run

    def walk(self, apart: Iterable[object], is_begin: bool = False) -> Walk:
        """Return a walk in which the owners have the paths that they had as the run began."""
        known = {id(reference()): path for path, reference in self._objects.items() if reference() is not None}
        if is_begin:
            return Walk(apart, known, lambda name, value: name not in self.names)
        if not self._has_begun:
            return Walk(apart, known)
        return Walk(apart, known, lambda name, value: self._dicts.get(".".join(name)) is value)

    def begin(self, walk: Walk, packer: Packer) -> None:
        """Mark all values, as a run begins: what the script has set since the run before counts as the script's."""
        self._has_begun = True
        self._report_omitted(walk)
        for name, place in walk.places.items():
            if name not in self._beginnings or name not in self.names:
                value = place.value
                written = None if name[1] == STATE else _written(packer, name, value)
                mark = mark_of(value, walk.paths)
                self._beginnings[name] = _Beginning(mark, same_kind(value), _reference(value), written)
        self._dicts = {path: owner.object for path, owner in walk.owners.items() if type(owner.object) is dict}
        self._objects |= {path: _reference(owner.object) for path, owner in walk.owners.items()}

    def note(self, walk: Walk) -> set[Name]:
        """Note which values are others than as the run began; return those that were not known to be."""
        new = set()
        self._report_omitted(walk)
        for name, place in walk.places.items() if self._has_begun else ():
            if name not in self.names:
                beginning = self._beginnings.get(name)
                if beginning is None or beginning.mark != mark_of(place.value, walk.paths):
                    new.add(name)
        self.names |= new
        return new

    # --------------------------------------------------------------------------------------------- writing a state

    def write(self, walk: Walk, packer: Packer, *, says: bool) -> dict[str, Any]:
        """Return the values that have changed, as a state holds them; what none can hold is reported once."""
        packer.objects = {id(owner.object): path for path, owner in walk.owners.items() if path in self._objects}
        values = {}
        for name in sorted(walk.places.keys() & self.names):
            if name[1] != STATE or name[0] in self._objects:
                values[name] = walk.places[name].value
        for name, value in values.items():  # What is in a list and is an attribute as well stays one object.
            if type(value) not in PLAIN:
                packer.names.setdefault(id(value), name)
        entries = []
        for name, value in values.items():
            try:
                entries.append(self._entry(walk.places[name], name, value, packer.write(name, value)))
            except NotSaved as why:
                if says and (name[0] not in walk.stateful or name[1] == STATE) and not self._is_opened(name, value):
                    self._report_unsaved(name, why)
            else:
                if says and packer.size > _LARGE_TO_SAY:
                    self._report_large(name, packer.size)
        state = {"values": entries, "removed": self._removed(walk)}
        return {key: value for key, value in state.items() if value}

    def unchanged(self, walk: Walk) -> list[dict[str, Any]]:
        """Return the small values that are as the run began, as a state holds them."""
        names = walk.places.keys() & self._beginnings.keys()  # There are none before a run begins.
        beginnings = {name: self._beginnings[name] for name in names - self.names}
        return [
            self._entry(walk.places[name], name, walk.places[name].value, beginning.written[0])
            for name, beginning in beginnings.items()
            if beginning.written is not None
        ]

    def _entry(self, place: Place, name: Name, value: Any, written: Any) -> dict[str, Any]:
        """Return a value as a state holds it, with where it stands."""
        if isinstance(value, Mapping) and {"model", "optimizer", "progress", "position"} <= value.keys():
            raise NotSaved("the state of a trainer")
        beginning = self._beginnings.get(name)
        # Whether it is in the object that was there as the run began.
        is_in_place = value is not None and self._dicts.get(".".join(name)) is value
        if beginning is not None and type(value) not in PLAIN:
            is_in_place = is_in_place or beginning.object() is value
        return {
            "owner": name[0],
            "key": name[1],
            "was": None if beginning is None else beginning.kind,
            "in place": is_in_place,
            "of class": place.cls is not None,
            "value": written,
        }

    def _removed(self, walk: Walk) -> list[list[str]]:
        """Return the attributes that owners had as the run began, and have no more.

        A module of a library that has taken the place of another one has other settings, which are its own.
        """
        gone = [name for name in self._beginnings if name not in walk.places and name[0] in walk.owners]
        return sorted(
            [path, key]
            for path, key in gone
            if key not in walk.owners[path].store and not _is_of_library(walk.owners[path].object)
        )

    # ------------------------------------------------------------------------------------------------- putting back

    def put_back(
        self, walk: Walk, state: Mapping[str, Any], maker: Maker, loaded_names: Collection[Name] = (), *, says: bool
    ) -> None:
        """Put the values of a state back; those that it lacks, and that have changed since, become what they were.

        Those in ``loaded_names`` were set by their objects, which have loaded a state of their own.
        """
        entries = {(entry["owner"], entry["key"]): entry for entry in state.get("values", ())}
        self.names.update(entries)
        states = {name for name in entries if name[1] == STATE}
        loaded_names = {*loaded_names, *states}
        for name in states & walk.places.keys():
            loaded_names |= _load_state(walk, name, maker.read(entries[name]["value"], None))
        for name in loaded_names & entries.keys() & walk.places.keys() - states:
            maker.values[name] = walk.places[name].value
        absent = self._put_all(
            walk, {name: entry for name, entry in entries.items() if name not in loaded_names}, maker
        )
        for name in map(tuple, state.get("removed", ())):
            if name in walk.places and walk.places[name].cls is None:
                walk.places[name].store.pop(name[1], None)
        self._put_beginnings(walk, entries.keys() | loaded_names, maker)
        if absent and says:
            further = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
            _log.warning(
                "values in the state that this run resumes from have no place here, so that it may differ from an "
                "uninterrupted one: %s%s",
                "; ".join(absent[:_SHOWN]),
                further,
            )

    def _put_all(self, walk: Walk, entries: dict[Name, Mapping[str, Any]], maker: Maker) -> list[str]:
        """Put values back, each after those that it holds; return which of them have no place here, and why."""
        absent: list[str] = []
        while entries:
            later = {}
            for name, entry in entries.items():
                try:
                    problem = _put(walk, entry, maker)
                except Absent as why:
                    later[name] = f"{_shown(name)} ({why} does not exist as the run begins: make it in __init__)"
                else:
                    absent += [f"{_shown(name)} ({problem})"] * bool(problem)
            if len(later) == len(entries):
                return absent + list(later.values())
            entries = {name: entries[name] for name in later}
        return absent

    def _put_beginnings(self, walk: Walk, names: Collection[Name], maker: Maker) -> None:
        """Give the values that a state lacks what they were as the run began, and remove those that were not there."""
        for name in (self.names & walk.places.keys()).difference(names) if self._has_begun else ():
            place = walk.places[name]
            beginning = self._beginnings.get(name)
            if beginning is not None and beginning.written is not None:
                value = maker.read(beginning.written[0], place.value)
                place.write(beginning.object() if fill(beginning.object(), value) else value)
            elif beginning is None and place.cls is None and name[1] != STATE:
                place.store.pop(place.key, None)

    # --------------------------------------------------------------------------------------------- what is reported

    def _is_opened(self, name: Name, value: Any) -> bool:
        """Return whether a value is made again as an object that opens lazily is read."""
        if not self._opens_lazily:
            return False
        beginning = self._beginnings.get(name)
        was_apart = beginning is not None and beginning.kind == "another"  # Not None, and no container.
        return not was_apart or (hasattr(value, "__dict__") and not callable(value))

    def _report_omitted(self, walk: Walk) -> None:
        if walk.first_omitted and not self._has_reported_omitted:
            self._has_reported_omitted = True
            _log.warning(
                "%s and what comes after it is not looked at: the objects of this run hold more than %d values. What "
                "training changes there is in no checkpoint; keep it in lists or arrays",
                walk.first_omitted,
                MAX_PLACES,
            )

    def _report_unsaved(self, name: Name, reason: NotSaved) -> None:
        if name not in self._reported:
            self._reported.add(name)
            _log.warning(
                "%s has changed, and no checkpoint can hold %s: a resume is not exact unless training sets it before "
                "it reads it. Give that object state_dict() and load_state_dict(), or write unsaved_attributes = "
                "(%r,) in the class that has it",
                _shown(name),
                reason,
                name[1],
            )

    def _report_large(self, name: Name, size: int) -> None:
        if name not in self._reported:
            self._reported.add(name)
            _log.warning(
                "%s has changed, and each checkpoint contains its %d MB; unsaved_attributes = (%r,) in the class that "
                "has it leaves it out",
                _shown(name),
                size >> 20,
                name[1],
            )


def _put(walk: Walk, entry: Mapping[str, Any], maker: Maker) -> str:
    """Put one value back; return why that cannot be done, if it cannot."""
    name = (entry["owner"], entry["key"])
    owner = walk.owners.get(name[0])
    if owner is None:
        return "its object does not exist as the run begins: make it in __init__"
    place = walk.places.get(name)
    if place is None:
        if name[1] in owner.store and not isinstance(owner.store[name[1]], dict):
            return "which is no value here"
        if not can_have(owner, name[1]):
            return "which is no plain attribute of its class"
    if place is None or (place.cls is not None and not (entry["of class"] or entry["in place"])):
        place = Place(owner.store, name[1])  # Training has set it on the object, which hides that of the class.
    present = place.value if place.key in place.store else None
    value = maker.read(entry["value"], present)
    if value is not None and same_kind(present) not in {"", entry["was"], same_kind(value)}:
        return f"it was of the kind {entry['was'] or same_kind(value)!r}, and is a {type(present).__name__}"
    if entry["in place"] and fill(present, value):
        value = present
    elif value is not present:
        place.write(value)
    maker.values[name] = value
    return ""


def _load_state(walk: Walk, name: Name, state: Any) -> set[Name]:
    """Load the state of an object that saves one; return the names of the values that this has set."""
    path = name[0]
    inside = [location for location in walk.places if f"{location[0]}.".startswith((f"{path}.", f"{path}["))]

    def marks() -> dict[Name, object]:
        marks = {}
        for location in inside:
            place = walk.places[location]
            if place.cls is None and place.key != STATE and place.key in place.store:
                marks[location] = mark_of(place.value, walk.paths)
        return marks

    before = marks()
    walk.places[name].write(state)
    return {location for location, mark in marks().items() if mark != before.get(location)}


def _shown(name: Name) -> str:
    """Return a name as a class of the user writes it."""
    text = ".".join(name)
    return "self" + text.removeprefix("task") if text.startswith("task.") else text


def _is_of_library(owner: object) -> bool:
    """Return whether an owner is a module that is looked at for its settings alone."""
    return isinstance(owner, nn.Module) and not is_of_user(type(owner))


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns an object while it is alive; of a list or a dict it keeps it alive."""
    if type(value) in PLAIN:
        return lambda: None
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _written(packer: Packer, name: Name, value: Any) -> Any:
    """Return the form of a value in a list, or None where it has none, or is too large to keep it."""
    try:
        return [packer.pack(value, name[1])]
    except NotSaved:
        return None
