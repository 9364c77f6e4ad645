"""Examine the checkpoints of a run, and say what to do about those that are damaged."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zae.display.answer import Answer
from zae.display.text import format_size
from zae.errors import CheckpointDamaged, CheckpointError, ConfigError, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["diagnose", "examine", "examine_url", "folders_below"]


def diagnose(target: str) -> Answer:
    """Report on a folder of checkpoints, or on one under a URL; the status is 0 if the newest checkpoint is whole."""
    if "://" in target:
        report = examine_url(target)
    else:
        path = Path(os.path.expanduser(target))
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder; give the save_path of a run, or one checkpoint")
        report = examine(path)
    return Answer(report, _table(report), 0 if report["healthy"] else 1)


def examine(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Verify every checkpoint in a folder; nothing is changed."""
    from zae.addons.state_manager.checkpointer import weight_files
    from zae.addons.state_manager.crash import crashes_in
    from zae.checkpoint.folder import list_checkpoints  # It imports torch, which takes seconds: not for --help.

    folder = Path(path)
    paths = [folder] if (folder / "manifest.json").exists() else list_checkpoints(folder)
    crashes = crashes_in(folder) if paths != [folder] else []
    checkpoints = [_examine_one(checkpoint) for checkpoint in paths]
    report = _report(str(folder), folder, checkpoints)
    report["weights"] = [weight_file.name for weight_file in weight_files(folder)]
    report["crashes"] = [_examine_one(crash) for crash in crashes]
    report["left_behind"] = _left_behind(folder) if paths != [folder] else []
    report["holder"] = _holder(folder)
    return report


def examine_url(url: str) -> dict[str, Any]:
    """Verify every checkpoint that `FsspecCheckpointer` has stored under a URL: download one after the other."""
    from zae.addons.state_manager import FsspecCheckpointer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = FsspecCheckpointer(folder, url)

        def examined(kind: str) -> list[dict[str, Any]]:
            return [_examine_stored(store, path) for path in store.list_saved(folder, kind)]

        report = _report(url, folder, examined("step"))
        report["crashes"], report["left_behind"] = examined("crash"), store.unfinished()
        report["weights"] = [file.name for file in store.list_weights()]
    return {**report, "holder": None}


