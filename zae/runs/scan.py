"""Find the runs below a folder, from the manifests of their checkpoints alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zae.errors import CheckpointError, ConfigError

__all__ = ["Found", "Run", "find_runs"]

_NAMED = re.compile(r"(?:step|crash)-\d{8,18}")


@dataclass
class Run:
    """The checkpoints of one run in one folder.

    Attributes
    ----------
    top, folder : Path
        The folder that was searched, and the one with the checkpoints.
    run_id : str
        That of their manifests.
    saved, failed : list of dict
        What the manifests of the checkpoints, and of the states of failed runs, say; the lowest step first.
    """

    top: Path
    folder: Path
    run_id: str
    saved: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def all(self) -> list[dict[str, Any]]:
        """The checkpoints, or if there is none the states of failed runs."""
        return self.saved or self.failed

    @property
    def newest(self) -> dict[str, Any]:
        """What the newest manifest says."""
        return self.all[-1]

    @property
    def best(self) -> dict[str, Any] | None:
        """The checkpoint with the best score by the newest monitor, None if it is not known which is better."""
        monitor, options = self.newest["monitor"], self.newest["options"] or {}
        choose = {"min": min, "max": max}.get(_direction(monitor, options.get("monitor_mode")) or "")
        scored = [each for each in self.all if each["score"] is not None and each["monitor"] == monitor]
        return choose(scored, key=lambda each: each["score"]) if scored and choose is not None else None


@dataclass
class Found:
    """The runs below some folders, and the folders that could not be read, with the reason.

    ``damaged`` are named like checkpoints, ``foreign`` have a manifest.json of something else.
    """

    runs: list[Run] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)


def find_runs(folders: Iterable[Path]) -> Found:
    """Group the checkpoints below the folders by folder and run; ConfigError if one of them is not a folder."""
    from zae.checkpoint.filesystem import original_name
    from zae.checkpoint.manifest import read_manifest  # It imports torch, which takes seconds: not for --help.

    found, runs, seen = Found(), dict[tuple[str, str], Run](), set[str]()
    for top in folders:
        if not top.is_dir():
            raise ConfigError(f"{top} is not a folder; give one that contains runs, or the save_path of a run")
        for path, error in _candidates(top):
            if (real := os.path.realpath(path)) in seen:
                continue
            seen.add(real)
            name = original_name(path.name)
            try:
                if error is not None:
                    raise error
                manifest = read_manifest(path)
            except (CheckpointError, OSError) as fault:
                is_ours = error is not None or _NAMED.fullmatch(name)
                (found.damaged if is_ours else found.foreign)[str(path)] = str(fault)
                continue
            key = os.path.dirname(real), manifest["run_id"]
            each = runs.setdefault(key, Run(top, path.parent, manifest["run_id"]))
            (each.failed if name.startswith("crash-") else each.saved).append(_facts(path, manifest))
    for each in runs.values():
        each.saved.sort(key=lambda facts: facts["step"])
        each.failed.sort(key=lambda facts: facts["step"])
    found.runs = list(runs.values())
    return found


def _candidates(top: Path) -> Iterator[tuple[Path, OSError | None]]:
    """Yield each folder that may be a checkpoint, and each that cannot be listed; links are not followed."""
    from zae.checkpoint.filesystem import MANIFEST, entries_of, holds_checkpoint, original_name

    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(entries_of(folder), key=lambda entry: entry.name, reverse=True)
            below = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError as error:
            yield folder, error
            continue
        is_named = _NAMED.fullmatch(original_name(folder.name)) is not None and holds_checkpoint(folder)
        if is_named or any(each.name == MANIFEST for each in entries):
            yield folder, None
        if not is_named:
            waiting += [each for each in below if each.name[0] != "." or original_name(each.name) != each.name]


def _facts(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the command shows of a manifest; the entries of ``info`` may be forged."""
    info = manifest["info"]
    options, parent, resumed, score = (info.get(key) for key in ("options", "parent", "resumed_at", "score"))
    facts = {key: manifest[key] for key in ("step", "epoch", "composition", "world_size", "zae", "sha256")}
    return {
        "name": path.name,
        **facts,
        "monitor": _plain(info.get("monitor")),
        "score": score if type(score := _plain(score)) in (int, float) else None,
        "error": _plain(info.get("error")),
        "options": _entries(options),
        "parent": _entries(parent),
        "resumed_at": [_plain(step) for step in resumed if type(step) is int] if isinstance(resumed, list) else [],
        **{part: _entries(info.get(part)) or {} for part in ("code", "versions", "data")},
    }


def _entries(found: Any) -> dict[str, Any] | None:
    return {str(key): _plain(value) for key, value in found.items()} if isinstance(found, dict) else None


def _plain(value: Any) -> Any:
    """Return a value that JSON has, and that is short."""
    if value is None or type(value) is bool or (type(value) is int and abs(value) < 2**63):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is list and all(type(each) is str for each in value):
        return ", ".join(value)[:400]
    return value[:400] if type(value) is str else f"<{type(value).__name__}>"


def _direction(monitor: Any, mode: Any) -> str | None:
    """Return "min" or "max", None if neither the options nor the name of the metric say it."""
    from zae.loop.history import direction_of

    try:
        return mode if mode in ("min", "max") else direction_of(monitor)
    except ConfigError:
        return None
