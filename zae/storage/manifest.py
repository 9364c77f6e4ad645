"""What a checkpoint says of itself: the text of manifest.json, and every doubt about it.

No file is touched here. The manifest names each file of the checkpoint with its size, its SHA-256 and the step and run
it belongs to, and holds a hash of itself: a file that was cut, changed or taken from another checkpoint is told by it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, cast

from zae.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, ConfigError
from zae.storage.encoding import decode, encode
from zae.storage.hashed_io import CURE
from zae.storage.strict_json import strict_json

__all__ = [
    "FORMAT",
    "MANIFEST_LIMIT",
    "MODEL_FILES",
    "STATE",
    "STATE_LIMIT",
    "STATE_TENSORS",
    "FileEntry",
    "Manifest",
    "draft",
    "parse",
    "seal",
]

FORMAT = 1
"""The format of a checkpoint that this version writes, and the newest that it reads."""

MODEL_FILES = {"safetensors": "model.safetensors", "ckpt": "model.ckpt"}
"""The model's file in each format."""

STATE_TENSORS = "state.safetensors"
"""The file of every tensor that is not the model's."""

STATE = "state.json"
"""The file of everything that is no tensor."""

MANIFEST_LIMIT = 16 << 20
"""The largest manifest that is written or read, in bytes."""

STATE_LIMIT = 256 << 20
"""The largest state.json that is written or read, in bytes."""


_LAST = b',\n "sha256": "%s"\n}\n'
_SEALED = re.compile(rb',\n "sha256": "[0-9a-f]{64}"\n}\n')


class FileEntry(TypedDict):
    """What the manifest says of one file; step and run_id repeat the manifest's own, or the files are mixed."""

    size: int
    sha256: str
    step: int
    run_id: str


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
    tied: dict[str, str]  # each tied name of the model's state, and the name that is written for it
    files: dict[str, FileEntry]
    info: dict[str, Any]  # the caller's own
    sha256: str  # of the manifest without this entry


