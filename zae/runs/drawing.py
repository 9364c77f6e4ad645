"""The runs below folders as data, and as a drawn tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zae.display.answer import Answer
from zae.errors import ConfigError, printable
from zae.runs.scan import Found, Run, find_runs
from zae.runs.tree import Node, connect, differences

__all__ = ["draw_runs"]

_FORK, _LAST = "├─ ", "└─ "
_MOST = 12  # Differences, damaged checkpoints and the like that are shown; --json has all of them.


def draw_runs(given: Iterable[Path]) -> Answer:
    """Draw the runs below the folders; the status is 1 if a checkpoint is damaged."""
    folders = [each.expanduser() for each in given]
    found = find_runs(folders)
    if not found.runs and not found.damaged:
        raise ConfigError(
            f"{', '.join(map(str, folders))}: there is no checkpoint in it; give a folder with the save_path of runs "
            "with StateManagerAddon below it"
        )
    nodes = _in_order(connect(found.runs))
    data = {
        "folders": [str(each) for each in folders],
        "runs": [_entry(each) for each, _ in nodes],
        "damaged": found.damaged,
        "foreign": found.foreign,
    }
    return Answer(data, _draw(folders, nodes, found), 1 if found.damaged else 0)


def _in_order(nodes: Sequence[Node]) -> list[tuple[Node, str]]:
    """Return each node after the one that it is drawn under, with the lines of the tree before its name."""
    below: dict[int | None, list[Node]] = {}
    for each in nodes:
        below.setdefault(None if each.parent is None else id(each.parent), []).append(each)
    for siblings in below.values():
        siblings.sort(key=lambda node: (node.step or 0, str(node.run.folder), node.run.run_id), reverse=True)
    ordered, waiting = [], [(each, "") for each in below.get(None, [])]
    while waiting:
        node, prefix = waiting.pop()
        ordered.append((node, prefix))
        inner = prefix.replace(_FORK, "│  ").replace(_LAST, "   ")
        children = below.get(id(node.run), [])
        waiting += [(each, inner + (_LAST if number == 0 else _FORK)) for number, each in enumerate(children)]
    return ordered


def _entry(node: Node) -> dict[str, Any]:
    """Return a run as data."""
    run = node.run
    newest = run.newest
    best = run.best
    above = node.parent
    kept = (
        "epoch",
        "composition",
        "world_size",
        "zae",
        "monitor",
        "options",
        "code",
        "versions",
        "data",
        "parent",
        "resumed_at",
    )
    return {
        "folder": str(run.folder),
        "run_id": run.run_id,
        "relation": node.relation,
        "drawn_under": None if above is None else {"folder": str(above.folder), "run_id": above.run_id},
        "at_step": node.step,
        "differs": [{"name": name, "before": old, "after": new} for name, old, new in node.differs],
        "steps": [each["step"] for each in run.saved],
        "best": None if best is None else {"step": best["step"], "score": best["score"]},
        "failed": [{"step": each["step"], "error": each["error"]} for each in run.failed],
        "changes": [
            {"step": step, "name": name, "before": old, "after": new}
            for step, changed in _changes(run)
            for name, old, new in changed
        ],
        **{key: newest[key] for key in kept},
    }


def _changes(run: Run) -> list[tuple[int, list[tuple[str, Any, Any]]]]:
    """List what has changed from one checkpoint of a run to the next, as it was resumed."""
    pairs = ((after["step"], differences(before, after)) for before, after in zip(run.saved, run.saved[1:]))
    return [(step, changed) for step, changed in pairs if changed]


def _draw(folders: Sequence[Path], nodes: Sequence[tuple[Node, str]], found: Found) -> str:
    """Draw the tree, with all that is read from files printable."""
    lines = [str(folders[0])] if len(folders) == 1 else []
    parents = {id(node.parent) for node, _ in nodes if node.parent is not None}
    for node, prefix in nodes:
        lines.append(prefix + "  ".join(_headline(node.run, shows_top=len(folders) > 1)))
        inner = prefix.replace(_FORK, "│  ").replace(_LAST, "   ") + ("│  " if id(node.run) in parents else "   ")
        lines += [inner + each for each in _details(node)]
    lines += _shortened([f"damaged: {path}: {why}" for path, why in found.damaged.items()], "damaged")
    lines += _shortened([f"no checkpoint: {path}: {why}" for path, why in found.foreign.items()], "no checkpoints")
    return "\n".join(printable(line, kept="") for line in lines)


def _headline(run: Run, shows_top: bool) -> list[str]:
    """Return the folder of a run, its id, its steps, and its best score if it has one."""
    folder = run.folder if shows_top or not run.folder.is_relative_to(run.top) else run.folder.relative_to(run.top)
    steps = [each["step"] for each in run.all]
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    best = run.best
    score = [] if best is None else [f"best {best['monitor']} {best['score']:.6g} at step {best['step']}"]
    return [str(folder), f"run {run.run_id[:8]}", span, *score]


def _details(node: Node) -> list[str]:
    """Return the lines below the headline of a run."""
    run = node.run
    parent = run.newest["parent"] or {}
    at = "" if node.step is None else f" at step {node.step}"
    whose = f"{parent.get('path')}, step {parent.get('step')} of run {str(parent.get('run_id'))[:8]}"
    begun = {
        "fork": f"started{at} with {parent.get('parts')}",
        "continued": f"the same run, resumed here{at}" if at else "the same run, in another folder",
        "gone": f"started from a run that is not here: {whose}",
        "weights": f"started from weights: {parent.get('path')}",
        "circle": "the manifests say that it started from itself",
    }
    lines = [", ".join(run.newest["composition"]) or "no add-on"]
    if node.relation in begun:
        lines.append(begun[node.relation] + (f": {_listed(node.differs)}" if node.differs else ""))
    if resumed := run.newest["resumed_at"]:
        lines.append(f"resumed at step{'s' * (len(resumed) > 1)} {_joined([str(step) for step in resumed])}")
    lines += _shortened([f"from step {step}: {_listed(changed)}" for step, changed in _changes(run)], "changes")
    return lines + _shortened([f"failed at step {each['step']}: {each['error']}" for each in run.failed], "failures")


def _listed(changes: Iterable[tuple[str, Any, Any]]) -> str:
    """Return what differs, on one line."""
    shown = []
    for name, old, new in changes:
        if name in (old, new):  # An add-on.
            shown.append(f"+{name}" if old is None else f"-{name}")
        else:
            shown.append(f"{name} {_value(old)} -> {_value(new)}")
    return _joined(shown)


def _value(value: Any) -> str:
    text = "default" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _joined(words: Sequence[str]) -> str:
    rest = len(words) - _MOST
    return ", ".join([*words[:_MOST], *([f"and {rest} more"] if rest > 0 else [])])


def _shortened(lines: Sequence[str], what: str) -> list[str]:
    """Return the first lines, and how many there are beside them."""
    rest = len(lines) - _MOST
    return [*lines[:_MOST], *([f"and {rest} more {what}; --json lists them"] if rest > 0 else [])]
