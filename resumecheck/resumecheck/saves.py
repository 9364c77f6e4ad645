"""Find the saves among the changes of files of the reference run, and choose the instants at which a kill is tried."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .runs import Run
from .workspace import Entry, Tree

__all__ = [
    "Instant",
    "Save",
    "choose_instants",
    "find_saves",
    "general_name",
    "is_large",
    "is_log",
    "is_named_as_checkpoint",
    "last_saved_row",
]

_LOGS = (".csv", ".json", ".jsonl", ".log", ".md", ".png", ".svg", ".tsv", ".txt", ".yaml", ".yml", ".lock", ".out")
_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".pkl", ".h5", ".keras", ".tar", ".npz")
_WRITES = ("write", "append")
_LEAST_BYTES = 256

Event = dict[str, Any]


@dataclass
class Save:
    """A group of changes of files that leaves a checkpoint."""

    row: int
    """The step whose weights it has; by these where they were seen, else by when it was written."""
    is_known_by_weights: bool
    events: list[Event]
    places: list[int]
    """Where its events are among those of the run."""
    files: dict[str, Entry]
    """The files that it leaves, as they are when it is whole."""
    whole_at: int | None = None
    """The first event of the run before which it was whole."""

    def is_whole_in(self, tree: Tree) -> bool:
        """Return whether all of its files are in a folder."""
        return bool(self.files) and all(tree.get(name) == entry for name, entry in self.files.items())


@dataclass
class Instant:
    """A folder that a kill leaves."""

    kind: str
    """"step" or "save"."""
    text: str
    tree: Tree
    done: int
    """The steps that were made."""
    lowest: int
    """The step of the last save that was whole: no resume may begin before it."""
    has_whole_save: bool
    save: Save
    runs_to_end: bool = False


def find_saves(reference: Run, end: Tree) -> list[Save]:
    """Return the saves of a run, in their order."""
    groups = _group(reference.events)
    saves = [_as_save(group, reference, end) for group in groups]
    by_weights = [save for save in saves if save.is_known_by_weights]
    if not by_weights:  # A data cache and the files of others count where nothing else is seen.
        named = [
            save
            for save in saves
            if any(_is_write(event) and is_named_as_checkpoint(event["path"]) for event in save.events)
        ]
        sized = [save for save in saves if any(is_large(file, reference) for file in save.files.values())]
        by_weights = named or sized
    result = [save for save in by_weights if save.files]
    for index, event in enumerate(reference.events):
        for save in result:
            if "tree" in event and save.whole_at is None and save.places[0] < index and save.is_whole_in(event["tree"]):
                save.whole_at = index
    return result


def _group(events: Sequence[Event]) -> list[list[tuple[int, Event]]]:
    """Divide the changes: those of all ranks between two steps, or, aside of the training, between two checkpoints."""
    groups: list[list[tuple[int, Event]]] = []
    open_groups: dict[Any, list[tuple[int, Event]]] = {}
    for index, event in enumerate(events):
        if event["kind"] not in ("file", "content"):
            continue
        key = (event["rank"], event["thread"]) if event["thread"] else event["row"]
        has_content = any("tensors" in previous for _, previous in open_groups.get(key, []))
        if key not in open_groups or (event["thread"] and event.get("tensors") and has_content):
            open_groups[key] = []
            groups.append(open_groups[key])
        open_groups[key].append((index, event))
    return [group for group in groups if any(event["kind"] == "file" for _, event in group)]


def _as_save(group: list[tuple[int, Event]], reference: Run, end: Tree) -> Save:
    places, events = [index for index, _ in group], [event for _, event in group]
    known = [row for event in events if (row := _row_of_weights(event, reference, event["row"])) is not None]
    row = max(known) if known else max(event["row"] for event in events)
    return Save(row, bool(known), events, places, _settled_files(events, places, reference.events, end))


def last_saved_row(events: Iterable[Event], reference: Run) -> int | None:
    """Return the step of the reference whose weights are those that a run has saved last."""
    known = (_row_of_weights(event, reference) for event in reversed(list(events)))
    return next((row for row in known if row is not None), None)


def _row_of_weights(event: Event, reference: Run, until: int | None = None) -> int | None:
    """Return the last step until then whose weights are among the tensors of a file."""
    text = event.get("tensors", "")
    tensors = {text[place : place + 8] for place in range(0, len(text), 8)}
    for row in reversed(reference.rows.get(event["rank"], [])[:until] if tensors else []):
        parts = row["parts"]
        if parts[:8] in tensors and all(parts[place : place + 8] in tensors for place in range(0, len(parts), 8)):
            return int(row["n"])
    return None


def _is_write(event: Event) -> bool:
    return event["kind"] == "file" and event["operation"] in (*_WRITES, "rename")


def is_large(entry: Entry, reference: Run) -> bool:
    """Return whether a file may hold the model, by its size."""
    return _size(entry) >= max(reference.weight_bytes // 4, _LEAST_BYTES)


def _size(entry: Entry) -> int:
    return os.path.getsize(entry.source) if entry.kind == "file" else 0


def _settled_files(own: Sequence[Event], places: Sequence[int], events: Sequence[Event], end: Tree) -> dict[str, Entry]:
    """Return the files that changes leave, but logs: as they are before something else touches them."""
    names: set[str] = set()
    for event in own:
        if event["kind"] == "file":
            names = _after(event, names)
    later = [event for index, event in enumerate(events) if index > places[-1]]
    files = {}
    for name in names:
        tree = next((event["tree"] for event in later if _touches(event, name)), end)
        if name in tree and tree[name].kind == "file" and not is_log(name):
            files[name] = tree[name]
    return files


def _after(event: Event, names: set[str]) -> set[str]:
    """Return the names of the files of a save after one more of its changes."""
    path, operation = event["path"], event["operation"]
    if operation == "rename":
        source = event["source"]
        moved = {path + name[len(source) :] for name in names if _is_below(name, source)}
        return {name for name in names if not _is_below(name, source)} | (moved or {path})
    if operation == "remove":
        return {name for name in names if not _is_below(name, path)}
    return names | {path} if operation in _WRITES else names


def _touches(event: Event, name: str) -> bool:
    if event["kind"] != "file":
        return False
    return _is_below(name, event["path"]) or ("source" in event and _is_below(name, event["source"]))


def _is_below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + "/")


def is_log(path: str) -> bool:
    """Return whether a file is no checkpoint, by its name."""
    return path.endswith(_LOGS) or "tfevents" in path


def is_named_as_checkpoint(path: str) -> bool:
    """Return whether a file may be a checkpoint, by its name."""
    return path.endswith(_CHECKPOINTS)


def general_name(text: str) -> str:
    """Return a text without what differs between two saves: numbers, and names of temporary files."""
    return re.sub(r"tmp[a-z0-9_]{8}\b|(?=[a-z-]*\d)[0-9a-f]{6,}|\d+", "#", text)


# --- instants


def choose_instants(saves: Sequence[Save], reference: Run, all_of_them: bool) -> list[Instant]:
    """Return instants after steps that follow a save, then each kind of change within a save; torn files first."""
    events = reference.events
    steps = _instants_after_saves(saves, events)
    if not all_of_them and len(steps) > 3:
        steps = [steps[-1], steps[0], steps[len(steps) // 2]]
    elif steps:
        steps = steps[-1:] + steps[:-1]
    if steps:
        steps[0].runs_to_end = True
    seen_trees = {_key(instant.tree) for instant in steps}
    seen_texts: set[str] = set()
    within = []
    order = saves if all_of_them or len(saves) == 1 else [*saves[1:], saves[0]]
    for instant in (instant for save in order for instant in _instants_within(save, saves, events)):
        label, key = general_name(instant.text), _key(instant.tree)
        if key in seen_trees or (label in seen_texts and not all_of_them):
            continue
        seen_trees.add(key)
        seen_texts.add(label)
        within.append(instant)
    return steps + sorted(within, key=lambda instant: "in the middle" not in instant.text)


def _instants_after_saves(saves: Sequence[Save], events: Sequence[Event]) -> list[Instant]:
    """Return the folder after the first step that follows each save."""
    instants: dict[int, Instant] = {}
    for save in saves:
        if save.whole_at is None:
            continue
        later = (
            (index, event) for index, event in enumerate(events) if index >= save.whole_at and event["kind"] == "step"
        )
        index, step = next(((index, event) for index, event in later if event["rank"] == 0), (-1, None))
        if step is not None:
            lowest = _lowest(saves, index)
            text = f"killed after step {step['row']}, the first after a save"
            instants[index] = Instant("step", text, step["tree"], step["row"], lowest, True, save)
    return list(instants.values())


def _instants_within(save: Save, saves: Sequence[Save], events: Sequence[Event]) -> Iterable[Instant]:
    """Yield the folder before each change of a save, and with half of each file that it writes."""
    for place, event in zip(save.places, save.events):
        if event["kind"] != "file":
            continue
        is_any_whole = any(candidate.whole_at is not None and candidate.whole_at <= place for candidate in saves)
        lowest = _lowest(saves, place)
        where = f"killed in the save after step {event['row']}"
        name = event["path"]
        if event["operation"] in _WRITES:
            tree: Tree = next((later["tree"] for later in events[place + 1 :] if "tree" in later), {})
            if name in tree and _size(tree[name]) > 1:
                torn = {**tree, name: Entry("torn", tree[name].source)}
                text = f"{where}, in the middle of writing {name}"
                yield Instant("save", text, torn, event["row"], lowest, is_any_whole, save)
        text = f"{where}, before the {event['operation']} of {name}"
        yield Instant("save", text, event["tree"], event["row"], lowest, is_any_whole, save)


def _lowest(saves: Sequence[Save], index: int) -> int:
    """Return the step of the last save that was whole before an event."""
    return max(
        (candidate.row for candidate in saves if candidate.whole_at is not None and candidate.whole_at <= index),
        default=0,
    )


def _key(tree: Tree) -> frozenset[tuple[str, Entry]]:
    return frozenset(tree.items())