def _report(path: str, folder: Path, checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is known of the checkpoints, and what to do."""
    intact = [checkpoint for checkpoint in checkpoints if checkpoint["whole"]]
    return {
        "path": path,
        "healthy": bool(checkpoints) and checkpoints[0]["whole"],
        "resume_from": intact[0]["name"] if intact else None,
        "checkpoints": checkpoints,
        "advice": _advice(folder, checkpoints, intact),
    }


def _examine_stored(store: Any, path: Path) -> dict[str, Any]:
    """Download one checkpoint to a folder of its name, verify it, and remove the folder."""
    path.mkdir()
    try:
        store.get(path.name, path)
        return _examine_one(path)
    except CheckpointDamaged as error:
        return {"name": path.name, "whole": False, "bytes": _size(path), "wrong": _plain(error)}
    finally:
        shutil.rmtree(path)


def folders_below(folder: Path) -> list[str]:
    """Return the folders of checkpoints that are in a folder, at most two levels below, as they are to be given."""
    from zae.checkpoint.folder import list_checkpoints

    near = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return sorted(str(path) for path in near if path.is_dir() and not path.is_symlink() and list_checkpoints(path))


def _examine_one(path: Path) -> dict[str, Any]:
    """Read the manifest of one checkpoint, and verify it."""
    from zae.checkpoint.folder import verify

    entry: dict[str, Any] = {"name": path.name, "whole": False, "bytes": _size(path)}
    try:
        manifest = verify(path)
    except CheckpointError as error:
        return {**entry, "wrong": _plain(error)}
    keys = ("step", "epoch", "composition", "world_size", "format", "zae", "run_id", "model_format")
    info = {"score": manifest["info"].get("score"), "monitor": manifest["info"].get("monitor")}
    if isinstance(parent := manifest["info"].get("parent"), dict):
        info["parent"] = parent
    facts: dict[str, Any] = {key: manifest[key] for key in keys}  # type: ignore[literal-required]
    return {**entry, "whole": True, **facts, **info}


def _advice(folder: Path, checkpoints: Sequence[dict[str, Any]], intact: Sequence[dict[str, Any]]) -> list[str]:
    """Return what to do, one line for each action."""
    if not checkpoints:
        below = [f"python -m zae doctor {subfolder} examines those in it" for subfolder in folders_below(folder)[:9]]
        return ['there is no checkpoint: resume="auto" starts a new run here', *below]
    damaged = [checkpoint["name"] for checkpoint in checkpoints if not checkpoint["whole"]]
    if not damaged:
        return [f"all are intact: resume=True resumes from {intact[0]['name']}"]
    if not intact:
        return [
            "all are damaged: restore one from a copy, or move them away to start a new run",
            "weights whose own file is intact can be used: resume=<path>, allow_partial=['state.json', "
            "'state.safetensors']",
        ]
    names = ", ".join(damaged)
    if checkpoints[0]["whole"]:
        return [f"resume=True resumes from {intact[0]['name']}", f"delete the damaged ones: {names}"]
    lost = "" if checkpoints[0].get("step") is None else f" of step {checkpoints[0]['step']}"
    return [
        f"resume=True skips {names} and resumes from {intact[0]['name']} (step {intact[0]['step']})",
        f"restore {checkpoints[0]['name']}{lost} from a copy to lose nothing, or delete it",
    ]


def _table(report: dict[str, Any]) -> str:
    """Format the report for a terminal."""
    lines = [f"{_plain(report['path'])}"]
    rows: list[tuple[str, ...]] = [("checkpoint", "step", "epoch", "score", "ranks", "size", "zae", "state")]
    rows += [_row(entry) for entry in [*report["checkpoints"], *report["crashes"]]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if len(rows) > 1:
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for entry in [*report["checkpoints"], *report["crashes"]]:
        if entry["whole"]:
            lines.append(f"{_plain(entry['name'])}: {_plain(', '.join(entry['composition'])) or 'no add-on'}")
            if "parent" in entry:
                lines.append(f"{_plain(entry['name'])}: started from {_plain(_parent(entry['parent']))}")
        else:
            lines.append(f"{_plain(entry['name'])}: {entry['wrong']}")
    if report["weights"]:
        lines.append(f"files of weights alone, from which no run resumes: {', '.join(report['weights'])}")
    if report["left_behind"]:
        names = ", ".join(_plain(name) for name in report["left_behind"])
        lines.append(f"left by interrupted saves, removed by the next save: {names}")
    if report["holder"]:
        lines.append(f"in use: {report['holder']}")
    lines += [f"-> {_plain(line)}" for line in report["advice"]]
    return "\n".join(lines) + "\n"


def _row(checkpoint: dict[str, Any]) -> tuple[str, ...]:
    size = format_size(checkpoint["bytes"])
    if not checkpoint["whole"]:
        return (_plain(checkpoint["name"]), "-", "-", "-", "-", size, "-", "DAMAGED")
    value = checkpoint["score"]  # Of the manifest, which may be forged.
    shown = f"{value:.6g}" if isinstance(value, (int, float)) else _plain(value)
    score = "-" if value is None else f"{_plain(checkpoint['monitor'])} {shown}"
    numbers = (str(checkpoint["step"]), str(checkpoint["epoch"]), score, str(checkpoint["world_size"]))
    return (_plain(checkpoint["name"]), *numbers, size, _plain(checkpoint["zae"]), "whole")


def _parent(parent: dict[str, Any]) -> str:
    """Return what a run has started from; a manifest may be forged."""
    step = f", step {parent['step']} of run {parent.get('run_id')}" if "step" in parent else ""
    return f"{parent.get('path')}{step}"


def _left_behind(folder: Path) -> list[str]:
    """List the files of interrupted saves and removals."""
    return sorted(p.name for p in folder.glob(".*") if p.name.startswith((".staging-", ".replaced-", ".deleting-")))


def _holder(folder: Path) -> str | None:
    """Return the process that saves into the folder."""
    from zae.checkpoint.locks import FolderLock

    try:
        FolderLock(folder).check()
    except ConfigError as error:
        return _plain(error).partition("is in use: ")[2].partition(";")[0]
    return None


def _size(path: Path) -> int:
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path) if not entry.is_symlink())


def _plain(value: object) -> str:
    """Return text from a checkpoint without control characters."""
    return printable(str(value), kept="")
