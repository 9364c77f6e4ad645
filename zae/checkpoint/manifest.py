"""Checkpoint manifests: draft, seal, parse, and compare with the files of a checkpoint.

A manifest names each file with its size and its SHA-256, and contains a hash of itself, so that a file that was cut,
changed or taken from another checkpoint is detected.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from zae.checkpoint.encoding import decode, encode
from zae.checkpoint.hashed_files import REMEDY, read_whole
from zae.checkpoint.json_text import STATE_LIMIT, strict_json
from zae.checkpoint.names import MANIFEST, MODEL_FILES, PIECE, SHARDS, STATE, STATE_TENSORS, shard_name
from zae.checkpoint.tensor_files import SUFFIXES
from zae.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
)

__all__ = [
    "FORMAT",
    "MANIFEST_LIMIT",
    "ROWS_FORMAT",
    "SHARDED_FORMAT",
    "FileEntry",
    "Manifest",
    "check_progress",
    "draft",
    "parse",
    "read_manifest",
    "seal",
]

FORMAT = 1
"""The format of a checkpoint without shards that this version writes."""

SHARDED_FORMAT = 2
"""The format of one with shards."""

ROWS_FORMAT = 3
"""The format of one with rows in files, also with shards, and the newest that this version reads."""

MANIFEST_LIMIT = 16 << 20
"""The largest manifest that is written or read, in bytes."""

_LAST = b',\n "sha256": "%s"\n}\n'
_SEALED = re.compile(rb',\n "sha256": "[0-9a-f]{64}"\n}\n')


class FileEntry(TypedDict):
    """The entry of one file."""

    size: int
    sha256: str


class Manifest(TypedDict):
    """The content of manifest.json."""

    format: int
    zae: str  # the version that wrote it
    run_id: str
    step: int
    epoch: int
    composition: list[str]  # the names of the add-ons
    world_size: int
    model_format: str  # a key of MODEL_FILES
    tied: dict[str, str]  # each tied name in the model's state, and the name that is written for it
    files: dict[str, FileEntry]
    info: dict[str, Any]  # what the caller adds
    sha256: str  # of the manifest without this entry


def draft(
    model_format: str, tied: Mapping[str, str], about: Mapping[str, Any], has_rows: bool = False, run: Any = None
) -> Manifest:
    """Return the manifest of a checkpoint that has no files yet, from what the caller says about it.

    ``run`` is what the run was given (`zae.record`) as it is encoded in the state; ``info`` shows it too.
    """
    info, tensors = encode(about.get("info", {}))
    info |= {} if run is None else {"run": run}
    if tensors:
        raise ConfigError(f"manifest_info['info'] holds a tensor at {next(iter(tensors))!r}; put it into the state")
    number = ROWS_FORMAT if has_rows else SHARDED_FORMAT if model_format == "sharded" else FORMAT
    fixed = {"format": number, "zae": _version(), "model_format": model_format, "tied": dict(tied)}
    content = {**about, **fixed, "files": {}, "info": info, "sha256": ""}
    return cast(Manifest, {key: content[key] for key in Manifest.__annotations__})


def seal(content: Mapping[str, Any]) -> bytes:
    """Return the one valid text of a manifest, with its own hash in it.

    Any other bytes are a manifest that was changed. This rule holds for every format, so that a changed format number
    is not mistaken for a newer zae.
    """
    body = {key: value for key, value in content.items() if key != "sha256"}
    plain = json.dumps(body, indent=1, allow_nan=False).encode()
    # The hash is the last entry of the same text: it is inserted before the bracket that ends it.
    last = _LAST if body else b'{\n "sha256": "%s"\n}\n'
    text = plain[: -len("\n}")] + last % hashlib.sha256(plain).hexdigest().encode()
    if len(text) > MANIFEST_LIMIT:
        raise CheckpointError(f"the manifest takes {len(text)} bytes, the limit is {MANIFEST_LIMIT}; shorten its info")
    return text


def parse(data: bytes, where: str) -> Manifest:
    """Check the text of a manifest, from the file `where`, and return its content with ``info`` decoded.

    Raise CheckpointDamaged if it was changed or does not describe a checkpoint, CheckpointMismatch if it was written
    by a newer zae.
    """
    content = strict_json(data, where)
    if not isinstance(content, dict) or type(content.get("format")) is not int or content["format"] < 1:
        raise CheckpointDamaged(f"{where}: names no format of a checkpoint. {REMEDY}")
    newer = (
        f"written by zae {str(content.get('zae'))[:40]!r}, format {content['format']}; "
        f"this version reads up to {ROWS_FORMAT}; upgrade zae"
    )
    expected = content.get("sha256")
    actual = _digest(data)
    if expected != actual:
        shown = ascii(expected[:12])[1:-1] if isinstance(expected, str) else "none"
        either = f" (or it was {newer})" if content["format"] > ROWS_FORMAT else ""
        raise CheckpointDamaged(
            f"{where}: changed since it was written: expected sha256 {shown}, got {actual[:12]}{either}. {REMEDY}"
        )
    if content["format"] > ROWS_FORMAT:
        raise CheckpointMismatch(f"{where}: {newer}")
    if fault := _fault(content) or _files_fault(content):
        raise CheckpointDamaged(f"{where}: {fault}. {REMEDY}")
    content["info"] = decode(content["info"], {}, where=where)
    return cast(Manifest, content)


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a checkpoint, without its other files."""
    _refuse_other_folder(directory)
    return parse(read_whole(directory / MANIFEST, limit=MANIFEST_LIMIT), str(directory / MANIFEST))


