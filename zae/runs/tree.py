"""Connect runs with those that they have started from, and say what differs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zae.runs.scan import Run

__all__ = ["Node", "connect", "differences"]


class Node(NamedTuple):
    """A run, the run that it is drawn under, and how the two belong together.

    ``relation`` is "new", "fork" (``start_from`` of a checkpoint of ``parent``), "continued" (the same run in another
    folder), "gone" (a fork of a run that is not here), "weights" (from a file) or "circle" (the manifests contradict
    each other).
    """

    run: Run
    parent: Run | None
    relation: str
    step: int | None
    differs: list[tuple[str, Any, Any]]


def connect(runs: Sequence[Run]) -> list[Node]:
    """Return the node of each run."""
    by_id: dict[str, list[Run]] = {}
    for run in runs:
        by_id.setdefault(run.run_id, []).append(run)
    for same in by_id.values():  # The first of them is where the run has begun.
        same.sort(key=lambda run: (len(run.all[0]["resumed_at"]), run.all[0]["step"], str(run.folder)))
    nodes = [_node(run, by_id) for run in runs]
    parents = {id(node.run): node.parent for node in nodes}
    for index, node in enumerate(nodes):
        seen, above = {id(node.run)}, node.parent
        while above is not None and id(above) not in seen:
            seen.add(id(above))
            above = parents[id(above)]
        if above is node.run:
            parents[id(node.run)] = None
            nodes[index] = Node(node.run, None, "circle", None, [])
    return nodes


def _node(run: Run, by_id: Mapping[str, list[Run]]) -> Node:
    """Find the run that a run belongs under."""
    parent, first = run.newest["parent"], by_id[run.run_id][0]
    if first is not run:
        resumed = run.all[0]["resumed_at"]
        return Node(run, first, "continued", resumed[-1] if resumed else None, differences(first.newest, run.newest))
    if parent is None:
        return Node(run, None, "new", None, [])
    step = parent.get("step") if type(parent.get("step")) is int else None
    if "run_id" not in parent:
        return Node(run, None, "weights", None, [])
    found = _origin(parent, by_id.get(str(parent["run_id"]), []), step)
    if found is None:
        return Node(run, None, "gone", step, [])
    return Node(run, found, "fork", step, differences(_at(found, step), run.all[0]))


def _origin(parent: Mapping[str, Any], candidates: Sequence[Run], step: int | None) -> Run | None:
    """Return in which folder a run had the checkpoint that another one has started from; None if in none of them."""
    # The checkpoint itself decides; if it has been deleted since, its folder, and last which run has come so far.
    place = os.path.dirname(os.path.realpath(str(parent.get("path")).replace("\0", "")))
    ways: list[Callable[[Run], bool]] = [
        lambda run: parent.get("sha256") in [each["sha256"] for each in (*run.saved, *run.failed)],
        lambda run: os.path.realpath(run.folder) == place,
        lambda run: run.newest["step"] >= (step or 0),
    ]
    return next((run for is_it in ways for run in candidates if is_it(run)), None)


def _at(run: Run, step: int | None) -> dict[str, Any]:
    """Return the newest manifest up to a step, or the first one: a run may have changed when it was resumed."""
    return next((each for each in reversed(run.all) if step is not None and each["step"] <= step), run.all[0])


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """List what two manifests say differently: the name, and both values; None is the default, or nothing.

    Options, code, versions and data are compared where both have recorded them.
    """
    found: list[tuple[str, Any, Any]] = []
    old, new = before["composition"], after["composition"]
    found += [(name, None, name) for name in new if name not in old]
    found += [(name, name, None) for name in old if name not in new]
    if not found and old != new:
        found.append(("composition", ", ".join(old), ", ".join(new)))
    found += [(key, before[key], after[key]) for key in ("world_size", "monitor") if before[key] != after[key]]
    first, second = before["options"], after["options"]
    if first is not None and second is not None:
        names = [name for name in {**first, **second} if name != "monitor"]
        found += [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]
    for part, prefix in (("code", "code of "), ("data", "data: "), ("versions", "")):
        first, second = before[part], after[part]
        both = [name for name in first if name in second and first[name] != second[name]]
        found += [(prefix + name, first[name], second[name]) for name in both]
    return found + [("zae", before["zae"], after["zae"])] * (before["zae"] != after["zae"])
