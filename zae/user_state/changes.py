"""What has changed of the values that a walk finds: noted, written into a state, and put back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from zae.common.walk import has_same_bits
from zae.user_state.marks import mark_of
from zae.user_state.owners import STATE, Place, Walk, can_have
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
    written: Any  # Its form in a state; None where it is large, or cannot be saved.


class Changes:
    """Which values training has changed since a run began, and what they were.

    Once changed, a value is saved for good: it may come back to what it was by chance, and be changed again by a hook.

    Attributes
    ----------
    names : set
        The names of the values that have changed, in this process or in those that it continues.
    """

    def __init__(self) -> None:
        self.names: set[Name] = set()
        self._beginnings: dict[Name, _Beginning] | None = None
        self._dicts: dict[str, dict[str, Any]] = {}  # Those that were looked at by their keys, by path.
        self._objects: dict[str, Callable[[], Any]] = {}  # The owners, by path.
        self._said: set[Name] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Return the names: a copy has other objects, and marks are of this process."""
        return {"names": set(self.names)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.names = state["names"]

    @property
    def has_begun(self) -> bool:
        """Whether a run has begun in this process."""
        return self._beginnings is not None

    # ------------------------------------------------------------------------------------------------- during a run

    def walk(self, apart: Iterable[object], is_begin: bool = False) -> Walk:
        """Return a walk in which the owners have the paths that they had as the run began."""
        known = {}
        for path, reference in self._objects.items():
            value = reference()
            if value is not None:
                known[id(value)] = path

        def is_divided(name: Name, value: Any) -> bool:
            return name not in self.names if is_begin else self._dicts.get(".".join(name)) is value

        return Walk(apart, known, is_divided if self.has_begun or is_begin else lambda name, value: True)

    def begin(self, walk: Walk, packer: Packer) -> None:
        """Mark all values, as a run begins: what the script has set since the run before counts as the script's."""
        beginnings = self._beginnings or {}
        for name, value in walk.values():
            if name not in beginnings or name not in self.names:
                mark = mark_of(value, walk.paths)
                written = None if name[1] == STATE else _written(packer, name, value)
                beginnings[name] = _Beginning(mark, same_kind(value), _reference(value), written)
        self._beginnings = beginnings
        self._dicts = {path: each.object for path, each in walk.owners.items() if type(each.object) is dict}
        for path, owner in walk.owners.items():
            self._objects[path] = _reference(owner.object)

    def note(self, walk: Walk) -> set[Name]:
        """Note which values are others than as the run began; return those that were not known to be."""
        new: set[Name] = set()
        if self._beginnings is None:
            return new
        for name, value in walk.values(self.names):
            beginning = self._beginnings.get(name)
            if beginning is None or beginning.mark != mark_of(value, walk.paths):
                new.add(name)
        self.names |= new
        return new

    # --------------------------------------------------------------------------------------------- writing a state

    def write(self, walk: Walk, packer: Packer, names: Iterable[Name] | None = None, *, says: bool) -> dict[str, Any]:
        """Return the values that have changed, as a state holds them; what none can hold is said once."""
        places = walk.places
        packer.objects = {id(each.object): path for path, each in walk.owners.items() if path in self._objects}
        chosen = self.names & places.keys() if names is None else places.keys() & set(names)
        entries = []
        for name in sorted(chosen):  # What is in a list and is an attribute as well stays one object.
            if type(places[name].value) not in PLAIN:
                packer.names.setdefault(id(places[name].value), name)
        for name in sorted(chosen):
            place = places[name]
            value = place.value
            try:
                if _is_state_of_trainer(value):
                    raise NotSaved("the state of a trainer")
                written = packer.write(name, value)
            except NotSaved as why:
                if says and name[0] not in walk.stateful:
                    self._say_unsaved(name, why)
                continue
            if says and packer.size > _LARGE_TO_SAY:
                self._say_large(name, packer.size)
            beginning = (self._beginnings or {}).get(name)
            entries.append(
                {
                    "owner": name[0],
                    "key": name[1],
                    "was": None if beginning is None else beginning.kind,
                    "in place": self._is_same_object(name, value),
                    "of class": place.cls is not None,
                    "value": written,
                }
            )
        states = {}
        for path, each in walk.stateful.items():
            if path in self._objects and (path, STATE) in self.names:
                try:
                    states[path] = packer.write((path, STATE), dict(each.state_dict()))
                except NotSaved as why:
                    if says:
                        self._say_unsaved((path, STATE), why)
        found = {"values": entries, "states": states, "removed": self._removed(walk)}
        return {key: each for key, each in found.items() if each}

    def _is_same_object(self, name: Name, value: Any) -> bool:
        """Return whether a value is in the object that was there as the run began."""
        if self._dicts.get(".".join(name)) is value and value is not None:
            return True
        beginning = (self._beginnings or {}).get(name)
        return beginning is not None and type(value) not in PLAIN and beginning.object() is value

    def _removed(self, walk: Walk) -> list[list[str]]:
        """Return the attributes that owners had as the run began, and have no more."""
        names = []
        for owner, key in self._beginnings or {}:
            if owner in walk.owners and key not in walk.owners[owner].store and (owner, key) not in walk.places:
                names.append([owner, key])
        return sorted(names)

    # ------------------------------------------------------------------------------------------------- putting back

    def put_back(
        self, walk: Walk, state: Mapping[str, Any], maker: Maker, own: Container[Name] = (), *, says: bool
    ) -> None:
        """Put the values of a state back; those that it lacks, and that have changed since, become what they were.

        Those in ``own`` were set by their objects, which have loaded a state of their own.
        """
        loaded = self._load_states(walk, state.get("states", {}), maker)
        entries = {(entry["owner"], entry["key"]): entry for entry in state.get("values", ())}
        self.names.update(entries)
        for name in entries:
            if (name in own or name in loaded) and name in walk.places:
                maker.values[name] = walk.places[name].value
        rest = {name: entry for name, entry in entries.items() if name not in own and name not in loaded}
        absent = self._put_all(walk, rest, maker)
        for owner, key in state.get("removed", ()):
            if owner in walk.owners and (owner, key) in walk.places and walk.places[owner, key].cls is None:
                walk.owners[owner].store.pop(key, None)
        self._put_beginnings(walk, set(entries), maker)
        if absent and says:
            more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
            _log.warning(
                "values in the state that this run resumes from have no place here, so that it may differ from an "
                "uninterrupted one: %s%s",
                "; ".join(absent[:_SHOWN]),
                more,
            )

    def _put_all(self, walk: Walk, entries: dict[Name, Mapping[str, Any]], maker: Maker) -> list[str]:
        """Put values back, each after those that it holds; return which of them have no place here, and why."""
        absent: list[str] = []
        while entries:
            later = {}
            for name, entry in entries.items():
                try:
                    problem = self._put(walk, entry, maker)
                except Absent as why:
                    later[name] = f"{_shown(name)} ({why} does not exist as the run begins: make it in __init__)"
                else:
                    absent += [f"{_shown(name)} ({problem})"] * bool(problem)
            if len(later) == len(entries):
                return absent + list(later.values())
            entries = {name: entries[name] for name in later}
        return absent

    def _load_states(self, walk: Walk, states: Mapping[str, Any], maker: Maker) -> set[Name]:
        """Load the states of objects that have some; return the names of the values that this has set."""
        own: set[Name] = set()
        for path, written in states.items():
            self.names.add((path, STATE))
            if path not in walk.stateful:
                continue
            inside = [name for name in walk.places if name[0] == path or name[0].startswith((f"{path}.", f"{path}["))]
            before = {name: mark_of(walk.places[name].value, walk.paths) for name in inside}
            state = maker.read(written, None)
            if not has_same_bits(walk.stateful[path].state_dict(), state):
                walk.stateful[path].load_state_dict(state)
            for name in inside:
                store, key, cls = walk.places[name]
                if cls is None and key in store and mark_of(store[key], walk.paths) != before[name]:
                    own.add(name)
        return own

    def _put(self, walk: Walk, entry: Mapping[str, Any], maker: Maker) -> str:
        """Put one value back; return why that cannot be done, if it cannot."""
        name = (entry["owner"], entry["key"])
        owner = walk.owners.get(name[0])
        if owner is None:
            return "its object does not exist as the run begins: make it in __init__"
        place = walk.places.get(name)
        if place is not None and place.cls is not None and not (entry["of class"] or entry["in place"]):
            place = Place(owner.store, name[1])  # Training has set it on the object, which hides that of the class.
        elif place is None:
            if name[1] in owner.store and not isinstance(owner.store[name[1]], dict):
                return "which is no value here"
            if not can_have(owner, name[1]):
                return "which is no plain attribute of its class"
            place = Place(owner.store, name[1])
        present = place.value if place.key in place.store else None
        written = entry["value"]
        value = maker.read(written, present)
        kinds = {"", entry["was"], same_kind(value)}
        if value is not None and same_kind(present) not in kinds:
            return f"it was of the kind {entry['was'] or same_kind(value)!r}, and is a {type(present).__name__}"
        if entry["in place"] and fill(present, value):
            value = present
        elif value is not present:
            place.write(value)
        maker.values[name] = value
        return ""

    def _put_beginnings(self, walk: Walk, names: set[Name], maker: Maker) -> None:
        """Give the values that a state lacks what they were as the run began, and remove those that were not there."""
        for name in self.names - names:
            place = walk.places.get(name)
            if place is None or self._beginnings is None:
                continue
            beginning = self._beginnings.get(name)
            if beginning is None:
                if place.cls is None:
                    place.store.pop(place.key, None)
            elif beginning.written is not None:
                written = beginning.written[0]
                value = maker.read(written, place.value)
                object = beginning.object()
                if object is not None and fill(object, value):
                    value = object
                place.write(value)

    # -------------------------------------------------------------------------------------------------- what is said

    def _say_unsaved(self, name: Name, why: NotSaved) -> None:
        if name in self._said:
            return
        self._said.add(name)
        _log.warning(
            "%s has changed, and no checkpoint can hold %s: where training reads it before it writes it, a resume is "
            "not exact. Give that object state_dict() and load_state_dict(), or write unsaved_attributes = (%r,) in "
            "the class that has it",
            _shown(name),
            why,
            name[1],
        )

    def _say_large(self, name: Name, size: int) -> None:
        if name not in self._said:
            self._said.add(name)
            _log.warning(
                "%s has changed, and each checkpoint contains its %d MB; unsaved_attributes = (%r,) in the class that "
                "has it leaves it out",
                _shown(name),
                size >> 20,
                name[1],
            )


def _shown(name: Name) -> str:
    """Return a name as a class of the user writes it."""
    text = ".".join(name)
    return "self" + text.removeprefix("task") if text.startswith("task.") else text


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns an object while it is alive; of a list or a dict it keeps it alive."""
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


def _is_state_of_trainer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"model", "optimizer", "progress", "position"} <= value.keys()