def _refuse_other_folder(directory: Path) -> None:
    """Say of a folder that holds something else than a checkpoint what it is, and which call takes it."""
    names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()
    weights = sorted(name for name in names if Path(name).suffix in SUFFIXES)
    if names & {MANIFEST, STATE, STATE_TENSORS, SHARDS} or not names:  # A damaged one.
        return
    if "adapter_config.json" in names:
        instead = f"it holds an adapter of PEFT: PeftModel.from_pretrained(model, {str(directory)!r})"
    elif len(weights) == 1:
        file = str(directory / weights[0])
        instead = (
            f"give the file of weights in it: {file!r}, to start_from or apply_weights. A run resumes only from a "
            "checkpoint"
        )
    else:
        instead = "give one, or a file of weights to start_from or apply_weights"
    raise CheckpointNotFound(f"{directory} is a folder without a checkpoint; {instead}")


def _digest(data: bytes) -> str:
    """Return the hash that a manifest must contain, from its text: the content could be written in several ways."""
    # Without a last entry in exactly this form it is not sealed, and this is the hash of something else.
    end = data[-len(_LAST % (b"0" * 64)) :]
    plain = data.removesuffix(end) + b"\n}" if _SEALED.fullmatch(end) else data
    return hashlib.sha256(plain).hexdigest()


def _version() -> str:
    """Return the version of the running zae, which need not be the installed one."""
    return str(getattr(sys.modules.get("zae"), "__version__", "unknown"))


_ENTRIES: dict[str, tuple[type, str]] = {  # The type of each entry, and how an error names what it must be.
    "format": (int, "a whole number"),
    "zae": (str, "text"),
    "run_id": (str, "text"),
    "step": (int, "a whole number from 0"),
    "epoch": (int, "a whole number from 0"),
    "composition": (list, "a list of names"),
    "world_size": (int, "a whole number from 1"),
    "model_format": (str, f"one of {list(MODEL_FILES)}"),
    "tied": (dict, "a dict of names"),
    "files": (dict, "a dict"),
    "info": (dict, "a dict"),
    "sha256": (str, "text"),
}
_MINIMUM = {"step": 0, "epoch": 0, "world_size": 1}


def _fault(content: Mapping[str, Any]) -> str | None:
    """Return which entry of a manifest is missing, unknown or invalid; None if all are valid."""
    for key in sorted(_ENTRIES.keys() ^ content.keys()):
        return f"the entry {key!r:.80} is {'missing' if key in _ENTRIES else 'unknown'}"
    for key, (kind, name) in _ENTRIES.items():
        if type(content[key]) is not kind or not _is_allowed(key, content[key]):
            return f"the entry {key!r} is {content[key]!r:.80}, which is not {name}"
    return None


def _is_allowed(key: str, value: Any) -> bool:
    """Return whether an entry of the right type has a value that a manifest may have."""
    if key in _MINIMUM:
        return bool(value >= _MINIMUM[key])
    if key == "model_format":
        return value in MODEL_FILES
    if key in ("composition", "tied"):
        return {str}.issuperset(map(type, value.values() if key == "tied" else value))
    return True


def _files_fault(content: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the list of files; only known names ever reach the disk."""
    expected = {MODEL_FILES[content["model_format"]], STATE_TENSORS, STATE}
    if content["model_format"] == "sharded":
        if content["format"] < SHARDED_FORMAT:
            return f"is sharded, and of format {content['format']}"
        ranks = min(content["world_size"], len(content["files"]))  # A forged number must not take all memory.
        expected |= {SHARDS, *map(shard_name, range(ranks))}
    if content["format"] == ROWS_FORMAT:
        expected |= {name for name in content["files"] if PIECE.fullmatch(name)}
    for name in sorted(content["files"].keys() ^ expected):
        return f"lists the file {name!r:.80}, which is not part of it" if name not in expected else f"lacks {name}"
    for name, entry in content["files"].items():
        if type(entry) is not dict or entry.keys() != FileEntry.__annotations__.keys():
            return f"describes {name} with other entries than {list(FileEntry.__annotations__)}"
        if type(entry["size"]) is not int or entry["size"] < 0:
            return f"gives {name} the size {entry['size']!r:.80}"
        if type(entry["sha256"]) is not str or not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
            return f"gives {name} the sha256 {entry['sha256']!r:.80}"
        if name.endswith(".json") and entry["size"] > STATE_LIMIT:
            return f"claims {entry['size']} bytes for {name}; the limit is {STATE_LIMIT}"
    return None


def check_progress(path: Path, manifest: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose state has another step or epoch than its manifest."""
    progress = state.get("progress")
    if not isinstance(progress, Mapping):
        return
    for name in ("step", "epoch"):
        if progress.get(name) != manifest[name]:
            raise CheckpointMismatch(
                f"{path}: the manifest says {name} {manifest[name]}, and the state {name} "
                f"{progress.get(name)!r:.40}; somebody has changed it: load another checkpoint"
            )