def draft(model_format: str, tied: Mapping[str, str], about: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a checkpoint that has no files yet.

    Parameters
    ----------
    model_format : str
        A key of `MODEL_FILES`.
    tied : mapping of str to str
        Each tied name of the model's state, and the name that is written for it.
    about : mapping
        ``run_id``, ``step``, ``epoch``, ``composition``, ``world_size``, and at will ``info``.

    Returns
    -------
    Manifest
        With ``info`` as `zae.storage.encoding.encode` writes it, no files and no hash.

    Raises
    ------
    ConfigError
        An entry of `about` is missing, unknown or of the wrong kind.

    Examples
    --------
    >>> draft("ckpt", {}, {"run_id": "demo", "step": -1, "epoch": 0, "composition": [], "world_size": 1})
    Traceback (most recent call last):
    ...
    zae.errors.ConfigError: manifest_info: the entry 'step' is -1, which is not a whole number from 0
    """
    asked = {"run_id", "step", "epoch", "composition", "world_size", "info"}
    if unknown := sorted(about.keys() - asked):
        raise ConfigError(f"manifest_info: the entry {unknown[0]!r} is unknown; write {sorted(asked)}")
    info, tensors = encode(about.get("info", {}))
    if tensors:
        raise ConfigError(f"manifest_info['info'] holds a tensor at {next(iter(tensors))!r}; put it into the state")
    fixed = {"format": FORMAT, "zae": _version(), "model_format": model_format, "tied": dict(tied)}
    content = {**about, **fixed, "files": {}, "info": info, "sha256": ""}
    if fault := _fault(content):
        raise ConfigError(f"manifest_info: {fault}")
    return cast(Manifest, {key: content[key] for key in Manifest.__annotations__})


def seal(content: Mapping[str, Any]) -> bytes:
    """Return the one text of a manifest, its own hash in it.

    Any other bytes are a manifest that was changed. This rule holds for every format, so that a changed format number
    is not taken for a newer zae.

    Parameters
    ----------
    content : mapping
        A manifest; its ``sha256`` is not looked at.

    Returns
    -------
    bytes
        Indented JSON.

    Raises
    ------
    CheckpointError
        The text is larger than `MANIFEST_LIMIT`.

    Examples
    --------
    >>> seal({"step": 12})[:60]
    b'{\\n "step": 12,\\n "sha256": "eb2162379243bdb9fefe4e9a691721c6f'
    """
    body = {key: value for key, value in content.items() if key != "sha256"}
    plain = json.dumps(body, indent=1, allow_nan=False).encode()
    # The hash is the last entry of the same text: it is put in before the bracket that ends it.
    last = _LAST if body else b'{\n "sha256": "%s"\n}\n'
    text = plain[: -len("\n}")] + last % hashlib.sha256(plain).hexdigest().encode()
    if len(text) > MANIFEST_LIMIT:
        raise CheckpointError(f"the manifest takes {len(text)} bytes, the limit is {MANIFEST_LIMIT}; shorten its info")
    return text


def parse(data: bytes, where: str) -> Manifest:
    """Read the text of a manifest, and believe nothing of it that does not fit.

    Parameters
    ----------
    data : bytes
        The file.
    where : str
        Its path, for messages.

    Returns
    -------
    Manifest
        Of a format that this version reads, with ``info`` decoded. Its files are those that its format has, no others.

    Raises
    ------
    CheckpointDamaged
        It is none, was changed, or describes no checkpoint.
    CheckpointMismatch
        A newer zae wrote it.

    Examples
    --------
    >>> parse(b'{"format": 1}', "manifest.json")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointDamaged: manifest.json: changed since it was written: expected sha256 none, got 5e5fbf8b2105. \
Restore the file...
    """
    content = strict_json(data, where)
    if not isinstance(content, dict) or type(content.get("format")) is not int or content["format"] < 1:
        raise CheckpointDamaged(f"{where}: names no format of a checkpoint. {CURE}")
    newer = (
        f"written by zae {str(content.get('zae'))[:40]!r}, format {content['format']}; "
        f"this version reads up to {FORMAT}; upgrade zae"
    )
    found, got = content.get("sha256"), _digest(data)
    if found != got:
        shown = ascii(found[:12])[1:-1] if isinstance(found, str) else "none"
        either = f" (or it was {newer})" if content["format"] > FORMAT else ""
        raise CheckpointDamaged(
            f"{where}: changed since it was written: expected sha256 {shown}, got {got[:12]}{either}. {CURE}"
        )
    if content["format"] > FORMAT:
        raise CheckpointMismatch(f"{where}: {newer}")
    if fault := _fault(content) or _files_fault(content):
        raise CheckpointDamaged(f"{where}: {fault}. {CURE}")
    content["info"] = decode(content["info"], {}, where=where)
    return cast(Manifest, content)


def _digest(data: bytes) -> str:
    """Return the hash that a manifest ought to have; not from its content, whose text could be of another length."""
    # Without a last entry of this very form it is not sealed: the hash is then that of no manifest.
    end = data[-len(_LAST % (b"0" * 64)) :]
    plain = data.removesuffix(end) + b"\n}" if _SEALED.fullmatch(end) else data
    return hashlib.sha256(plain).hexdigest()


def _version() -> str:
    """Return the version of the zae that runs, which need not be the one that is installed."""
    return str(getattr(sys.modules.get("zae"), "__version__", "unknown"))


def _fault(content: Mapping[str, Any]) -> str | None:
    """Say which entry of a manifest is missing, unknown or of the wrong kind."""

    def texts(value: Any) -> bool:
        return all(type(text) is str for text in value)

    rules: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "format": ("a whole number", lambda value: type(value) is int),
        "zae": ("text", lambda value: type(value) is str),
        "run_id": ("text", lambda value: type(value) is str),
        "step": ("a whole number from 0", lambda value: type(value) is int and value >= 0),
        "epoch": ("a whole number from 0", lambda value: type(value) is int and value >= 0),
        "composition": ("a list of names", lambda value: type(value) is list and texts(value)),
        "world_size": ("a whole number from 1", lambda value: type(value) is int and value >= 1),
        "model_format": (f"one of {list(MODEL_FILES)}", lambda value: type(value) is str and value in MODEL_FILES),
        "tied": ("a dict of names", lambda value: type(value) is dict and texts(value.values())),
        "files": ("a dict", lambda value: type(value) is dict),
        "info": ("a dict", lambda value: type(value) is dict),
        "sha256": ("text", lambda value: type(value) is str),
    }
    for key in sorted(rules.keys() ^ content.keys()):
        return f"the entry {key!r:.80} is {'missing' if key in rules else 'unknown'}"
    for key, (kind, fits) in rules.items():
        if not fits(content[key]):
            return f"the entry {key!r} is {content[key]!r:.80}, which is not {kind}"
    return None


def _files_fault(content: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the list of files; no name in it reaches the disk unless it is one of three."""
    expected = {MODEL_FILES[content["model_format"]], STATE_TENSORS, STATE}
    for name in sorted(content["files"].keys() ^ expected):
        return f"lists the file {name!r:.80}, which is no part of it" if name not in expected else f"lacks {name}"
    for name, entry in content["files"].items():
        if type(entry) is not dict or entry.keys() != FileEntry.__annotations__.keys():
            return f"describes {name} in another way than {list(FileEntry.__annotations__)}"
        if type(entry["size"]) is not int or entry["size"] < 0:
            return f"gives {name} the size {entry['size']!r:.80}"
        if type(entry["sha256"]) is not str or not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
            return f"gives {name} the sha256 {entry['sha256']!r:.80}"
        for key in ("step", "run_id"):
            if entry[key] != content[key]:
                return f"is of {key} {content[key]!r:.80}, and {name} of {entry[key]!r:.80}: mixed checkpoints"
    if content["files"][STATE]["size"] > STATE_LIMIT:
        return f"claims {content['files'][STATE]['size']} bytes for {STATE}; the limit is {STATE_LIMIT}"
    return None
